"""The input and output of one forward pass: flat tokens of several requests, and where their KV lies."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, IntEnum

from torch import Tensor


class ForwardMode(Enum):
    """How a batch's tokens are distributed over its requests. Only attention backends read it."""

    EXTEND = "extend"  # any number of new tokens per request, after a cached prefix of any length
    DECODE = "decode"  # exactly one new token per request
    VERIFY = (
        "verify"  # the same number of new tokens for each request: nodes of a tree, behind a common prefix
    )


class CaptureHiddenMode(IntEnum):
    """Which hidden states a forward returns. Ordered: a graph captured at one mode serves those below."""

    NULL = 0
    LAST = 1  # [B, H] the last row of each request
    FULL = 2  # [T, H]


@dataclass(slots=True)
class ForwardBatch:
    """T new tokens of B requests. Tensors are on the device; host values exist only for planning.

    Page 0 is padding: a token whose slot lies in page 0 has its keys and values dropped, and an entry of
    `page_table` behind a request's last page may hold anything.
    """

    mode: ForwardMode
    input_ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64; of EXTEND [T, *RopeConfig.axes]. For rotary angles alone: KV goes by slots
    kv_slots: Tensor  # [T] int64, page * page_size + offset: where this forward's keys and values go
    page_table: Tensor  # [B, max_pages] int32
    seq_lens: Tensor  # [B] int32, length after this forward: cached prefix + new tokens
    query_start: Tensor  # [B + 1] int32, prefix sums of new tokens
    logits_rows: Tensor  # [R] int64, rows of T whose logits are wanted; R may be 0
    max_seq_len: int  # host upper bound of seq_lens
    hidden_mode: CaptureHiddenMode = CaptureHiddenMode.NULL
    query_lens_host: tuple[int, ...] | None = None  # [B] new tokens per request; EXTEND only
    seq_lens_host: tuple[int, ...] | None = None  # [B] equals seq_lens; EXTEND only
    # [B, N, W] bool over the last W >= N slots of each request, row n: new token n and its ancestors; VERIFY only
    tree_mask: Tensor | None = None


@dataclass(slots=True)
class ForwardOutput:
    """What one forward pass returns."""

    logits: Tensor  # [R, V] float32
    hidden: Tensor | None = (
        None  # by hidden_mode: None, [B, H'] or [T, H']; H' = k * H with k aux layers, else H
    )
