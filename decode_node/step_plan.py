"""What one turn of a decode node does on its device, decided without a device.

A plan is data: the scheduler makes it, `Worker.apply` carries it out, and nothing else changes device state. The graph
that a plan runs follows from the plan alone, so every process that applies it chooses the same one.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from common.engine.sampling.sampling_plan import SamplingVariant
from common.engine.state.draft_row import NO_DRAFT, DraftRow
from common.messages.generation import SamplingParams


class PlannedRow(NamedTuple):
    """One request of the step."""

    row: int
    pages: int  # held: what a round would write past them goes to padding page 0
    logprobs: int | None  # how many top log-probabilities are wanted; None: not even the token's own


class Join(msgspec.Struct, frozen=True, kw_only=True):
    """Fills a relay row for a request whose last token has no KV yet: at hand-over, and after a retraction."""

    row: int
    text: list[int]  # prompt and output
    outputs: int  # tokens at the end of `text` that are output
    sampling: SamplingParams
    rope_delta: int = 0
    draft: DraftRow = NO_DRAFT  # a Load brings it where the request was retracted


class Save(msgspec.Struct, frozen=True):
    """Copies pages and the draft's part of a row to host memory, kept under `key`.

    The pages and the row must not be given to anybody else before the plan has been read: a peer's writes do not follow
    the order of the device's stream.
    """

    key: int  # the request's room
    row: int
    pages: tuple[int, ...]


class Load(msgspec.Struct, frozen=True):
    """Copies saved pages back, and the draft's part to a row that the same plan joins."""

    key: int
    row: int
    first: int  # saved pages before this one are on the device already
    pages: tuple[int, ...]


class Moves(msgspec.Struct, frozen=True, kw_only=True):
    """What changes before a step, applied in the order of the fields."""

    saves: tuple[Save, ...] = ()
    joins: tuple[Join, ...] = ()
    loads: tuple[Load, ...] = ()
    forget: tuple[int, ...] = ()  # keys of what is saved and not needed any more
    cells: tuple[tuple[int, int, int], ...] = ()  # (row, logical page, page id), each cell once

    def __bool__(self) -> bool:
        return any((self.saves, self.joins, self.loads, self.forget, self.cells))


NO_MOVES = Moves()


class StepPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Moves, then one step over `rows`, if there are any."""

    generation: int  # ascending
    moves: Moves = NO_MOVES
    rows: tuple[PlannedRow, ...] = ()  # empty: no step
    width: int = 0  # drafts in a row, where a node has steps of several widths
    sampling: SamplingVariant | None = None  # the variant that serves all rows; None only without rows
    drafts: tuple[
        tuple[int, ...], ...
    ] = ()  # for each row, from its text; empty: a draft model proposes, or nobody
