"""Qwen3.5 with experts and images on real processes: greedy texts equal those of transformers.

States and images cross the cut, prompts come in chunks, and drafts are verified.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.harness import Client, RunningCluster
from tests.cluster.picture_chats import ASKED, answered, ask, body_of, write_model
from tests.fakes.qwen_3_5 import build

pytestmark = pytest.mark.timeout(900)  # two busy cores

LIKELY = range(100, 112)  # so few tokens that answers repeat themselves, and drafts are found in them
CONFIG: dict[str, Any] = {
    # Chunks are rounded to 64 tokens. 12 pages are too few for all requests at once.
    "prefill": {"chunk_tokens": 7, "graphs": "breakable"},
    "decode": {"graphs": "full", "max_running": 4, "pool_tokens": 12 * 16, "reserved_tokens": 0},
    "speculation": {"algorithm": "ngram", "steps": 3},
}


async def test_the_answers_are_those_of_transformers(tmp_path: Path) -> None:
    text = {"max_position_embeddings": 2048}
    made = write_model(
        tmp_path / "model",
        lambda names, vocabulary: build(experts=True, outer=names, text={**text, "vocab_size": vocabulary}),
        LIKELY,
    )
    served = answered(tmp_path / "model", *made)
    config = {**CONFIG, "model": {"path": str(served.path)}}
    async with RunningCluster(tmp_path, config=config) as cluster, Client(cluster.url) as client:
        for _ in range(2):  # the second time with states of cached prefixes
            found = await asyncio.gather(*(ask(client, body_of(parts)) for parts in ASKED))
            for parts, prompt, expected, answer in zip(
                ASKED, served.prompts, served.answers, found, strict=True
            ):
                assert answer["choices"][0]["message"]["content"] == expected, parts
                assert answer["usage"]["prompt_tokens"] == len(prompt)
        await client.wait_idle()
        counters = (await client.node("decode-0"))["counters"]
    assert counters["spec_accepted_tokens"] > 0
