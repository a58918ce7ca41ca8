"""Parts of the kernels of `delta_extend` that store the states inside a prompt which its `saves` name."""

from __future__ import annotations

from common.engine.ops.triton_kernel import kernel, tl


@kernel
def save_columns(  # type: ignore[no-untyped-def]
    projected_ptr,  # [T, ...] with the channels first
    row_stride,
    conv_ptr,  # [slots, C, 3]
    saves_ptr,  # [B, SAVES, 2]
    request,
    begin,  # first token of the request
    channel,
    channels,
    SAVES: tl.constexpr,
):
    """Store the last three inputs of some channels in each slot that saves a state of the request."""
    for index in tl.static_range(SAVES):
        save = saves_ptr + (request * SAVES + index) * 2
        slot = tl.load(save)
        if slot > 0:
            last = projected_ptr + (begin + tl.load(save + 1) - 3) * row_stride + channel
            columns = conv_ptr + slot * channels * 3 + channel * 3
            for column in tl.static_range(3):
                x = tl.load(last + column * row_stride, mask=channel < channels, other=0.0)
                tl.store(columns + column, x, mask=channel < channels)


@kernel
def save_state(  # type: ignore[no-untyped-def]
    recurrent_ptr,  # [slots, Hv, dk, dv]
    saves_ptr,  # [B, SAVES, 2]
    request,
    before,  # new tokens of the request before this chunk
    offset,  # first value in a slot
    size,  # values per slot
    state,  # after this chunk
    inside,
    SAVES: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Store values of a state in the slots that save the state after this chunk."""
    for index in tl.static_range(SAVES):
        save = saves_ptr + (request * SAVES + index) * 2
        slot = tl.load(save)
        if (slot > 0) & (tl.load(save + 1) == before + CHUNK):
            tl.store(recurrent_ptr + slot * size + offset, state, mask=inside)
