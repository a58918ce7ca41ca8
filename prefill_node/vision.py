"""Embeddings of a batch in which images stand: the encoder over all of its new images, their rows over placeholders."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from common.engine.forward.batch import ForwardBatch
from common.engine.models.vision_part import ENCODER_BATCH, ENCODER_TOKENS, Pixels, VisionPart
from prefill_node.images import PromptImage, RowCache
from prefill_node.scheduler import Chunk

Embed = Callable[[Tensor], Tensor]  # ids [T] -> [T, H]


@dataclass(frozen=True, slots=True)
class MergedEmbeds:
    """What the target reads in one forward, for a draft that reads the same one place ahead (rows C1-C4)."""

    rows: Tensor  # [T, H]; live tokens alone, whatever the graph pads them to
    chunks: Sequence[Chunk]
    embed: Embed

    @torch.inference_mode()
    def rotated(self, batch: ForwardBatch, next_ids: Tensor) -> Tensor:
        """[T, H]: row t holds the embedding of the token behind t.

        Inside a chunk that is the target's next row. Behind its last row comes a row of an image where the prompt goes
        on with one, else the embedding of `next_ids` [T] there: the prompt's next token, or the one just drawn.
        """
        tails = batch.query_start[1:].long() - 1
        tail_rows = self.embed(next_ids.index_select(0, tails))
        for row, chunk in enumerate(self.chunks):
            position = chunk.start + chunk.length
            _overlay(tail_rows[row : row + 1], chunk.request.images, position)
        return self.rows.roll(-1, dims=0).index_copy_(0, tails, tail_rows)


class PromptEmbeds(Protocol):
    """What a step asks for before its forward."""

    def __call__(self, chunks: Sequence[Chunk], batch: ForwardBatch) -> MergedEmbeds | None:
        """None: the batch is text alone, its ids say everything."""
        ...

    def warm_up(self) -> int:
        """Run what loads at a first call, before serving. How many forwards of the encoder that took."""
        ...


class TextEmbeds:
    """Of a model that reads text alone."""

    def __call__(self, chunks: Sequence[Chunk], batch: ForwardBatch) -> MergedEmbeds | None:
        return None

    def warm_up(self) -> int:
        return 0


class VisionEmbeds:
    """Encodes what the batch needs and nothing ahead of it but the image behind a chunk's end, which a draft reads."""

    def __init__(self, embed: Embed, encode: VisionPart, cache: RowCache) -> None:
        self._embed = embed
        self._encode = encode
        self._cache = cache
        self.encoded = 0  # images, for tests and figures

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
        """Give every image its rows: from the cache, from another prompt of this batch, from the encoder."""
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
            # copies: a slice would keep the whole batch alive
            made |= {digest: rows.clone() for digest, rows in zip(some, encoded, strict=True)}
        self.encoded += len(made)
        for digest, rows in made.items():
            self._cache.put(digest, rows)
        for image in shown:
            if image.rows is None:
                image.rows = made[image.span.digest].flatten(0, 1)
            image.pixels = None


def _batches(images: Mapping[bytes, Pixels]) -> Iterator[list[bytes]]:
    """Digests of images that go through the encoder together."""
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
    """Images in the chunk, or right behind it."""
    found = []
    for image in chunk.request.images:
        start, end = image.overlap(chunk.start, chunk.start + chunk.length + 1)
        if start < end:
            found.append(image)
    return found


def _overlay(rows: Tensor, images: Sequence[PromptImage], position: int) -> None:
    """Put image rows over `rows` [T, H], which begin at `position` of the prompt."""
    for image in images:
        start, end = image.overlap(position, position + len(rows))
        if start < end:
            assert image.rows is not None
            offset = image.span.offset
            rows[start - position : end - position] = image.rows[start - offset : end - offset]
