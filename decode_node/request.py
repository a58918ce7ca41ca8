"""One request on its way through a decode node."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from common.engine.kv_cache.page_space import PageLease, as_keys
from common.engine.kv_cache.radix_cache import Keys
from common.messages.generation import OutputToken, SamplingParams
from common.messages.identity import NodeRef


@dataclass(slots=True)
class Backup:
    """KV pages of a retracted request in host memory."""

    pages: torch.Tensor  # as KvPool.copy_pages_out gives it
    num_pages: int

    @property
    def nbytes(self) -> int:
        return self.pages.numel() * self.pages.element_size()


@dataclass(slots=True, eq=False)
class DecodeRequest:
    """Lives in exactly one queue at a time (see queues.py).

    Positions: prompt tokens 0 .. n-1 arrive with KV. output[i] stands at n + i. A step writes the KV of the last known
    token and draws the next. `launched` counts drawn tokens including those that the host has not read yet, so
    seq_len = n + launched - 1 tokens have KV once all launched steps are done.
    """

    room: int
    request_id: str
    prompt: list[int]
    emitted: int  # tokens at the end of prompt that are output already
    sampling: SamplingParams
    prefill: NodeRef
    received: float  # monotonic seconds
    deadline: float
    lease: PageLease | None = None
    row: int = 0  # in RequestTable and RelayState, 0 = none
    output: list[int] = field(
        default_factory=list
    )  # tokens the host knows; the first one came with the record
    launched: int = 0  # tokens drawn or being drawn, the first included
    in_flight: int = 0  # steps not read yet that write to this request's row and pages
    skipped: int = 0  # how often later requests were admitted before this one
    ended: bool = False
    trusted: bool = (
        True  # False: its KV gave logits that are not finite, so the prefix cache must not keep it
    )
    retract: bool = False  # leaves the batch as soon as nothing is in flight
    backup: Backup | None = None
    stages: dict[str, float] = field(default_factory=dict)
    prompt_keys: Keys = field(init=False)

    def __post_init__(self) -> None:
        self.prompt_keys = as_keys(self.prompt)

    @property
    def seq_len(self) -> int:
        """Tokens with KV after everything launched."""
        return len(self.prompt) + self.launched - 1

    @property
    def max_output(self) -> int:
        """Tokens that this attempt may emit at most, the first included."""
        return self.sampling.max_tokens - self.emitted

    @property
    def exhausted(self) -> bool:
        """All tokens it may have are drawn or being drawn: launching it again would be wasted."""
        return self.launched >= self.max_output

    def remaining(self) -> int:
        return max(self.max_output - self.launched, 0)

    def computed_keys(self) -> Keys:
        """Tokens with KV that the host knows: what the prefix cache may keep."""
        return as_keys(self.prompt + self.output[:-1])

    def mark(self, stage: str, now: float) -> None:
        self.stages.setdefault(stage, now - self.received)


@dataclass(frozen=True, slots=True)
class Emission:
    """Tokens of one request in one step, as a step reports them."""

    request: DecodeRequest
    tokens: list[OutputToken | None]  # None: the logits were not finite
