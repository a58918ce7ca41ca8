"""Reads of codes and scales in FP8, and of dense weights that are quantised while they are loaded."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from common.checkpoint.fp8_weights import BLOCK_SIZE
from common.checkpoint.safetensors_header import FLOATS
from common.engine.layers.piece import Piece
from common.engine.ops.fp8_rows import quantize_rows_reference
from common.errors import ModelError

# A scale per tensor is called by either name.
OTHER_NAME = {"weight_scale": "weight_scale_inv", "weight_scale_inv": "weight_scale"}


def blocks_in(size: int) -> int:
    """Return the number of blocks along an axis."""
    return -(-size // BLOCK_SIZE)


def tensor_scale(name: str, into: Tensor) -> Piece:
    """Return the read of a scale per tensor, with which `into` is filled."""
    suffix = name.rpartition(".")[2]

    def other(piece: Piece) -> Iterator[Piece]:
        yield piece._replace(name=piece.name.removesuffix(suffix) + OTHER_NAME[suffix], instead=None)

    return Piece.value_of(name, into)._replace(instead=other)


def block_scales(name: str, into: Tensor, codes: Piece) -> Piece:
    """Return the read of the scales of the blocks that `codes` reads. Raises ModelError if it cuts through a block."""
    if any(begin % BLOCK_SIZE for begin in codes.begin):
        raise ModelError(
            f"{codes.name}: a part of the weight begins at {list(codes.begin)}, inside a block of {BLOCK_SIZE} x "
            f"{BLOCK_SIZE} values that share a scale; use fewer ranks, or a checkpoint with scales per channel"
        )
    whole = tuple(blocks_in(size) for size in codes.whole)
    return Piece(name, into, whole, tuple(begin // BLOCK_SIZE for begin in codes.begin))


def input_scale(name: str, into: Tensor) -> Piece:
    """Return the read of a static scale of inputs; of several reads into one value the largest is kept."""
    return Piece.value_of(name, into)._replace(store=partial(_keep_largest, into))


def _keep_largest(into: Tensor, value: Tensor) -> None:
    into.copy_(torch.maximum(into, value.to(into.dtype)))


def quantising(piece: Piece, scales: Tensor) -> Piece:
    """Return the read of a dense weight [..., K] that is quantised into `piece.into`, with `scales` per row [...]."""

    def store(values: Tensor) -> None:
        codes, found = quantize_rows_reference(values)
        piece.into.copy_(codes)
        scales.copy_(found.squeeze(-1))

    return piece._replace(store=store, dtypes=FLOATS)
