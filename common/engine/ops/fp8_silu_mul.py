"""Activated gates that are quantised to FP8 for the next product: `silu_mul` for FP8 weights."""

from __future__ import annotations

from torch import Tensor

from common.engine.ops.fp8_codes import FP8, empty_scales
from common.engine.ops.fp8_rows import launch_quantizer, quantize_rows_reference
from common.engine.ops.registration import register_op
from common.engine.ops.silu_mul import GATED_REFERENCES


def fp8_gate_reference(gate_up: Tensor, activation: str, blocks: bool) -> tuple[Tensor, Tensor]:
    """Return activation(gate) * up of [..., 2 * I], gates first, as `quantize_rows` returns it.

    The values are rounded to the dtype of `gate_up` before they are quantised.

    Args:
        activation: of the gates, see `gated_linear`.
        blocks: as for `quantize_rows`.
    """
    return quantize_rows_reference(GATED_REFERENCES[activation](gate_up), blocks)


def fp8_gate_triton(gate_up: Tensor, activation: str, blocks: bool) -> tuple[Tensor, Tensor]:
    return launch_quantizer(gate_up, blocks, activation)


def _gate_fake(gate_up: Tensor, activation: str, blocks: bool) -> tuple[Tensor, Tensor]:
    size = gate_up.shape[-1] // 2
    return gate_up.new_empty((*gate_up.shape[:-1], size), dtype=FP8), empty_scales(gate_up, size, blocks)


fp8_gate = register_op("fp8_gate", fp8_gate_reference, mutates=(), fake=_gate_fake, cuda=fp8_gate_triton)
