"""Applies repetition, presence and frequency penalties to rows of logits, from counts on the device.

All callers use one formula without fused multiply-add: the rows that verify a draft tree get their counts in another
way than the rows of plain decoding, and must yield the same logits bit for bit.
"""

from __future__ import annotations

import torch
from torch import Tensor

from common.engine.ops.registration import register_op
from common.engine.ops.triton_kernel import cdiv, kernel_with_varying, tl

BLOCK = 4096  # vocabulary entries per program


def penalise_reference(
    logits: Tensor,
    seen: Tensor,
    rows: Tensor,
    repetition: Tensor,
    presence: Tensor,
    frequency: Tensor,
    path: Tensor,
) -> Tensor:
    """Return a copy of `logits` with penalties applied.

    Args:
        logits: [R, V] float32.
        seen: [T, V] int32: twice a token's count in the output, plus one if it is in the prompt.
        rows: [R] int64: the row of `seen` and of the penalties that a row of logits belongs to.
        repetition: [T] float32, above 0; logits of seen tokens are divided by it, or multiplied if negative; 1: off.
        presence: [T] float32, subtracted from the logits of output tokens; 0: off.
        frequency: [T] float32, subtracted once per occurrence in the output; 0: off.
        path: [R, P] int64: output tokens that `seen` does not count yet; -1: none.
    """
    seen = seen.index_select(0, rows)
    seen.scatter_add_(1, path.clamp(min=0), 2 * (path >= 0).to(torch.int32))
    factor = repetition.index_select(0, rows)[:, None]
    repeated = torch.where(logits > 0, logits / factor, logits * factor)
    times = (seen >> 1).to(torch.float32)
    less = frequency.index_select(0, rows)[:, None] * times
    flat = torch.where(times > 0, presence.index_select(0, rows)[:, None], 0.0)
    return torch.where(seen > 0, repeated, logits) - less - flat


@kernel_with_varying("width")
def _penalise_kernel(  # type: ignore[no-untyped-def]
    logits_ptr,  # [R, V]
    seen_ptr,  # [T, V]
    rows_ptr,  # [R]
    repetition_ptr,  # [T]
    presence_ptr,
    frequency_ptr,
    path_ptr,  # [R, width]
    out_ptr,  # [R, V]
    vocab,
    logits_stride,
    width,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = token < vocab
    owner = tl.load(rows_ptr + row)
    logits = tl.load(logits_ptr + row * logits_stride + token, mask=live)
    seen = tl.load(seen_ptr + owner * vocab + token, mask=live, other=0)
    for index in range(width):
        seen += tl.where(token == tl.load(path_ptr + row * width + index), 2, 0)
    factor = tl.zeros((BLOCK,), tl.float32) + tl.load(repetition_ptr + owner)
    repeated = tl.where(logits > 0, tl.div_rn(logits, factor), logits * factor)
    times = (seen >> 1).to(tl.float32)
    less = tl.load(frequency_ptr + owner) * times
    flat = tl.where(times > 0, tl.load(presence_ptr + owner), 0.0)
    tl.store(out_ptr + row * vocab + token, tl.where(seen > 0, repeated, logits) - less - flat, mask=live)


def penalise_triton(
    logits: Tensor,
    seen: Tensor,
    rows: Tensor,
    repetition: Tensor,
    presence: Tensor,
    frequency: Tensor,
    path: Tensor,
) -> Tensor:
    count, vocab = logits.shape
    assert logits.dtype == torch.float32, f"logits are {logits.dtype}"
    assert logits.stride(1) == 1, "the logits of a row must be adjacent"
    assert seen.dtype == torch.int32, f"counts are {seen.dtype}"
    assert seen.shape[1] == vocab, f"counts of {seen.shape[1]} tokens for {vocab} logits"
    assert rows.shape == (count,), f"rows {tuple(rows.shape)} for {count} rows of logits"
    assert path.shape[0] == count, f"paths {tuple(path.shape)} for {count} rows of logits"
    for tensor in (seen, repetition, presence, frequency):
        assert tensor.is_contiguous(), "counts and penalties must be contiguous"
    rows, path = rows.contiguous(), path.contiguous()  # views of a round's state may be strided
    out = torch.empty((count, vocab), dtype=torch.float32, device=logits.device)
    if count:
        _penalise_kernel[(count, cdiv(vocab, BLOCK))](
            logits,
            seen,
            rows,
            repetition,
            presence,
            frequency,
            path,
            out,
            vocab,
            logits.stride(0),
            path.shape[1],
            BLOCK=BLOCK,
            num_warps=8,
            enable_fp_fusion=False,
        )
    return out


def _fake(
    logits: Tensor,
    seen: Tensor,
    rows: Tensor,
    repetition: Tensor,
    presence: Tensor,
    frequency: Tensor,
    path: Tensor,
) -> Tensor:
    return logits.new_empty(logits.shape)


penalise = register_op("penalise", penalise_reference, mutates=(), fake=_fake, cuda=penalise_triton)
