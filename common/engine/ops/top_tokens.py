"""The likeliest tokens of each row and their probabilities: softmax and top-k of a draft head in two launches."""

from __future__ import annotations

import torch
from torch import Tensor

from common.engine.ops.registration import register_op
from common.engine.ops.triton_kernel import await_previous, cdiv, chained, kernel, next_power_of_2, tl

BLOCK = 4096  # tokens per part
if tl is not None:
    LOWEST = tl.constexpr(-3.0e38)


def top_tokens_reference(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return (probs [R, count] float32, descending, ids [R, count] int64) of logits [R, V] float32."""
    probs, ids = logits.softmax(-1).topk(count, dim=-1)
    return probs, ids


@kernel
def _best(values, ids):  # type: ignore[no-untyped-def]
    """Return (value, id) of the largest value; the lowest id among equals.

    A NaN never wins, and ids stay in range.
    """
    most = tl.max(values, axis=0)
    return most, tl.min(tl.where(values == most, ids, tl.max(ids, axis=0)), axis=0)


@kernel
def _part_kernel(  # type: ignore[no-untyped-def]
    logits_ptr,  # [R, size]
    value_ptr,  # [R, parts, COUNT] float32
    id_ptr,  # [R, parts, COUNT] int32
    sum_ptr,  # [R, parts] float32, of exp(logit - the part's largest)
    row_stride,
    size,
    COUNT: tl.constexpr,
    BLOCK: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """Each program handles one part of one row."""
    await_previous(CHAINED)
    row, part, parts = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    token = part * BLOCK + tl.arange(0, BLOCK)
    left = tl.load(logits_ptr + row * row_stride + token, mask=token < size, other=float("-inf"))
    left = tl.where(token < size, tl.maximum(left, LOWEST), left)  # a live token ranks above a taken one
    largest = tl.max(left, axis=0)
    total = tl.sum(tl.exp(left - largest), axis=0)
    tl.store(sum_ptr + row * parts + part, total)
    token = tl.minimum(token, size - 1)
    place = (row * parts + part) * COUNT
    for rank in tl.static_range(COUNT):
        value, best = _best(left, token)
        tl.store(value_ptr + place + rank, value)
        tl.store(id_ptr + place + rank, best)
        left = tl.where(token == best, float("-inf"), left)


@kernel
def _merge_kernel(  # type: ignore[no-untyped-def]
    value_ptr,  # [R, parts, COUNT]
    id_ptr,
    sum_ptr,  # [R, parts]
    prob_ptr,  # [R, COUNT] float32
    token_ptr,  # [R, COUNT] int64
    parts,
    COUNT: tl.constexpr,
    BLOCK_P: tl.constexpr,  # at least `parts`
    BLOCK_C: tl.constexpr,  # at least parts * COUNT
    CHAINED: tl.constexpr,
):
    await_previous(CHAINED)
    row = tl.program_id(0).to(tl.int64)
    part, candidate = tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_C)
    first = value_ptr + (row * parts + part) * COUNT  # the largest of each part
    largest = tl.load(first, mask=part < parts, other=float("-inf"))
    sums = tl.load(sum_ptr + row * parts + part, mask=part < parts, other=0.0)
    most = tl.max(largest, axis=0)
    total = tl.sum(tl.where(part < parts, sums * tl.exp(largest - most), 0.0), axis=0)
    read = candidate < parts * COUNT
    left = tl.load(value_ptr + row * parts * COUNT + candidate, mask=read, other=float("-inf"))
    token = tl.load(id_ptr + row * parts * COUNT + candidate, mask=read, other=0)
    for rank in tl.static_range(COUNT):
        value, best = _best(left, token)
        tl.store(prob_ptr + row * COUNT + rank, tl.exp(value - most) / total)
        tl.store(token_ptr + row * COUNT + rank, best.to(tl.int64))
        left = tl.where(token == best, float("-inf"), left)


def top_tokens_triton(logits: Tensor, count: int, block: int = BLOCK) -> tuple[Tensor, Tensor]:
    """Launch the kernels.

    Among equal logits the lower id comes first; for a row with NaN only the id range is defined.
    """
    rows, size = logits.shape
    assert logits.dtype == torch.float32, f"logits are float32, not {logits.dtype}"
    assert logits.stride(1) == 1, "the logits of a row must be adjacent"
    assert 0 < count <= size, f"{count} of {size} tokens"
    probs = logits.new_empty((rows, count))
    ids = torch.empty((rows, count), dtype=torch.int64, device=logits.device)
    if rows == 0:
        return probs, ids
    block = min(block, max(next_power_of_2(size), 16))
    parts = cdiv(size, block)
    values = logits.new_empty((rows, parts, count))
    tokens = torch.empty((rows, parts, count), dtype=torch.int32, device=logits.device)
    sums = logits.new_empty((rows, parts))
    options = chained(logits.device)
    _part_kernel[(rows, parts)](
        logits, values, tokens, sums, logits.stride(0), size, COUNT=count, BLOCK=block, num_warps=8, **options
    )
    _merge_kernel[(rows,)](
        values,
        tokens,
        sums,
        probs,
        ids,
        parts,
        COUNT=count,
        BLOCK_P=next_power_of_2(parts),
        BLOCK_C=next_power_of_2(parts * count),
        num_warps=1,
        **options,
    )
    return probs, ids


def _top_tokens_cuda(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    return top_tokens_triton(logits, count)


def _fake(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    probs = logits.new_empty((logits.shape[0], count))
    return probs, probs.to(torch.int64)


top_tokens = register_op("top_tokens", top_tokens_reference, mutates=(), fake=_fake, cuda=_top_tokens_cuda)
