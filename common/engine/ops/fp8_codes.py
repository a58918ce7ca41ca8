"""Conversions between float32 and the bytes of float8_e4m3fn, inside kernels.

GPUs before compute capability 8.9 have neither matrix units nor conversions for this type, and Triton's interpreter
rounds it wrongly. For these, `encode` and `decode` compute with integers, with the same results.
"""

from __future__ import annotations

import functools

import torch

from common.engine.ops.triton_kernel import kernel, tl

FP8 = torch.float8_e4m3fn
LARGEST = 448.0  # of e4m3


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
