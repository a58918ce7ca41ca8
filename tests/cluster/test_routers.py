"""Several router processes of one host, in front of the same nodes."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.cluster.conftest import Reference
from tests.cluster.harness import RunningCluster

pytestmark = pytest.mark.timeout(900)  # two busy cores


async def test_two_routers_serve_with_one_pair_of_nodes(tmp_path: Path, reference: Reference) -> None:
    async with RunningCluster(tmp_path, 1, 1, routers=2) as cluster:
        async with cluster.at("router") as first, cluster.at("router.1") as second:
            prompts = [[5, 6, 7, 8], [9, 10, 11]]
            answers = await asyncio.gather(first.complete(prompts[0], 12), second.complete(prompts[1], 12))
            for prompt, answer in zip(prompts, answers, strict=True):
                assert answer.tokens == reference(prompt, 12)
