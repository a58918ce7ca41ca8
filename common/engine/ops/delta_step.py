"""One decode step of a gated delta layer: folds accepted tokens into the state, then computes the new ones.

The state and the columns of the convolution in a slot hold the tokens up to a step's window. The window keeps the
inputs of the tokens that the last step computed; the next step first applies those that were accepted.
"""

from __future__ import annotations

import torch
from torch import Tensor

from common.engine.ops.delta_heads import DeltaHeads, convolve, delta_heads, gated_norm
from common.engine.ops.delta_tokens import delta_step_triton
from common.engine.ops.registration import register_op


def delta_step_reference(
    projected: Tensor,
    taps: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    norm: Tensor,
    eps: float,
    conv: Tensor,
    recurrent: Tensor,
    window: Tensor,
    slots: Tensor,
    rows: Tensor,
    pending: Tensor,
) -> Tensor:
    """Return [R * N, Hv * dv], the gated outputs of N new tokens for each of R requests.

    Args:
        projected: [R * N, C + 2 * Hv + Hv * dv] = [queries | keys | values | b | a | gates].
        taps: [C, 4] of the convolution.
        a_log: [Hv] float32; so is dt_bias.
        norm: [dv] float32, weight of the output norm, which adds `eps` to the mean square.
        conv: [slots, C, 3], the inputs before the window; mutated.
        recurrent: [slots, Hv, dk, dv] float32, the state before the window; mutated.
        window: [rows, M, C + 2 * Hv], M >= N; mutated: the first N tokens of a row become the new ones.
        slots: [R] int64 of `conv` and `recurrent`; 0: padding, whose state stays as it is.
        rows: [R] int64 of `window`; 0: padding.
        pending: [R] int64, accepted tokens of the window: 0 .. M.
    """
    for each in (slots, rows, pending):
        assert each.is_contiguous(), "slots, rows and pending tokens must be contiguous"
    count, heads, channels = len(rows), recurrent.shape[1], conv.shape[1]
    shape = (heads, recurrent.shape[2], recurrent.shape[3])
    inputs = projected.view(count, projected.shape[0] // count, -1)
    new, gate = torch.split(inputs, [channels + 2 * heads, heads * shape[2]], dim=-1)
    live = rows > 0
    old = window.index_select(0, rows)
    columns = torch.cat((conv.index_select(0, slots).transpose(1, 2), old[..., :channels]), 1)

    def parts(columns: Tensor, inputs: Tensor) -> DeltaHeads:
        b, a = inputs[..., channels:].chunk(2, dim=-1)
        return delta_heads(convolve(columns, taps), b, a, a_log, dt_bias, shape)

    state, accepted = recurrent.index_select(0, slots), parts(columns, old)
    for place in range(int(pending.max())):
        fold = (pending > place)[:, None, None, None]
        state = torch.where(fold, _moved(state, accepted, place), state)
    recurrent.index_copy_(0, slots, torch.where(live[:, None, None, None], state, 0))
    last = pending[:, None] + torch.arange(conv.shape[2], device=pending.device)
    before = columns.gather(1, last[..., None].expand(-1, -1, channels))
    kept = torch.where(live[:, None, None], before.transpose(1, 2), 0)
    conv.index_copy_(0, slots, kept)
    window[:, : new.shape[1]].index_copy_(0, rows, torch.where(live[:, None, None], new, 0))

    fresh = parts(torch.cat((before, new[..., :channels]), 1), new)
    outputs = []
    for place in range(new.shape[1]):
        state = _moved(state, fresh, place)
        outputs.append(torch.einsum("rhkv,rhk->rhv", state, fresh.query[:, place]))
    return gated_norm(torch.stack(outputs, 1), gate, norm, eps).flatten(0, 1)


def _moved(state: Tensor, tokens: DeltaHeads, place: int) -> Tensor:
    """Return the state [R, Hv, dk, dv] after one more of `tokens`."""
    key, beta = tokens.key[:, place], tokens.beta[:, place]
    state = state * tokens.decay[:, place].exp()[..., None, None]
    seen = torch.einsum("rhkv,rhk->rhv", state, key)
    change = (tokens.value[:, place] - seen) * beta[..., None]
    return state + key[..., None] * change[..., None, :]


def _fake(
    projected: Tensor,
    taps: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    norm: Tensor,
    eps: float,
    conv: Tensor,
    recurrent: Tensor,
    window: Tensor,
    slots: Tensor,
    rows: Tensor,
    pending: Tensor,
) -> Tensor:
    return projected.new_empty((projected.shape[0], recurrent.shape[1] * recurrent.shape[3]))


delta_step = register_op(
    "delta_step",
    delta_step_reference,
    mutates=("conv", "recurrent", "window"),
    fake=_fake,
    cuda=delta_step_triton,
)
