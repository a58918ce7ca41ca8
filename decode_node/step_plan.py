"""The plan of one turn of a decode node: everything its device does, decided without a device.

A plan is data: the scheduler makes it, `Worker.apply` executes it, and nothing else changes device state. The plan
determines which graph runs, so every process that applies it chooses the same one.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from common.engine.sampling.sampling_plan import SamplingVariant
from common.engine.state.draft_row import NO_DRAFT, DraftRow
from common.kv_cache.host_plan import HostFetch, Store
from common.messages.generation import SamplingParams

# Stands in a step for forced tokens for a draft that the relay row carries from the round before.
CARRIED = -1


class PlannedRow(NamedTuple):
    """One request of the step."""

    row: int
    pages: int  # number held: writes of a round past them go to padding page 0
    logprobs: int | None  # number of top log-probabilities; None: not even the token's own is computed
    logprob_ids: int = 0  # number of tokens whose log-probabilities its request wants


class Join(msgspec.Struct, frozen=True, kw_only=True):
    """Initializes a relay row for a request whose last token has no KV yet: at hand-over and after a retraction."""

    row: int
    text: list[int]  # prompt and output
    outputs: int  # number of tokens at the end of `text` that are output
    sampling: SamplingParams
    rope_delta: int = 0
    slot: int = 0  # holds the state after all of `text` but its last token; 0: the model keeps none
    draft: DraftRow = NO_DRAFT  # after a retraction, a Load sets it instead


class Save(msgspec.Struct, frozen=True):
    """Copies pages, per-request state and the rest of a row to host memory, stored under `key`.

    Pages, slot and row must not be reused before `Worker.unsaved` says that the save has ended, because neither a
    peer's writes nor later steps wait for it.
    """

    key: int  # the request's room
    row: int
    pages: tuple[int, ...]
    slot: int = 0  # holds per-request state; 0: the model keeps none


class Load(msgspec.Struct, frozen=True):
    """Restores a backup: pages, per-request state, and the rest of a row, which the same plan joins."""

    key: int
    row: int
    first: int  # saved pages before this index are already on the device
    pages: tuple[int, ...]
    slot: int = 0


class Moves(msgspec.Struct, frozen=True, kw_only=True):
    """Device changes before a step, applied in the order of the fields."""

    stores: tuple[Store, ...] = ()
    fetches: tuple[HostFetch, ...] = ()
    saves: tuple[Save, ...] = ()
    joins: tuple[Join, ...] = ()
    loads: tuple[Load, ...] = ()
    forget: tuple[int, ...] = ()  # keys of backups that are not needed any more
    cells: tuple[tuple[int, int, int], ...] = ()  # (row, logical page, page id), each cell once

    def __bool__(self) -> bool:
        return any((self.stores, self.fetches, self.saves, self.joins, self.loads, self.forget, self.cells))


NO_MOVES = Moves()


class StepPlan(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Moves, then one step over `rows` if there are any.

    Results of a plan that only sets rows (joins and cells) are not read: it is complete before the next step.
    """

    generation: int  # increases with each plan
    moves: Moves = NO_MOVES
    rows: tuple[PlannedRow, ...] = ()  # empty: no step
    width: int = 0  # drafts per request, on nodes that have steps of several widths
    # The step is one for forced tokens, without a draft phase: `drafts` has all that it verifies.
    forced_step: bool = False
    sampling: SamplingVariant | None = None  # the variant that serves all rows; None only without rows
    # Host drafts of each row; empty if the host proposes none. CARRIED: a draft of the row itself (forced steps).
    drafts: tuple[tuple[int, ...], ...] = ()
    # Tokens of each row that replace the first drafts of a draft model, because they are forced; empty: none.
    forced: tuple[tuple[int, ...], ...] = ()
    states: tuple[int, ...] = ()  # indices of the rows whose hidden states the router gets

    @property
    def masked(self) -> bool:
        """True if the step draws only after it was given the masks of grammars."""
        return self.sampling is not None and self.sampling.masked


class Masks(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The tokens that grammars allow at the draws of one step."""

    generation: int  # the plan's
    # The row of logits that each mask is for: request * nodes + node, requests in the order of the plan.
    rows: tuple[int, ...]
    words: bytearray  # int32 [len(rows), ceil(vocabulary / 32)], see ops/mask_logits.py
