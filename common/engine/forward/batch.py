"""The input and output of one forward pass: flat tokens of several requests, and the slots of their KV."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, IntEnum

from torch import Tensor

from common.engine.layers.logit_rows import LogitRows

SAVES = 2  # states inside its new tokens that a forward saves of one request, at most


class ForwardMode(Enum):
    """The distribution of a batch's tokens over its requests. Read only by attention backends."""

    EXTEND = "extend"  # any number of new tokens per request, after a cached prefix of any length
    DECODE = "decode"  # exactly one new token per request
    # The same number of new tokens for each request: nodes of a tree after a common prefix.
    VERIFY = "verify"


class CaptureHiddenMode(IntEnum):
    """The hidden states that a forward returns. Ordered: a graph captured in one mode serves the lower modes."""

    NULL = 0
    LAST = 1  # [B, H] the last row of each request
    FULL = 2  # [T, H]


@dataclass(frozen=True, slots=True)
class BatchState:
    """Per-request state of a batch, for models with per-request planes.

    A state holds the first tokens of a request. An EXTEND forward leaves all of its tokens in it. A DECODE or VERIFY
    forward does not know which of its tokens will be accepted: it stores what they would add in `windows`, and the
    next forward adds the accepted ones before anything else.
    """

    slots: Tensor  # [B] int64 of the per-request planes; 0: padding
    # EXTEND only: [B, n, 2] int64, (slot, count): the state after `count` of the new tokens is also stored in that
    # slot; slot 0: nothing is stored. Counts are multiples of the mixers' chunks. None: no state is saved.
    saves: Tensor | None = None
    # Below: DECODE and VERIFY only.
    rows: Tensor | None = None  # [B] int64 of `windows`; 0: padding
    pending: Tensor | None = None  # [B] int64: accepted tokens in the window that the state does not hold
    windows: Mapping[int, Tensor] = field(default_factory=dict)  # layer -> [num_rows + 1, N, width]


@dataclass(slots=True)
class ForwardBatch:
    """T new tokens of B requests. Tensors are on the device; host values exist only for planning.

    Page 0 is padding: the keys and values of a token whose slot is in page 0 are dropped. Entries of `page_table`
    past a request's last page are undefined.
    """

    mode: ForwardMode
    input_ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64; for EXTEND [T, *RopeConfig.axes]. Only for rotary angles: KV uses slots
    kv_slots: Tensor  # [T] int64, page * page_size + offset: where this forward stores keys and values
    page_table: Tensor  # [B, max_pages] int32
    seq_lens: Tensor  # [B] int32, length after this forward: cached prefix + new tokens
    query_start: Tensor  # [B + 1] int32, prefix sums of new tokens
    logits_rows: Tensor  # [R] int64, rows of T whose logits are computed; R may be 0
    max_seq_len: int  # host upper bound of seq_lens
    hidden_mode: CaptureHiddenMode = CaptureHiddenMode.NULL
    query_lens_host: tuple[int, ...] | None = None  # [B] new tokens per request; EXTEND only
    seq_lens_host: tuple[int, ...] | None = None  # [B] copy of seq_lens; EXTEND only
    # [B, N, W] bool over the last W >= N slots of each request, row n: new token n and its ancestors; VERIFY only
    tree_mask: Tensor | None = None
    state: BatchState | None = None  # None: the model keeps nothing per request
    loaded_tokens: int = 0  # of cached prefixes, that are copied from host memory while it runs; EXTEND only


@dataclass(slots=True)
class ForwardOutput:
    """The result of one forward pass."""

    rows: LogitRows  # of `logits_rows`
    # None, [B, H'] or [T, H'] by hidden_mode; H' = k * H with k aux layers, else H.
    hidden: Tensor | None = None
    # [T, H] after the last norm, the input of the LM head; a view of memory that the next forward may overwrite
    last: Tensor | None = None

    @property
    def logits(self) -> Tensor:
        """The logits [R, V] float32; gathered from all ranks at each use."""
        return self.rows.whole()
