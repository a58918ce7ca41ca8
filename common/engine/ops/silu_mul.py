"""The product of SwiGLU, silu(gate) * up, and of GeGLU, gelu(gate) * up (arXiv 2002.05202).

The activation is named as in `ModelConfig.activation`: "silu", or "gelu_tanh" for the tanh form of gelu.
"""

from __future__ import annotations

from collections.abc import Callable

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


def gelu_mul_reference(gate_up: Tensor) -> Tensor:
    """Return gelu(gate) * up [..., I] for [..., 2 * I] with gates first, with the tanh form of gelu."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh").mul_(up)


@kernel
def activate(gate, GELU: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return silu(gate), or if GELU the tanh form of gelu(gate), for float32 values.

    (1 + tanh(u)) / 2 is the sigmoid of 2 u.
    """
    inner = gate
    if GELU:
        inner = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
        inner = tl.maximum(inner, -80.0)  # the exponential of its negative stays finite
    return gate / (1.0 + tl.exp(-inner))


@kernel
def _silu_mul_kernel(  # type: ignore[no-untyped-def]
    gate_up_ptr,  # [rows, 2 * size]
    out_ptr,  # [rows, size]
    stride,
    size,
    GELU: tl.constexpr,
    BLOCK: tl.constexpr,
    CHAINED: tl.constexpr,
):
    await_previous(CHAINED)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = column < size
    gate = tl.load(gate_up_ptr + row * stride + column, mask=live, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * stride + size + column, mask=live, other=0.0).to(tl.float32)
    product = activate(gate, GELU) * up
    tl.store(out_ptr + row * size + column, product.to(out_ptr.dtype.element_ty), mask=live)


def silu_mul_triton(gate_up: Tensor) -> Tensor:
    return _launch(gate_up, gelu=False)


def gelu_mul_triton(gate_up: Tensor) -> Tensor:
    return _launch(gate_up, gelu=True)


def _launch(gate_up: Tensor, gelu: bool) -> Tensor:
    size = gate_up.shape[-1] // 2
    assert gate_up.shape[-1] == 2 * size, "gate and up have one width"
    rows = gate_up.flatten(0, -2)
    assert rows.stride(1) == 1, "the elements of a row must be adjacent"
    out = gate_up.new_empty((*gate_up.shape[:-1], size))
    if out.numel():
        block = min(BLOCK, next_power_of_2(size))
        grid = (rows.shape[0], cdiv(size, block))
        sizes = {"BLOCK": block, "num_warps": max(block // 256, 1)}
        _silu_mul_kernel[grid](rows, out, rows.stride(0), size, GELU=gelu, **sizes, **chained(rows.device))
    return out


def _fake(gate_up: Tensor) -> Tensor:
    return gate_up.new_empty((*gate_up.shape[:-1], gate_up.shape[-1] // 2))


silu_mul = register_op("silu_mul", silu_mul_reference, mutates=(), fake=_fake, cuda=silu_mul_triton)
gelu_mul = register_op("gelu_mul", gelu_mul_reference, mutates=(), fake=_fake, cuda=gelu_mul_triton)

# activation -> its op, its product in torch, and its kernel's launcher
GATED_OPS: dict[str, Callable[[Tensor], Tensor]] = {"silu": silu_mul, "gelu_tanh": gelu_mul}
GATED_REFERENCES: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": silu_mul_reference,
    "gelu_tanh": gelu_mul_reference,
}
GATED_KERNELS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": silu_mul_triton,
    "gelu_tanh": gelu_mul_triton,
}
