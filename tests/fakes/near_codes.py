"""Compares quantised rows whose values may have been rounded to other codes."""

from __future__ import annotations

from torch import Tensor

# Neighbouring codes of e4m3 differ by at most an eighth, and the scales of two rows by a rounding to bf16.
STEP = 1 / 8 + 1 / 128
# Of the root mean square of a row: the largest error of sums before they are quantised, times the other factor.
SMALL = 0.05
MEAN = 0.08


def values_of(codes: Tensor, scales: Tensor) -> Tensor:
    """Return the values of codes [rows, size] with a scale per row, or with scales [rows, groups] per group."""
    groups = scales.shape[1]
    return (codes.float().view(len(codes), groups, -1) * scales[..., None]).flatten(1)


def assert_near_codes(found: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
    """Check each value of (codes, scales) by its own size, and the error of the whole.

    The tails of an activation's products hold values of 20 times the mean, whose neighbouring codes differ by more than
    the mean.
    """
    ours, theirs = values_of(*found), values_of(*expected)
    assert ours.shape == theirs.shape
    error, size = (ours - theirs).abs(), theirs.pow(2).mean(-1, keepdim=True).sqrt()
    assert error.pow(2).mean().sqrt() < MEAN * theirs.pow(2).mean().sqrt(), (
        "the error of the whole is too large"
    )
    worst = (error - STEP * theirs.abs() - SMALL * size).max().item()
    assert worst <= 0, f"a value differs by {worst:.4f} more than a code"
