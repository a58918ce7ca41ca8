"""Converts the pages of a request from FP8 to a dtype that the matrix units multiply, once for all that reads them.

Extend attention converts keys and values in every tile of queries. For a long chunk these are many times, and one copy
costs less.
"""

from __future__ import annotations

import torch
from torch import Tensor

from common.engine.ops.fp8_codes import FP8, decode, has_fp8
from common.engine.ops.kv_rounding import as_read, selected
from common.engine.ops.registration import register_op
from common.engine.ops.triton_kernel import await_previous, cdiv, chained, kernel_with_varying, tl

BLOCK = 4096  # values per program


def page_values_reference(
    keys: Tensor, values: Tensor, pages: Tensor, key_scale: float, value_scale: float, dtype: torch.dtype
) -> Tensor:
    """Return [2, n, page_size, kv_heads, D] in `dtype`: keys and values of `pages` [n] int32, times their scales.

    Args:
        keys, values: planes [num_pages, page_size, kv_heads, D] in e4m3.
        key_scale, value_scale: powers of two.
    """
    read = [
        as_read(selected(plane, pages), dtype, scale)
        for plane, scale in ((keys, key_scale), (values, value_scale))
    ]
    return torch.stack(read)


@kernel_with_varying("count")
def _page_values_kernel(  # type: ignore[no-untyped-def]
    keys_ptr,  # [num_pages, SIZE] codes
    values_ptr,
    pages_ptr,  # [count]
    out_ptr,  # [2, count, SIZE]
    count,
    key_scale,
    value_scale,
    SIZE: tl.constexpr,
    DECODED: tl.constexpr,  # codes are bytes
    BLOCK: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """Each program converts BLOCK keys and values of one page."""
    await_previous(CHAINED)
    index = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = place < SIZE
    source = tl.load(pages_ptr + index).to(tl.int64) * SIZE + place
    keys = tl.load(keys_ptr + source, mask=live, other=0.0)
    values = tl.load(values_ptr + source, mask=live, other=0.0)
    if DECODED:
        keys = decode(keys)
        values = decode(values)
    dtype = out_ptr.dtype.element_ty
    tl.store(out_ptr + index * SIZE + place, (keys.to(tl.float32) * key_scale).to(dtype), mask=live)
    place += (count + index) * SIZE
    tl.store(out_ptr + place, (values.to(tl.float32) * value_scale).to(dtype), mask=live)


def page_values_triton(
    keys: Tensor, values: Tensor, pages: Tensor, key_scale: float, value_scale: float, dtype: torch.dtype
) -> Tensor:
    assert keys.dtype == values.dtype == FP8, f"planes of {keys.dtype} and {values.dtype}"
    assert keys.is_contiguous(), "planes must be contiguous"
    assert values.is_contiguous(), "planes must be contiguous"
    assert keys.shape == values.shape, "planes of different shapes"
    assert pages.ndim == 1 and pages.is_contiguous(), "the pages of one request"  # noqa: PT018
    count, shape = len(pages), keys.shape[1:]
    out = keys.new_empty((2, count, *shape), dtype=dtype)
    decoded, size = not has_fp8(keys.device), shape.numel()
    if count:
        planes = (keys.view(torch.uint8), values.view(torch.uint8)) if decoded else (keys, values)
        _page_values_kernel[(count, cdiv(size, BLOCK))](
            *planes,
            pages,
            out,
            count,
            key_scale,
            value_scale,
            SIZE=size,
            DECODED=decoded,
            BLOCK=BLOCK,
            num_warps=4,
            **chained(keys.device),
        )
    return out


def _fake(
    keys: Tensor, values: Tensor, pages: Tensor, key_scale: float, value_scale: float, dtype: torch.dtype
) -> Tensor:
    return keys.new_empty((2, len(pages), *keys.shape[1:]), dtype=dtype)


page_values = register_op(
    "page_values", page_values_reference, mutates=(), fake=_fake, cuda=page_values_triton
)
