"""Asks the same prompts until the decode node has retracted a request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tests.cluster.harness import Answer, Client

MAX_ROUNDS = 5


async def complete_until_retracted(
    client: Client, prompts: Sequence[list[int]], max_tokens: int
) -> tuple[list[Answer], int, dict[str, Any]]:
    """Complete all prompts at once, and again if none was retracted, at most MAX_ROUNDS times.

    On a busy machine answers may end before others begin, so that all pages suffice.

    Returns: the answers of all rounds, the number of rounds, and the counters of decode-0.
    """
    answers: list[Answer] = []
    counters: dict[str, Any] = {"retractions": 0}
    rounds = 0
    while not counters["retractions"] and rounds < MAX_ROUNDS:
        answers += await client.complete_all(prompts, len(prompts), max_tokens)
        rounds += 1
        await client.wait_idle()
        counters = (await client.node("decode-0"))["counters"]
    return answers, rounds, counters
