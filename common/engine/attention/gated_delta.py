"""The operation of a gated delta layer on a batch: its prompt form on prefill nodes, its step on decode nodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from common.engine.forward.batch import ForwardBatch, ForwardMode
from common.named import named

# Named, so that each role imports only its own form.
EXTEND = "common.engine.ops.delta_extend:delta_extend"
STEP = "common.engine.ops.delta_step:delta_step"


def gated_delta(
    batch: ForwardBatch,
    layer: int,
    planes: Mapping[str, Tensor],
    projected: Tensor,
    weights: Sequence[Tensor],
    eps: float,
    /,
) -> Tensor:
    """Return [T, inner] for projected [T, token_values + inner].

    `weights`: taps of the convolution, A_log, dt_bias, and the weight of the output norm, whose `eps` this is.
    """
    assert batch.state is not None, "a gated delta layer keeps a state per request"
    at = batch.state
    kept = planes["conv"], planes["recurrent"]
    if batch.mode is ForwardMode.EXTEND:
        lengths = batch.query_start, batch.seq_lens
        out: Tensor = named(EXTEND)(projected, *weights, eps, *kept, at.slots, *lengths, at.saves)
    else:
        window = at.windows[layer]
        out = named(STEP)(projected, *weights, eps, *kept, window, at.slots, at.rows, at.pending)
    return out
