"""Bucket ladders: dense where a padded row is a large share, sparse where it is not. Source: spec 3.8."""

from __future__ import annotations

from collections.abc import Sequence

# (first, last, step); last None: without end
Ladder = Sequence[tuple[int, int | None, int]]

PREFILL: Ladder = (
    (1, 2, 1),  # what a prefix hit leaves of a prompt is often one token
    (4, 32, 4),
    (48, 256, 16),
    (288, 512, 32),
    (576, 1024, 64),
    (1280, 4096, 256),
    (4608, None, 512),
)
DECODE: Ladder = ((1, 2, 1), (4, 12, 4), (16, 256, 8), (272, 512, 16), (544, None, 32))
IMAGES: Ladder = ((1, 4, 1), (6, None, 2))
MOST_IMAGES = 8  # of a tower's graph: the arithmetic of more takes about as long as their launches
IMAGE_TOKENS: Ladder = ((16, 64, 16), (96, 256, 32), (320, None, 64))
MOST_IMAGE_TOKENS = 1024  # as for MOST_IMAGES
VERIFY: Ladder = ((1, 8, 1), (10, 32, 2), (40, 64, 4), (72, 256, 8), (272, None, 16))


def prefill_token_buckets(chunk_tokens: int, again: int = 0) -> tuple[int, ...]:
    """Up to the chunk size, which is a bucket itself: a full chunk has no padding.

    `again`: rows of the chunk before that come with the rest of a cut prompt, of which a batch has one at most.
    """
    full = (chunk_tokens + again,) if again and chunk_tokens else ()
    return climb(PREFILL, chunk_tokens) + full


def decode_request_buckets(max_requests: int) -> tuple[int, ...]:
    """One token per request."""
    return climb(DECODE, max_requests)


def verify_request_buckets(max_requests: int) -> tuple[int, ...]:
    """Several tokens per request (speculation): finer, since a padded request costs its whole width."""
    return climb(VERIFY, max_requests)


def image_buckets(max_images: int) -> tuple[int, ...]:
    """Images of one size in one forward of their tower, of a node that gives it at most `max_images`."""
    return climb(IMAGES, min(max_images, MOST_IMAGES))


def image_token_buckets() -> tuple[int, ...]:
    """Tokens of the images, which have any size, in one forward of their tower."""
    return climb(IMAGE_TOKENS, MOST_IMAGE_TOKENS)


def climb(ladder: Ladder, top: int) -> tuple[int, ...]:
    """The rungs below `top`, and `top`. Empty below 1: no graphs."""
    if top < 1:
        return ()
    rungs: list[int] = []
    for first, last, step in ladder:
        rungs += range(first, min(top, top if last is None else last + 1), step)
    return (*(rung for rung in rungs if rung < top), top)
