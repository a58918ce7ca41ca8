"""Chunked prefill as a pure function: whose tokens go into the next forward."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from prefill_node.request import PrefillRequest


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens start .. start+length of one prompt."""

    request: PrefillRequest
    start: int
    length: int

    @property
    def final(self) -> bool:
        return self.start + self.length == self.request.num_tokens


def plan_chunks(computing: Iterable[PrefillRequest], token_budget: int, max_batch: int) -> list[Chunk]:
    """First come, first served under one token budget; the prompt that meets its end is cut there.

    Prompts whose tokens are all launched are passed over. The oldest prompt always advances.
    """
    chunks: list[Chunk] = []
    for request in computing:
        if token_budget == 0 or len(chunks) == max_batch:
            break
        length = min(request.remaining, token_budget)
        if length > 0 and not request.ended:
            chunks.append(Chunk(request, request.scheduled, length))
            token_budget -= length
    return chunks
