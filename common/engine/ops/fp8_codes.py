"""Defines FP8 codes (float8_e4m3fn) with their scales, and converts codes inside kernels.

GPUs before compute capability 8.9 have neither matrix units nor conversions for this type, and Triton's interpreter
rounds it wrongly. For these, `encode` and `decode` compute with integers, with the same results.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from common.engine.ops.tiles import MAX_ROWS, whole_tile
from common.engine.ops.triton_kernel import cdiv, kernel, tl

FP8 = torch.float8_e4m3fn
MAX_CODE = 448.0  # the largest code
STEP = 0.0022321429569274187  # 1 / MAX_CODE in float32
MIN_MAGNITUDE = 1e-12  # a row's largest magnitude counts as at least this: a row of zeros has a scale, too
GROUP = 128  # values that share a scale of x, and rows and columns that share one of the weight


def empty_codes(like: Tensor, size: int) -> Tensor:
    """Return uninitialised codes for rows of `size` values, as many rows as `like` has.

    The storage has more rows, so that products find a whole tile of them (`full_tile`).
    """
    lead, rows = like.shape[:-1], like.shape[:-1].numel()
    room = whole_tile(rows) if rows <= MAX_ROWS else rows
    return like.new_empty((room, size), dtype=FP8)[:rows].view(*lead, size)


def empty_scales(like: Tensor, size: int, blocks: bool) -> Tensor:
    """Return uninitialised scales for rows of `size` values, as many rows as `like` has.

    Scales of groups have the strides of a tensor [groups, rows], as torch's product of blocks demands.
    """
    lead, rows = like.shape[:-1], like.shape[:-1].numel()
    if not blocks:
        return like.new_empty((*lead, 1), dtype=torch.float32)
    groups = cdiv(size, GROUP)
    return like.new_empty((groups, rows), dtype=torch.float32).T.view(*lead, groups)


def check_product(
    rows: Tensor, row_scales: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None = None
) -> None:
    """Assert the layout of a product's operands, see `fp8_product_reference`: rows [R, K] and row_scales [R, ...]."""
    size, depth = weight.shape
    expected: tuple[int, ...] = (size,)
    groups = 1
    if scales.ndim == 2:
        groups = cdiv(depth, GROUP)
        expected = cdiv(size, GROUP), groups
    assert rows.dtype == weight.dtype == FP8, f"{rows.dtype} times {weight.dtype}"
    assert rows.stride(1) == 1, "the elements of a row must be adjacent"
    assert weight.is_contiguous(), "the weight must be contiguous"
    assert row_scales.shape == (len(rows), groups), f"row scales {tuple(row_scales.shape)}"
    assert scales.shape == expected, f"weight scales {tuple(scales.shape)}"
    assert scales.is_contiguous(), "the scales of the weight must be contiguous"
    assert bias is None or (bias.shape == (size,) and bias.is_contiguous()), "one bias per output"


@functools.cache
def has_fp8(device: torch.device) -> bool:
    """Return whether kernels on this device convert and multiply e4m3 in hardware."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


@kernel
def encode(x, HARDWARE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the bytes of float32 values, rounded to nearest even; what exceeds 448 becomes 448, and NaN stays NaN."""
    if HARDWARE:
        codes = x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        size = tl.minimum(tl.abs(x), 448.0)
        bits = size.to(tl.int32, bitcast=True)
        # Keep three bits of the mantissa, then change the bias of the exponent from 127 to 7.
        normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - ((127 - 7) << 3)
        # Numbers around 2^14 have the spacing of e4m3's subnormal numbers, 2^-9.
        small = (size + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
        code = tl.where(size < 0.015625, small, normal)
        code = tl.where(x == x, code, 0x7F)
        codes = (code | tl.where(x < 0.0, 0x80, 0)).to(tl.uint8)
    return codes


@kernel
def decode(codes):  # type: ignore[no-untyped-def]
    """Return the values of bytes as float16, which holds each of them exactly. NaN becomes 480."""
    wide = codes.to(tl.uint16)
    # The exponent of float16 has a bias of 15, that of e4m3 one of 7.
    bits = ((wide & 0x80) << 8) | ((wide & 0x7F) << 7)
    return bits.to(tl.float16, bitcast=True) * 256.0


@kernel
def store_codes(  # type: ignore[no-untyped-def]
    x,  # [BLOCK] float32, zero past the end of the row
    codes_ptr,  # of the row, bytes
    scales_ptr,  # of the row
    group_stride,
    begin,  # column of x's first value; 0 if not BLOCKS
    size,
    BLOCKS: tl.constexpr,  # a scale per 128 values, else one
    HARDWARE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Store the codes and scales of a row, or if BLOCKS of a part of it."""
    width: tl.constexpr = 128 if BLOCKS else BLOCK
    count: tl.constexpr = BLOCK // width
    values = tl.reshape(x, (count, width))
    largest = tl.maximum(tl.max(tl.abs(values), axis=1), 1e-12)
    inverse = tl.div_rn(tl.full((count,), 1.0, tl.float32), largest) * 448.0
    codes = encode(values * inverse[:, None], HARDWARE)
    group = tl.arange(0, count)
    column = begin + group[:, None] * width + tl.arange(0, width)[None, :]
    tl.store(codes_ptr + column, codes, mask=column < size)
    place = begin // width + group
    tl.store(scales_ptr + place * group_stride, largest * 0.0022321429569274187, mask=place * width < size)
