"""The quantised forms of activations that FP8 products read, and what makes them."""

from __future__ import annotations

from torch import Tensor

from common.checkpoint.model_config import Activation
from common.engine.layers.activations import Activations, Quantised, Reads
from common.engine.layers.norm import RmsNorm
from common.engine.ops.fp8_rms_norm import fp8_add_rms_norm
from common.engine.ops.fp8_silu_mul import fp8_gate
from common.engine.ops.rms_norm import add_rms_norm
from common.engine.ops.silu_mul import GATED_OPS

ROWS = "fp8-rows"  # one scale per row
BLOCKS = "fp8-blocks"  # one scale per 128 values of a row
FORMS = (ROWS, BLOCKS)


def gate_in_forms(gate_up: Tensor, reads: Reads, activation: Activation) -> Activations:
    """Return activation(gate) * up of [..., 2 * I], gates first, in the form that the next product reads."""
    if reads.dense or reads.form not in FORMS:
        return Activations(GATED_OPS[activation](gate_up))
    return Activations(None, Quantised(reads.form, *fp8_gate(gate_up, activation, reads.form == BLOCKS)))


def norm_in_forms(x: Tensor, stream: Tensor, norm: RmsNorm) -> tuple[Activations, Tensor]:
    """Return (norm(x + stream), x + stream), the first in the form that the readers of the norm take."""
    form = norm.reads.form
    if norm.reads.dense or form not in FORMS:
        normed, total = add_rms_norm(x, stream, norm.weight, norm.eps)
        return Activations(normed), total
    codes, scales, total = fp8_add_rms_norm(x, stream, norm.weight, norm.eps, form == BLOCKS)
    return Activations(None, Quantised(form, codes, scales)), total
