"""Embeddings of a batch with images: encodes all new images, and writes their rows over the placeholder rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from common.engine.encoder_sizes import ENCODER_BATCH, ENCODER_TOKENS
from common.engine.forward.batch import ForwardBatch
from common.engine.models.vision_part import Pixels, VisionPart
from prefill_node.images import PromptImage, RowCache
from prefill_node.scheduler import Chunk

Embed = Callable[[Tensor], Tensor]  # ids [T] -> [T, H]


@dataclass(frozen=True, slots=True)
class MergedEmbeds:
    """The target's input in one forward, for a draft that reads the same tokens one position ahead."""

    rows: Tensor  # [T, H]; of live tokens only, without padding
    chunks: Sequence[Chunk]
    embed: Embed

    @torch.inference_mode()
    def rotated(self, batch: ForwardBatch, next_ids: Tensor) -> Tensor:
        """[T, H]: row t holds the embedding of the token after t.

        Inside a chunk that is the target's next row. The last row of a chunk gets a row of an image if the prompt
        continues with one, otherwise the embedding of its `next_ids` [T] entry: the prompt's next token, or the drawn
        token.
        """
        tails = batch.query_start[1:].long() - 1
        tail_rows = self.embed(next_ids.index_select(0, tails))
        for row, chunk in enumerate(self.chunks):
            position = chunk.start + chunk.length
            _overlay(tail_rows[row : row + 1], chunk.request.images, position)
        return self.rows.roll(-1, dims=0).index_copy_(0, tails, tail_rows)


class PromptEmbeds(Protocol):
    """Computes the input embeddings of a step."""

    def __call__(self, chunks: Sequence[Chunk], batch: ForwardBatch) -> MergedEmbeds | None:
        """Return the embeddings; None for a batch without images, whose ids are sufficient."""
        ...

    def warm_up(self) -> int:
        """Run what is loaded at a first call, before serving. Return the number of encoder forwards."""
        ...


class TextEmbeds:
    """The embeddings of a text-only model."""

    def __call__(self, chunks: Sequence[Chunk], batch: ForwardBatch) -> MergedEmbeds | None:
        return None

    def warm_up(self) -> int:
        return 0


class VisionEmbeds:
    """Encodes only what the batch needs, plus an image right after a chunk's end, which a draft reads."""

    def __init__(self, embed: Embed, encode: VisionPart, cache: RowCache) -> None:
        self._embed = embed
        self._encode = encode
        self._cache = cache
        self.encoded = 0  # number of encoded images, for tests and metrics

    @torch.inference_mode()
    def __call__(self, chunks: Sequence[Chunk], batch: ForwardBatch) -> MergedEmbeds | None:
        shown = [image for chunk in chunks for image in _images_of(chunk)]
        if not shown:
            return None
        self._fill(shown)
        rows = self._embed(batch.input_ids)
        first = 0
        for chunk in chunks:
            _overlay(rows[first : first + chunk.length], chunk.request.images, chunk.start)
            first += chunk.length
            for image in chunk.request.images:
                image.let_go(chunk.start + chunk.length)
        return MergedEmbeds(rows, chunks, self._embed)

    def warm_up(self) -> int:
        batches = self._encode.examples()
        for images in batches:
            self._encode(images)
        return len(batches)

    def _fill(self, shown: Sequence[PromptImage]) -> None:
        """Give every image its rows: from the cache, from another prompt of this batch, or from the encoder."""
        missing: dict[bytes, Pixels] = {}
        for image in shown:
            if image.rows is None:
                image.rows = image.fitting(self._cache.get(image.span.digest))
            if image.rows is None:
                assert image.pixels is not None, "a prompt is admitted once its images are decoded"
                missing[image.span.digest] = image.pixels
        made: dict[bytes, Tensor] = {}
        for some in _batches(missing):
            encoded = self._encode([missing[digest] for digest in some])
            # Cloned, because a slice would keep the whole batch alive.
            made |= {digest: rows.clone() for digest, rows in zip(some, encoded, strict=True)}
        self.encoded += len(made)
        for digest, rows in made.items():
            self._cache.put(digest, rows)
        for image in shown:
            if image.rows is None:
                image.rows = made[image.span.digest].flatten(0, 1)
            image.pixels = None


def _batches(images: Mapping[bytes, Pixels]) -> Iterator[list[bytes]]:
    """Yield the digests of images that are encoded together."""
    batch: list[bytes] = []
    tokens = 0
    for digest, pixels in images.items():
        if batch and (len(batch) == ENCODER_BATCH or tokens + pixels.tokens > ENCODER_TOKENS):
            yield batch
            batch, tokens = [], 0
        batch.append(digest)
        tokens += pixels.tokens
    if batch:
        yield batch


def _images_of(chunk: Chunk) -> list[PromptImage]:
    """Images that overlap the chunk or start right after it."""
    found = []
    for image in chunk.request.images:
        start, end = image.overlap(chunk.start, chunk.start + chunk.length + 1)
        if start < end:
            found.append(image)
    return found


def _overlay(rows: Tensor, images: Sequence[PromptImage], position: int) -> None:
    """Write image rows over `rows` [T, H], which start at `position` of the prompt."""
    for image in images:
        start, end = image.overlap(position, position + len(rows))
        if start < end:
            assert image.rows is not None
            offset = image.span.offset
            rows[start - position : end - position] = image.rows[start - offset : end - offset]
