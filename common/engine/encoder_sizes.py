"""Sizes of a vision part's forward that its encoder and the memory plan share."""

from __future__ import annotations

ENCODER_BATCH = 32  # images per forward
ENCODER_TOKENS = 16_384  # per forward, unless a single image has more: see encoder_memory.py
# Elements. Matrix units need rows of whole 16 bytes, which the published inner width, 3,420, does not have.
ALIGNED = 64


def largest_batch(tokens_per_image: int) -> int:
    """Return the maximum number of images per forward if all have one size."""
    return max(1, min(ENCODER_BATCH, ENCODER_TOKENS // tokens_per_image))


def aligned_width(inner: int) -> int:
    """Return the inner width of an MLP as it is computed."""
    return -(-inner // ALIGNED) * ALIGNED
