"""Reads of codes and scales in FP8, and of dense weights that are quantised while they are loaded."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from common.checkpoint.fp8_weights import BLOCK_SIZE
from common.checkpoint.safetensors_header import FLOATS
from common.engine.layers.piece import Piece
from common.engine.ops.fp8_rows import quantize_rows_reference
from common.errors import ModelError

# A scale per tensor, or of inputs, is called by either name.
OTHER_NAME = {
    "weight_scale": "weight_scale_inv",
    "weight_scale_inv": "weight_scale",
    "input_scale": "activation_scale",
}
AT_ONCE = 1 << 24  # values that are quantised at a time


def blocks_in(size: int) -> int:
    """Return the number of blocks along an axis."""
    return -(-size // BLOCK_SIZE)


def scales_of(piece: Piece) -> Piece:
    """Return the read of a weight's scales, which refuses any that is not finite."""
    return piece._replace(check=_check_scales)


def _check_scales(name: str, scales: Tensor) -> None:
    wrong = scales[~scales.isfinite()]
    if wrong.numel():
        raise ModelError(
            f"{name}: {wrong.numel()} of {scales.numel()} scales of the weight are not finite, such as "
            f"{float(wrong[0])}; the checkpoint is damaged, or was not quantised well: get or make it again"
        )


def _check_input_scale(name: str, scale: Tensor) -> None:
    if not 0 < float(scale) < math.inf:
        raise ModelError(
            f"{name}: the scale of inputs must be a positive number, found {float(scale)}; the checkpoint is damaged, "
            "or was not calibrated: get or make it again"
        )


def tensor_scale(name: str, into: Tensor) -> Piece:
    """Return the read of a scale per tensor, with which `into` is filled."""
    return scales_of(_by_either_name(Piece.value_of(name, into)))


def _by_either_name(piece: Piece) -> Piece:
    def other(missing: Piece) -> Iterator[Piece]:
        # The piece may have been renamed since.
        stem, _, suffix = missing.name.rpartition(".")
        yield missing._replace(name=f"{stem}.{OTHER_NAME[suffix]}", instead=None)

    return piece._replace(instead=other)


def block_scales(name: str, into: Tensor, codes: Piece) -> Piece:
    """Return the read of the scales of the blocks that `codes` reads. Raises ModelError if it cuts through a block."""
    ends = [begin + size for begin, size in zip(codes.begin, codes.shape, strict=True)]
    cut = [end % BLOCK_SIZE and end != whole for end, whole in zip(ends, codes.whole, strict=True)]
    if any(cut) or any(begin % BLOCK_SIZE for begin in codes.begin):
        raise ModelError(
            f"{codes.name}: a part of the weight begins at {list(codes.begin)} and ends at {ends}, inside a block of "
            f"{BLOCK_SIZE} x {BLOCK_SIZE} values that share a scale; use fewer ranks, or a checkpoint with scales per "
            "channel"
        )
    whole = tuple(blocks_in(size) for size in codes.whole)
    return scales_of(Piece(name, into, whole, tuple(begin // BLOCK_SIZE for begin in codes.begin)))


def input_scale(name: str, into: Tensor) -> Piece:
    """Return the read of a static scale of inputs; of several reads into one value the largest is kept."""
    piece = Piece.value_of(name, into)._replace(store=partial(_keep_largest, into), check=_check_input_scale)
    return _by_either_name(piece)


class ExpertInputScale:
    """The reads of the static input scales of a layer's experts into one value, the largest of them.

    A scale of 0 belongs to an expert to which no token of the calibration was routed, and says nothing.
    """

    def __init__(self, into: Tensor, count: int) -> None:
        """`count`: number of reads."""
        self._into = into
        self._left = count
        self._largest = 0.0

    def read(self, name: str) -> Piece:
        """Return the read of the scale of one expert's inputs."""
        return input_scale(name, self._into)._replace(check=self._check)

    def _check(self, name: str, scale: Tensor) -> None:
        self._left -= 1
        if float(scale):
            _check_input_scale(name, scale)
            self._largest = max(self._largest, float(scale))
        elif not self._left and not self._largest:
            raise ModelError(
                f"{name}: the scale of inputs is 0, as for all other experts of the layer; the checkpoint is damaged, "
                "or was not calibrated: get or make it again"
            )


def _keep_largest(into: Tensor, value: Tensor) -> None:
    into.copy_(torch.maximum(into, value.to(into.dtype)))


def quantising(piece: Piece, scales: Tensor, columns: range) -> Piece:
    """Return the read of a dense weight that is quantised into `piece.into` [..., K], with `scales` per row [...].

    Some rows are quantised at a time, because that needs several float32 copies of them.

    Args:
        columns: of the tensor; the values in them share a scale. All of them are read, so that the codes are the same
            on however many ranks, of which each stores some.
    """
    first = piece.begin[-1] - columns.start

    def store(values: Tensor) -> None:
        count = max(-(-values.numel() // AT_ONCE), 1)
        parts = values.chunk(count, -2), piece.into.chunk(count, -2), scales.chunk(count, -1)
        for some, into, of_some in zip(*parts, strict=True):
            codes, found = quantize_rows_reference(some)
            into.copy_(codes[..., first : first + into.shape[-1]])
            of_some.copy_(found.squeeze(-1))

    begin, read = (*piece.begin[:-1], columns.start), (*piece.into.shape[:-1], len(columns))
    return piece._replace(store=store, dtypes=FLOATS, begin=begin, read=read)
