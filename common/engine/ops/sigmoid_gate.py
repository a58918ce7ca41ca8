"""The output gate of attention: x * sigmoid(gate)."""

from __future__ import annotations

import torch
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


def sigmoid_gate_reference(x: Tensor, gate: Tensor) -> Tensor:
    """Return [T, W] for x and gate [T, W]; the sigmoid is rounded to their dtype."""
    return x * torch.sigmoid(gate)


@kernel
def _sigmoid_gate_kernel(  # type: ignore[no-untyped-def]
    x_ptr,  # [rows, size]
    gate_ptr,  # [rows, size]
    out_ptr,  # [rows, size]
    x_stride,
    gate_stride,
    size,
    BLOCK: tl.constexpr,
    CHAINED: tl.constexpr,
):
    await_previous(CHAINED)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = column < size
    dtype = out_ptr.dtype.element_ty
    x = tl.load(x_ptr + row * x_stride + column, mask=live, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + row * gate_stride + column, mask=live, other=0.0).to(tl.float32)
    open = (1.0 / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
    tl.store(out_ptr + row * size + column, (x * open).to(dtype), mask=live)


def sigmoid_gate_triton(x: Tensor, gate: Tensor) -> Tensor:
    assert x.shape == gate.shape, f"{tuple(x.shape)} gated by {tuple(gate.shape)}"
    assert x.dtype == gate.dtype, f"{x.dtype} gated by {gate.dtype}"
    assert x.stride(1) == gate.stride(1) == 1, "the elements of a row must be adjacent"
    count, size = x.shape
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    if out.numel():
        block = min(BLOCK, next_power_of_2(size))
        _sigmoid_gate_kernel[(count, cdiv(size, block))](
            x,
            gate,
            out,
            x.stride(0),
            gate.stride(0),
            size,
            BLOCK=block,
            num_warps=max(block // 256, 1),
            **chained(x.device),
        )
    return out


def _fake(x: Tensor, gate: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


sigmoid_gate = register_op(
    "sigmoid_gate", sigmoid_gate_reference, mutates=(), fake=_fake, cuda=sigmoid_gate_triton
)
