"""Bucket ladders: dense where a padded row is a large share of the batch, sparse where it is not."""

from __future__ import annotations

from collections.abc import Sequence

# (first, last, step); a rung with last None has no end
Ladder = Sequence[tuple[int, int | None, int]]

PREFILL: Ladder = (
    (1, 2, 1),  # after a prefix hit, often one token of the prompt is left
    (4, 32, 4),
    (48, 256, 16),
    (288, 512, 32),
    (576, 1024, 64),
    (1280, 4096, 256),
    (4608, None, 512),
)
DECODE: Ladder = ((1, 2, 1), (4, 12, 4), (16, 256, 8), (272, 512, 16), (544, None, 32))
IMAGES: Ladder = ((1, 4, 1), (6, None, 2))
MAX_IMAGES = 8  # in a graph of the vision tower: for more, computing takes about as long as launching
IMAGE_TOKENS: Ladder = ((16, 64, 16), (96, 256, 32), (320, None, 64))
MAX_IMAGE_TOKENS = 1024  # for the same reason as MAX_IMAGES
VERIFY: Ladder = ((1, 8, 1), (10, 32, 2), (40, 64, 4), (72, 256, 8), (272, None, 16))


def prefill_token_buckets(chunk_tokens: int, again: int = 0) -> tuple[int, ...]:
    """Return the buckets up to the chunk size, which is a bucket itself so that a full chunk has no padding.

    `again` is the number of rows of the previous chunk that are computed again with the rest of a cut prompt; a batch
    has at most one such prompt.
    """
    full = (chunk_tokens + again,) if again and chunk_tokens else ()
    return climb(PREFILL, chunk_tokens) + full


def decode_request_buckets(max_requests: int) -> tuple[int, ...]:
    """Return the buckets of one token per request."""
    return climb(DECODE, max_requests)


def verify_request_buckets(max_requests: int) -> tuple[int, ...]:
    """Return the buckets of several tokens per request (speculation).

    They are finer, since a padded request costs its whole width.
    """
    return climb(VERIFY, max_requests)


def image_buckets(max_images: int) -> tuple[int, ...]:
    """Return the buckets of images of one size per forward of their tower, on a node that batches at most
    `max_images`.
    """
    return climb(IMAGES, min(max_images, MAX_IMAGES))


def image_token_buckets() -> tuple[int, ...]:
    """Return the buckets of tokens of images of any size per forward of their tower."""
    return climb(IMAGE_TOKENS, MAX_IMAGE_TOKENS)


def climb(ladder: Ladder, top: int) -> tuple[int, ...]:
    """Return the rungs below `top`, and `top`. Empty if `top` is below 1: no graphs."""
    if top < 1:
        return ()
    rungs: list[int] = []
    for first, last, step in ladder:
        rungs += range(first, min(top, top if last is None else last + 1), step)
    return (*(rung for rung in rungs if rung < top), top)
