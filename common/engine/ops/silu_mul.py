"""The product of SwiGLU: silu(gate) * up (arXiv 2002.05202)."""

from __future__ import annotations

import torch.nn.functional as F
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

BLOCK = 2048


def silu_mul_reference(gate_up: Tensor) -> Tensor:
    """Return [..., I] for [..., 2 * I] with gates first."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


@kernel
def _silu_mul_kernel(  # type: ignore[no-untyped-def]
    gate_up_ptr,  # [rows, 2 * size]
    out_ptr,  # [rows, size]
    stride,
    size,
    BLOCK: tl.constexpr,
    CHAINED: tl.constexpr,
):
    await_previous(CHAINED)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = column < size
    gate = tl.load(gate_up_ptr + row * stride + column, mask=live, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * stride + size + column, mask=live, other=0.0).to(tl.float32)
    silu = gate / (1.0 + tl.exp(-gate))
    tl.store(out_ptr + row * size + column, (silu * up).to(out_ptr.dtype.element_ty), mask=live)


def silu_mul_triton(gate_up: Tensor) -> Tensor:
    size = gate_up.shape[-1] // 2
    assert gate_up.shape[-1] == 2 * size, "gate and up have one width"
    rows = gate_up.flatten(0, -2)
    assert rows.stride(1) == 1, "the elements of a row must be adjacent"
    out = gate_up.new_empty((*gate_up.shape[:-1], size))
    if out.numel():
        block = min(BLOCK, next_power_of_2(size))
        grid = (rows.shape[0], cdiv(size, block))
        options = chained(rows.device)
        warps = max(block // 256, 1)
        _silu_mul_kernel[grid](rows, out, rows.stride(0), size, BLOCK=block, num_warps=warps, **options)
    return out


def _fake(gate_up: Tensor) -> Tensor:
    return gate_up.new_empty((*gate_up.shape[:-1], gate_up.shape[-1] // 2))


silu_mul = register_op("silu_mul", silu_mul_reference, mutates=(), fake=_fake, cuda=silu_mul_triton)
