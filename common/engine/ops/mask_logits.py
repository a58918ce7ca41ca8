"""Applies the token masks of grammars to rows of logits: a token that a row's mask leaves out becomes minus infinity.

A mask is a row of bits, 32 tokens per word, the lowest bit first. Rows without a mask are neither read nor written.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from common.engine.ops.logit_checks import check_rows
from common.engine.ops.registration import register_op
from common.engine.ops.triton_kernel import cdiv, kernel, tl

BLOCK = 4096  # vocabulary entries per program
WORD_BITS = 32


def mask_logits_reference(logits: Tensor, words: Tensor, owner: Tensor) -> None:
    """Set the logits of tokens outside their row's mask to minus infinity, in place. A NaN stays a NaN.

    Args:
        logits: [R, V] float32.
        words: [M, ceil(V / 32)] int32, M at least 1; bit t % 32 of word t // 32 is set if token t is allowed.
        owner: [R] int64, the mask of each row of logits; -1: none.
    """
    vocab = logits.shape[1]
    bit = torch.arange(WORD_BITS, dtype=torch.int32, device=logits.device)
    chosen = words.index_select(0, owner.clamp(min=0))
    allowed = ((chosen[:, :, None] >> bit) & 1).flatten(1)[:, :vocab].bool()
    refused = ~allowed & (owner >= 0)[:, None] & ~logits.isnan()
    logits.masked_fill_(refused, -torch.inf)


@kernel
def _mask_logits_kernel(  # type: ignore[no-untyped-def]
    logits_ptr,  # [R, vocab]
    words_ptr,  # [M, ceil(vocab / 32)]
    owner_ptr,  # [R]
    vocab,
    logits_stride,
    words_stride,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    owner = tl.load(owner_ptr + row)
    if owner >= 0:
        token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        live = token < vocab
        words = tl.load(words_ptr + owner * words_stride + token // 32, mask=live, other=-1)
        at = logits_ptr + row * logits_stride + token
        logits = tl.load(at, mask=live, other=0.0)
        refused = (((words >> (token % 32)) & 1) == 0) & (logits == logits)
        tl.store(at, tl.full((BLOCK,), float("-inf"), tl.float32), mask=live & refused)


def mask_logits_triton(logits: Tensor, words: Tensor, owner: Tensor) -> None:
    rows, vocab = check_rows(logits)
    assert words.dtype == torch.int32, f"masks are {words.dtype}"
    assert words.shape[1] == cdiv(vocab, WORD_BITS), f"masks of {words.shape[1]} words for {vocab} tokens"
    assert words.stride(1) == 1, "the words of a mask must be adjacent"
    assert owner.shape == (rows,), f"owners {tuple(owner.shape)} for {rows} rows of logits"
    assert owner.is_contiguous(), "owners must be contiguous"
    if rows:
        _mask_logits_kernel[(rows, cdiv(vocab, BLOCK))](
            logits,
            words,
            owner,
            vocab,
            logits.stride(0),
            words.stride(0),
            BLOCK=BLOCK,
            num_warps=8,
        )


def mask_logits_cpu(logits: Tensor, words: Tensor, owner: Tensor) -> None:
    """Work row by row, within the CPU's caches: about twice as fast as the reference for 128k tokens."""
    lines, vocab = logits.numpy(), logits.shape[1]
    packed = words.contiguous().numpy().view(np.uint8)
    for row, mask in enumerate(owner.tolist()):
        if mask >= 0:
            allowed = np.unpackbits(packed[mask], count=vocab, bitorder="little").view(np.bool_)
            np.copyto(lines[row], -np.inf, where=~(allowed | np.isnan(lines[row])))


def _fake(logits: Tensor, words: Tensor, owner: Tensor) -> None:
    return None


mask_logits = register_op(
    "mask_logits",
    mask_logits_reference,
    mutates=("logits",),
    fake=_fake,
    cpu=mask_logits_cpu,
    cuda=mask_logits_triton,
)
