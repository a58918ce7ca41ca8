"""Launches the kernels of the prompt form of gated delta layers, for `delta_extend`, which describes the computation.

Four launches: the convolution, the systems of the chunks, the scan over the chunks of each request, and the outputs.
Only the scan is computed in order. They find requests and chunks on the device, so graphs record them.
Operands of products have the dtype of the inputs, sums and states are float32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from common.engine.ops.delta_inputs import delta_heads_kernel, delta_solve_kernel
from common.engine.ops.delta_outputs import delta_outputs_kernel
from common.engine.ops.delta_scan import delta_scan_kernel
from common.engine.ops.delta_tiles import choose_chunks
from common.engine.ops.shared_memory import room_of
from common.engine.ops.triton_kernel import cdiv, chained, multiprocessors, next_power_of_2

REQUESTS = 64  # a kernel is compiled once for batches of up to this many requests
RUN = 8  # tokens that a thread of the convolution takes one after another


def delta_extend_triton(
    projected: Tensor,
    taps: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    norm: Tensor,
    eps: float,
    conv: Tensor,
    recurrent: Tensor,
    slots: Tensor,
    starts: Tensor,
    lengths: Tensor,
    saves: Tensor | None = None,
) -> Tensor:
    """Compute `delta_extend_reference` on a GPU."""
    tokens, requests, channels = projected.shape[0], slots.shape[0], conv.shape[1]
    _, heads, key, value = recurrent.shape
    served = heads * key * 2 // (channels - heads * value)
    inputs = channels + 2 * heads
    assert projected.shape[1] == inputs + heads * value, "inputs, two values per head, and gates"
    assert projected.stride(1) == 1, "the values of a token must be adjacent"
    assert 2 * heads // served * key + heads * value == channels, (
        f"{heads} heads do not make {channels} channels"
    )
    assert starts.shape == (requests + 1,), f"{tuple(starts.shape)} starts of {requests} requests"
    assert lengths.shape == (requests,), f"{tuple(lengths.shape)} lengths of {requests} requests"
    for each in (taps, a_log, dt_bias, norm, conv, recurrent, slots, starts, lengths):
        assert each.is_contiguous(), "weights, planes and indices must be contiguous"
    count = 0 if saves is None else saves.shape[1]
    if saves is not None:
        assert saves.shape == (requests, count, 2), f"{tuple(saves.shape)} saves of {requests} requests"
        assert saves.dtype == torch.int64, "slots and counts are int64"
        assert saves.is_contiguous(), "a slot and its count are adjacent"
    saved = slots if saves is None else saves
    assert recurrent.dtype == torch.float32, "states are float32"
    assert conv.dtype == projected.dtype, "kept inputs have the dtype of new ones"
    out = projected.new_empty((tokens, heads * value))
    if tokens == 0 or requests == 0:
        return out
    block_k, block_v = (max(next_power_of_2(size), 16) for size in (key, value))
    room = room_of(projected.device).shared_bytes
    tiles = choose_chunks(block_k, block_v, projected.element_size(), room)
    chunk = tiles.chunk
    chunks = tokens // chunk + requests
    keys = projected.new_empty((chunks, 2 * (heads // served), chunk, block_k))
    through = projected.new_empty((chunks, heads, chunk, block_k))
    fresh = projected.new_empty((chunks, heads, chunk, block_v))
    since = recurrent.new_empty((chunks, heads, chunk))
    states = projected.new_empty((chunks, heads, block_k, block_v))
    programs = heads * (block_v // tiles.part)
    stride, most = projected.stride(0), max(next_power_of_2(requests), REQUESTS)
    common = {
        "HEADS": heads,
        "SERVED": served,
        "CHUNK": chunk,
        "BLOCK_K": block_k,
        "BLOCK_V": block_v,
        **chained(projected.device),
    }
    convolved = keys.shape[1] + heads
    delta_heads_kernel[(convolved, chunks)](
        *(projected, taps, conv, slots, starts, lengths, keys, fresh),
        stride,
        requests,
        channels,
        KEY=key,
        VALUE=value,
        REQUESTS=most,
        RUN=RUN,
        # Few programs are faster with more threads, and many with fewer.
        num_warps=8 if convolved * chunks <= 16 * multiprocessors(projected.device) else 4,
        **common,
    )
    delta_solve_kernel[(heads, chunks)](
        *(projected, a_log, dt_bias, starts, keys, fresh, through, since),
        stride,
        requests,
        channels,
        REQUESTS=most,
        LEVELS=chunk.bit_length() - 1,
        EXACT=projected.dtype == torch.float32,
        num_warps=4,
        **common,
    )
    delta_scan_kernel[(requests, heads, block_v // tiles.part)](
        *(projected, conv, recurrent, slots, starts, lengths, saved, keys, fresh, through, since, states),
        stride,
        channels,
        KEY=key,
        VALUE=value,
        SAVES=count,
        PART=tiles.part,
        BLOCK_C=next_power_of_2(cdiv(channels, programs)),
        num_warps=4,
        num_stages=tiles.scan_stages,
        **common,
    )
    delta_outputs_kernel[(heads, chunks)](
        *(projected, norm, starts, keys, fresh, since, states, out),
        stride,
        requests,
        tokens,
        inputs,
        eps,
        VALUE=value,
        REQUESTS=most,
        STEP=tiles.step,
        # Triton 3.6 compiles tiles of 16 values for 8 warps into code that reads outside of its memory.
        num_warps=8 if min(block_k, block_v) >= 32 else 4,
        num_stages=tiles.output_stages,
        **common,
    )
    return out
