"""Chunked prefill as a pure function: whose tokens go into the next forward."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from common.engine.announced_work import Work
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


IMAGE_WEIGHT = 8  # tokens of text that an image's token may take as long as, where its encoder runs


def chunk_work(chunks: list[Chunk]) -> Work:
    """How much one forward over these chunks has to do. An image is encoded whole with its first rows."""
    images = 0
    for chunk in chunks:
        end = chunk.start + chunk.length
        for image in chunk.request.images:
            first, last = image.overlap(chunk.start, end)
            images += image.span.length if first < last else 0
    contexts = sum(chunk.length * (chunk.start + chunk.length) for chunk in chunks)
    return Work.of(sum(chunk.length for chunk in chunks), contexts, IMAGE_WEIGHT * images)


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
