"""Pages of prompts that MTP modules partly recompute at every chunk arrive over TCP as they were when sent."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from tests.cluster.conftest import Reference
from tests.cluster.harness import MODEL, Client, RunningCluster

pytestmark = pytest.mark.timeout(900)  # two busy cores

REQUESTS = 60 if "TANDEM_EXPLORE" in os.environ else 30
CHAINED_MODULES = {
    "speculation": {"algorithm": "mtp", "draft_model_path": str(MODEL.parent / "tiny-mtp"), "steps": 3},
    "kv": {"page_size": 2},
    "model": {"max_model_len": 160},
    "prefill": {"chunk_tokens": 5, "pool_tokens": 400},
    "decode": {"pool_tokens": 400, "max_running": 8},
    "transfer": {"transport": "tcp"},
}


async def test_small_pages_and_chunks_of_chained_modules_keep_their_checksums(
    reference: Reference, tmp_path: Path
) -> None:
    """No transfer fails and no request is placed twice, although the sender reads while further chunks are computed."""
    rng = random.Random(3)
    prompts = [[rng.randrange(3, 400) for _ in range(rng.randrange(40, 120))] for _ in range(REQUESTS)]
    async with RunningCluster(tmp_path, config=CHAINED_MODULES) as cluster, Client(cluster.url) as client:
        answers = await client.complete_all(prompts, 12, 8)
        await client.wait_idle()
        prefill = (await client.node("prefill-0"))["counters"]
        decode = (await client.node("decode-0"))["counters"]
    assert decode["checksum_failures"] == prefill["transfer_failures"] == decode["transfer_failures"] == 0
    assert prefill["requests"] == len(prompts)
    for prompt, answer in zip(prompts[:10], answers):
        assert answer.tokens == reference(prompt, 8, answer.tokens)
