"""The sum of the experts' outputs of each token, in a fixed order."""

from __future__ import annotations

from torch import Tensor

from common.engine.ops.registration import register_op
from common.engine.ops.triton_kernel import (
    await_previous,
    cdiv,
    chained,
    kernel,
    next_power_of_2,
    tl,
)

BLOCK = 1024


def sum_parts_reference(parts: Tensor, experts: Tensor) -> Tensor:
    """Return [T, H] for parts [T, K, H]; the sum is float32 until it is rounded.

    Args:
        experts: [T, K]; parts of negative ones are left out, whatever they hold.
    """
    parts = parts.masked_fill(experts[:, :, None] < 0, 0.0)
    total = parts[:, 0].float()
    for rank in range(1, parts.shape[1]):
        total = total + parts[:, rank].float()
    return total.to(parts.dtype)


@kernel
def _sum_parts_kernel(  # type: ignore[no-untyped-def]
    parts_ptr,  # [rows, PARTS, size]
    experts_ptr,  # [rows, PARTS] int32
    out_ptr,  # [rows, size]
    size,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    CHAINED: tl.constexpr,
):
    await_previous(CHAINED)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = column < size
    total = tl.zeros((BLOCK,), tl.float32)
    for part in tl.static_range(PARTS):
        expert = tl.load(experts_ptr + row * PARTS + part)
        end = tl.where(expert >= 0, size, 0)
        place = parts_ptr + (row * PARTS + part) * size + column
        total += tl.load(place, mask=column < end, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * size + column, total.to(out_ptr.dtype.element_ty), mask=live)


def sum_parts_triton(parts: Tensor, experts: Tensor) -> Tensor:
    rows, count, size = parts.shape
    assert experts.shape == (rows, count) and experts.is_contiguous(), "one expert per part"  # noqa: PT018
    assert parts.is_contiguous(), "the parts must be contiguous"
    out = parts.new_empty((rows, size))
    if out.numel():
        block = min(BLOCK, next_power_of_2(size))
        _sum_parts_kernel[(rows, cdiv(size, block))](
            parts,
            experts,
            out,
            size,
            PARTS=count,
            BLOCK=block,
            num_warps=max(block // 256, 1),
            **chained(parts.device),
        )
    return out


def _fake(parts: Tensor, experts: Tensor) -> Tensor:
    return parts.new_empty((parts.shape[0], parts.shape[2]))


sum_parts = register_op("sum_parts", sum_parts_reference, mutates=(), fake=_fake, cuda=sum_parts_triton)
