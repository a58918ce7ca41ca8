"""Operations whose results are quantised to FP8 for the next product: activated gates, and norms of the stream."""

from __future__ import annotations

import torch
from torch import Tensor

from common.engine.ops.fp8_linear import FP8, GROUP, quantize_rows, quantize_rows_reference
from common.engine.ops.registration import register_op
from common.engine.ops.rms_norm import add_rms_norm, add_rms_norm_reference
from common.engine.ops.silu_mul import gelu_mul, gelu_mul_reference, silu_mul, silu_mul_reference


def fp8_gate_reference(gate_up: Tensor, gelu: bool, blocks: bool) -> tuple[Tensor, Tensor]:
    """Return silu(gate) * up of [..., 2 * I], gates first, as `quantize_rows` returns it.

    The values are rounded to the dtype of `gate_up` before they are quantised.

    Args:
        gelu: the tanh form of gelu instead of silu.
        blocks: as for `quantize_rows`.
    """
    activated = gelu_mul_reference if gelu else silu_mul_reference
    return quantize_rows_reference(activated(gate_up), blocks)


def _gate_cuda(gate_up: Tensor, gelu: bool, blocks: bool) -> tuple[Tensor, Tensor]:
    return quantize_rows((gelu_mul if gelu else silu_mul)(gate_up), blocks)


def _gate_fake(gate_up: Tensor, gelu: bool, blocks: bool) -> tuple[Tensor, Tensor]:
    return _outputs(gate_up, gate_up.shape[-1] // 2, blocks)


def _outputs(like: Tensor, size: int, blocks: bool) -> tuple[Tensor, Tensor]:
    groups = -(-size // GROUP) if blocks else 1
    rows = like.shape[:-1]
    return like.new_empty((*rows, size), dtype=FP8), like.new_empty((*rows, groups), dtype=torch.float32)


fp8_gate = register_op("fp8_gate", fp8_gate_reference, mutates=(), fake=_gate_fake, cuda=_gate_cuda)


def fp8_add_rms_norm_reference(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, blocks: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (codes, scales, total): `quantize_rows` of rms_norm(total), and total = x + residual; all [..., H]."""
    normed, total = add_rms_norm_reference(x, residual, weight, eps)
    return *quantize_rows_reference(normed, blocks), total


def _norm_cuda(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, blocks: bool
) -> tuple[Tensor, Tensor, Tensor]:
    normed, total = add_rms_norm(x, residual, weight, eps)
    return *quantize_rows(normed, blocks), total


def _norm_fake(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, blocks: bool
) -> tuple[Tensor, Tensor, Tensor]:
    return *_outputs(x, x.shape[-1], blocks), torch.empty_like(x, memory_format=torch.contiguous_format)


fp8_add_rms_norm = register_op(
    "fp8_add_rms_norm", fp8_add_rms_norm_reference, mutates=(), fake=_norm_fake, cuda=_norm_cuda
)
