"""Attention of a whole prompt over this forward's own keys and values, without pages, by cuDNN.

Measured on an H200 against `extend_triton` (tests/bench/ops.py): a third faster from 1,024 tokens on, no faster below.
It is not used where `hopper_extend` serves, which is as fast. cuDNN builds a plan for each number of tokens, which
takes 26 ms at the first call, so only announced numbers use it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from common.engine.forward.batch import ForwardBatch, ForwardMode

MIN_TOKENS = 1024
MAX_HEAD_DIM = 128
# Padding rows are computed too; above this share of live rows cuDNN is still faster, since the work is quadratic.
MIN_LIVE = 0.87


def whole_prompt_rows(batch: ForwardBatch, rows: int) -> int | None:
    """Return how many of the `rows` tokens are one request's whole prompt if the batch has nothing else; else None."""
    if batch.mode is not ForwardMode.EXTEND or batch.query_lens_host is None or rows < MIN_TOKENS:
        return None
    if len(batch.query_lens_host) != 1 or batch.query_lens_host != batch.seq_lens_host:
        return None
    live = batch.query_lens_host[0]
    return live if live >= MIN_LIVE * rows else None


def attend_whole_prompt(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """Return the causal attention [n, heads, D] of query [n, heads, D] over key, value [n, kv_heads, D].

    Takes float16 or bfloat16 on a GPU, D at most MAX_HEAD_DIM. cuDNN is called by name because the dispatcher's
    choice among the kernels would cost more than a short prompt.
    """
    queries, keys, values = (tensor.transpose(0, 1)[None] for tensor in (query, key, value))
    out: Tensor = torch.ops.aten._scaled_dot_product_cudnn_attention(
        queries, keys, values, None, False, 0.0, True, False, scale=scale
    )[0]
    return out[0].transpose(0, 1)


def attend_padded_prompt(query: Tensor, key: Tensor, value: Tensor, live: int, scale: float) -> Tensor:
    """Compute the same if rows from `live` on are padding, and clear these in key, in value and in the result.

    Later keys do not affect earlier queries, except as 0 * NaN.
    """
    if live < query.shape[0]:
        key[live:].zero_()
        value[live:].zero_()
    out = attend_whole_prompt(query, key, value, scale)
    if live < query.shape[0]:
        out[live:].zero_()
    return out
