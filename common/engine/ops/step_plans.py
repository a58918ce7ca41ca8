"""Divides the keys of decode steps and trees: for the grid of a graph by host bounds, for a batch by its lengths."""

from __future__ import annotations

from torch import Tensor

from common.engine.ops.fp8_codes import FP8
from common.engine.ops.key_parts import Division, choose_division, choose_eight_bits_division
from common.engine.ops.triton_kernel import cdiv, multiprocessors, next_power_of_2

MAX_ROWS = 64  # new tokens times query heads of a KV head in one tile: with more, the keys are read once more
MAX_BITS = 64


def has_bits(width: int, window: int | None) -> bool:
    """Return whether `verify_triton` treats the slots of a tree as keys like others, seen or not by a row's bits."""
    return window is None and width <= MAX_BITS


def rows_of(new: int, group: int) -> int:
    """Return the rows of a tile of `verify_triton`, padded for the matrix units."""
    return min(max(next_power_of_2(new * group), 16), MAX_ROWS)


def decode_division(
    query: Tensor, key_plane: Tensor, max_seq_len: int, window: int | None
) -> tuple[Division, int]:
    """Return the division of the keys of `decode_triton`'s requests, and the upper bound of a request's keys."""
    kv_heads, keys = key_plane.shape[2], _most_keys(max_seq_len, window)
    programs, group = query.shape[0] * kv_heads, query.shape[1] // kv_heads
    return choose_division(programs, group, keys, _head_bytes(query), multiprocessors(query.device)), keys


def verify_division(
    query: Tensor, key_plane: Tensor, new: int, max_seq_len: int, window: int | None
) -> tuple[Division, int]:
    """Return the division of the keys of `verify_triton`'s requests, and the upper bound of a request's keys.

    Args:
        new: tokens per request.
    """
    kv_heads, keys = key_plane.shape[2], _most_keys(max_seq_len, window)
    group = query.shape[1] // kv_heads
    rows = rows_of(new, group)
    programs = query.shape[0] // new * kv_heads * cdiv(new * group, rows)
    choose = choose_eight_bits_division if key_plane.dtype is FP8 else choose_division
    rest = keys, _head_bytes(query), multiprocessors(query.device)
    return choose(programs, min(rows, new * group), *rest), keys


def plan_decode(
    query: Tensor,
    key_plane: Tensor,
    seq_lens: Tensor,
    max_seq_len: int,
    window: int | None,
    division: Division | None = None,
) -> Tensor | None:
    """Return the plan of `decode_triton` for these requests, or None if it needs none.

    Args:
        division: replaces that of `decode_division`.
    """
    chosen, keys = decode_division(query, key_plane, max_seq_len, window)
    return (division or chosen).plan(seq_lens, keys, window=window)


def plan_verify(
    query: Tensor,
    key_plane: Tensor,
    seq_lens: Tensor,
    tree_mask: Tensor,
    max_seq_len: int,
    window: int | None,
    division: Division | None = None,
) -> Tensor | None:
    """Return the plan of `verify_triton` for these requests, or None if it needs none.

    Args:
        division: replaces that of `verify_division`.
    """
    _, new, width = tree_mask.shape
    chosen, keys = verify_division(query, key_plane, new, max_seq_len, window)
    kept_out = 0 if has_bits(width, window) else width
    return (division or chosen).plan(seq_lens, keys, kept_out, None if window is None else window - 1)


def _most_keys(max_seq_len: int, window: int | None) -> int:
    return max_seq_len if window is None else min(max_seq_len, window)


def _head_bytes(query: Tensor) -> int:
    return query.shape[2] * query.element_size()
