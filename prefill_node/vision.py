"""Embeddings of a batch with images: encodes all new images, and writes their rows over the placeholder rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from common.engine.encoder_sizes import ENCODER_BATCH, ENCODER_TOKENS
from common.engine.forward.batch import ForwardBatch
from common.engine.models.vision_part import Pixels, VisionPart
from prefill_node.prompt_images import PendingImage, PromptImages, RowCache
from prefill_node.step_plan import PlannedChunk

Embed = Callable[[Tensor], Tensor]  # ids [T] -> [T, H]


@dataclass(frozen=True, slots=True)
class MergedEmbeds:
    """The target's input in one forward, for a draft that reads the same tokens one position ahead."""

    rows: Tensor  # [T, H]; of live tokens only, without padding
    chunks: Sequence[PlannedChunk]
    images: Sequence[Sequence[PendingImage]]  # per chunk: those in its prompt
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
        for row, (chunk, images) in enumerate(zip(self.chunks, self.images, strict=True)):
            _overlay(tail_rows[row : row + 1], images, chunk.end)
        return self.rows.roll(-1, dims=0).index_copy_(0, tails, tail_rows)


class PromptEmbeds(Protocol):
    """Computes the input embeddings of a step."""

    def __call__(self, chunks: Sequence[PlannedChunk], batch: ForwardBatch) -> MergedEmbeds | None:
        """Return the embeddings; None for a batch without images, whose ids are sufficient."""
        ...

    def forget(self, keys: Iterable[int]) -> None:
        """Drop what is kept for prompts that end before their last chunk."""
        ...

    def warm_up(self) -> int:
        """Run what is loaded at a first call, before serving. Return the number of encoder forwards."""
        ...


class TextEmbeds:
    """The embeddings of a text-only model."""

    def __call__(self, chunks: Sequence[PlannedChunk], batch: ForwardBatch) -> MergedEmbeds | None:
        return None

    def forget(self, keys: Iterable[int]) -> None:
        """No-op: nothing is kept."""

    def warm_up(self) -> int:
        return 0


class VisionEmbeds:
    """Encodes only what the batch needs, plus an image right after a chunk's end, which a draft reads."""

    def __init__(
        self,
        embed: Embed,
        encode: VisionPart,
        cache: RowCache,
        prompts: PromptImages,
        give: Callable[[Tensor], object] = lambda rows: None,
    ) -> None:
        """`give` hands the rows [length, H] of an image that a step needs to the other ranks of the node."""
        self._give = give
        self._embed = embed
        self._encode = encode
        self._cache = cache
        self._prompts = prompts
        self.encoded = 0  # number of encoded images, for tests and metrics

    @torch.inference_mode()
    def __call__(self, chunks: Sequence[PlannedChunk], batch: ForwardBatch) -> MergedEmbeds | None:
        images = [self._prompts.of(chunk.key) for chunk in chunks]
        # a placeholder without its image would be embedded as a token
        assert all(len(own) == len(chunk.images) for chunk, own in zip(chunks, images)), "images are missing"
        self.forget(chunk.key for chunk in chunks if chunk.final)
        shown = [image for chunk, own in zip(chunks, images) for image in _shown(chunk, own)]
        if not shown:
            return None
        self._fill(shown)
        for image in shown:
            assert image.rows is not None
            self._give(image.rows)
        return _merged(self._embed, chunks, images, batch)

    def forget(self, keys: Iterable[int]) -> None:
        self._prompts.forget(keys)

    def warm_up(self) -> int:
        batches = self._encode.examples()
        for images in batches:
            self._encode(images)
        return len(batches)

    def _fill(self, shown: Sequence[PendingImage]) -> None:
        """Give every image its rows: from the cache, from another prompt of this batch, or from the encoder."""
        missing: dict[bytes, Pixels] = {}
        for image in shown:
            if image.rows is None:
                image.take_cached(self._cache)
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


class GivenEmbeds:
    """The embeddings of a rank that encodes no images: rank 0 gives it their rows in every step that needs them."""

    def __init__(self, embed: Embed, take: Callable[[int], Tensor]) -> None:
        """`take` returns the rows [length, H] that rank 0 gives next."""
        self._embed = embed
        self._take = take

    @torch.inference_mode()
    def __call__(self, chunks: Sequence[PlannedChunk], batch: ForwardBatch) -> MergedEmbeds | None:
        images = [[PendingImage(span) for span in chunk.images] for chunk in chunks]
        shown = [image for chunk, own in zip(chunks, images) for image in _shown(chunk, own)]
        if not shown:
            return None
        for image in shown:
            image.rows = self._take(image.span.length)
        return _merged(self._embed, chunks, images, batch)

    def forget(self, keys: Iterable[int]) -> None:
        """No-op: nothing is kept."""

    def warm_up(self) -> int:
        return 0


def _merged(
    embed: Embed,
    chunks: Sequence[PlannedChunk],
    images: Sequence[Sequence[PendingImage]],
    batch: ForwardBatch,
) -> MergedEmbeds:
    """Return the embeddings of tokens and images; images that a prompt has read are dropped."""
    rows = embed(batch.input_ids)
    first = 0
    for chunk, own in zip(chunks, images):
        _overlay(rows[first : first + chunk.length], own, chunk.start)
        first += chunk.length
        for image in own:
            image.drop_after(chunk.end)
    return MergedEmbeds(rows, chunks, images, embed)


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


def _shown(chunk: PlannedChunk, images: Sequence[PendingImage]) -> list[PendingImage]:
    """Return the images that overlap the chunk or start right after it."""
    found = []
    for image in images:
        start, end = image.span.overlap(chunk.start, chunk.end + 1)
        if start < end:
            found.append(image)
    return found


def _overlay(rows: Tensor, images: Sequence[PendingImage], position: int) -> None:
    """Write image rows over `rows` [T, H], which start at `position` of the prompt."""
    for image in images:
        start, end = image.span.overlap(position, position + len(rows))
        if start < end:
            assert image.rows is not None
            offset = image.span.offset
            rows[start - position : end - position] = image.rows[start - offset : end - offset]
