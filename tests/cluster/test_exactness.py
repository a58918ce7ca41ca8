"""Greedy output through HTTP equals `transformers` token by token, however the work is divided and moved."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.conftest import LONGEST, OUTPUT_TOKENS, Reference
from tests.cluster.harness import Answer, Client, RunningCluster

pytestmark = pytest.mark.timeout(900)  # two busy cores


@dataclass(frozen=True)
class Case:
    """One way to divide and move the work."""

    name: str
    config: dict[str, Any]
    prefill: int = 1
    decode: int = 1
    max_tokens: int = OUTPUT_TOKENS
    counters: dict[str, int] = field(default_factory=dict)  # minimum totals over decode nodes afterwards
    every: int = 1  # use each prompt whose index is a multiple of this
    longest: int = LONGEST  # ... and that is not longer


CASES = [
    Case(
        "tcp-chunk64-page64",
        {"kv": {"page_size": 64}, "prefill": {"chunk_tokens": 64}, "transfer": {"transport": "tcp"}},
        every=7,
    ),
    # one forward per token
    Case("chunk1-page16", {"prefill": {"chunk_tokens": 1}}, every=14, longest=250),
    Case(
        "chunk7-page1-2p2d-round-robin",
        {
            "kv": {"page_size": 1},
            "prefill": {"chunk_tokens": 7},
            "router": {"placement": {"prefill": "round_robin", "decode": "round_robin"}},
        },
        prefill=2,
        decode=2,
        every=6,
    ),
    Case(
        "small-pool-one-behind",
        {
            "decode": {"pool_tokens": 1600, "reserved_tokens": 0, "read_results": "one_behind"},
            "prefill": {"pool_tokens": 1600, "chunk_tokens": 512},
        },
        max_tokens=60,
        counters={"retractions": 1},
        every=5,
    ),
    Case(
        "graphs-on-the-tape",
        {
            "prefill": {"graphs": "breakable", "chunk_tokens": 256},
            "decode": {"graphs": "full", "max_running": 16},
        },
        every=6,
    ),
    Case(
        "2p2d-tcp-no-prefix-cache",
        {
            "transfer": {"transport": "tcp"},
            "prefill": {"prefix_cache": False, "chunk_tokens": 256},
            "decode": {"prefix_cache": False, "read_results": "one_behind"},
        },
        prefill=2,
        decode=2,
        every=5,
    ),
]


def differences(
    prompts: list[list[int]], answers: list[Answer], reference: Reference, length: int
) -> list[str]:
    """Return a line for each prompt whose tokens differ."""
    return [
        f"{len(prompt)} tokens: {answer.tokens} instead of {reference(prompt, length)}"
        for prompt, answer in zip(prompts, answers, strict=True)
        if answer.tokens != reference(prompt, length, answer.tokens)
    ]


async def test_tokens_are_equal_one_by_one_at_once_and_from_the_caches(
    cluster: RunningCluster, prompts: list[list[int]], reference: Reference
) -> None:
    """Whole prompts run in one chunk: one after another, then 32 at once with prefix hits on both nodes."""
    chosen = prompts[::4]
    async with Client(cluster.url) as client:
        alone = await client.complete_all(chosen, 1, OUTPUT_TOKENS)
        assert not differences(chosen, alone, reference, OUTPUT_TOKENS)
        again = await client.complete_all(chosen, 32, OUTPUT_TOKENS)
        assert not differences(chosen, again, reference, OUTPUT_TOKENS)
        hits = [answer.usage["prompt_tokens_details"]["cached_tokens"] for answer in again]
        assert all(hit == (len(p) - 1) // 16 * 16 for hit, p in zip(hits, chosen, strict=True))
        await client.wait_idle()
        decode = (await client.node("decode-0"))["counters"]
        assert decode["cached_tokens"] > 0, "the decode node's own prefix cache was never hit"


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
async def test_tokens_are_equal_however_the_work_is_divided(
    case: Case, prompts: list[list[int]], reference: Reference, tmp_path: Path
) -> None:
    chosen = [prompt for prompt in prompts[:: case.every] if len(prompt) <= case.longest]
    async with RunningCluster(tmp_path, case.prefill, case.decode, case.config) as cluster:
        for name in cluster.names:  # none listens outside of loopback
            assert {address for address, _ in cluster.listens_at(name)} <= {"127.0.0.1"}
        async with Client(cluster.url) as client:
            shown: dict[str, int] = {}
            for _ in range(5):  # which pairs form depends on the speed of the nodes
                answers = await client.complete_all(chosen, 32, case.max_tokens)
                assert not differences(chosen, answers, reference, case.max_tokens)
                await client.wait_idle()
                nodes = (await client.info())["nodes"]
                decodes = [node["counters"] for node in nodes if node["role"] == "decode"]
                shown = {name: sum(each[name] for each in decodes) for name in case.counters}
                shown |= {node["name"]: node["counters"]["requests"] for node in nodes}
                if all(count >= case.counters.get(name, 1) for name, count in shown.items()):
                    break
            else:
                raise AssertionError(f"this case did not show what it is for: {shown}")


async def test_next_turn_moves_only_new_pages(cluster: RunningCluster) -> None:
    """When a chat continues, the decode node already has the prompt and the answer of the first turn."""
    question = {"role": "user", "content": "Ann has 12 pens. " * 20 + "How many pens does Ann have?"}
    async with Client(cluster.url) as client:

        async def turn(messages: list[dict[str, str]]) -> dict[str, Any]:
            body = {"messages": messages, "max_tokens": 40, "temperature": 0}
            async with client.session.post("/v1/chat/completions", json=body) as response:
                assert response.status == 200
                answer: dict[str, Any] = await response.json()
                return answer

        first = await turn([question])
        await client.wait_idle()
        before = (await client.node("decode-0"))["counters"]
        reply = {"role": "assistant", "content": first["choices"][0]["message"]["content"]}
        second = await turn([question, reply, {"role": "user", "content": "And now?"}])
        await client.wait_idle()
        after = (await client.node("decode-0"))["counters"]
    held = first["usage"]["total_tokens"] - 1  # the last token was drawn but its KV never written
    assert after["cached_tokens"] - before["cached_tokens"] == held // 16 * 16
    moved = after["transferred_pages"] - before["transferred_pages"]
    assert moved == -(-second["usage"]["prompt_tokens"] // 16) - held // 16
