"""The operation of a gated delta layer on a batch: its prompt form on prefill nodes, its step on decode nodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from common.engine.forward.batch import ForwardBatch, ForwardMode
from common.engine.ops.delta_extend import delta_extend
from common.engine.ops.delta_step import delta_step


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
    at, conv, recurrent = batch.state, planes["conv"], planes["recurrent"]
    taps, a_log, dt_bias, norm = weights
    if batch.mode is ForwardMode.EXTEND:
        starts, lengths = batch.query_start, batch.seq_lens
        return delta_extend(
            projected, taps, a_log, dt_bias, norm, eps, conv, recurrent, at.slots, starts, lengths
        )
    assert at.rows is not None
    assert at.pending is not None
    window = at.windows[layer]
    return delta_step(
        projected, taps, a_log, dt_bias, norm, eps, conv, recurrent, window, at.slots, at.rows, at.pending
    )
