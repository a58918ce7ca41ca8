"""Turns scheduling decisions into one plan per turn, and the results of a plan into tokens of requests."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from common.engine.sampling.sampling_plan import LatestVariant, SamplingVariant, sampling_variant
from common.messages.generation import SamplingParams
from common.node.announced_work import Work
from decode_node.batch_resources import BatchResources
from decode_node.batch_rows import BatchRows
from decode_node.request import DecodeRequest, Emission
from decode_node.step_plan import CARRIED, NO_MOVES, Moves, PlannedRow, StepPlan
from decode_node.step_result import Launched
from decode_node.step_rules import StepRules


def step_plan(
    batch: Sequence[DecodeRequest],
    rules: StepRules,
    generation: int,
    moves: Moves = NO_MOVES,
    forced_width: int = 0,
    variant_of: Callable[[Iterable[SamplingParams], bool], SamplingVariant] = sampling_variant,
) -> StepPlan:
    """Plan one step over requests that have pages and rows; an empty batch gives a plan of moves only.

    Args:
        forced_width: the width of the step for forced tokens; 0: a usual step.
        variant_of: `sampling_variant`, or what remembers it.
    """
    if not batch:
        return StepPlan(generation=generation, moves=moves)
    rows = []
    for request in batch:
        assert request.lease is not None
        pages, wanted = len(request.lease.pages), request.sampling
        rows.append(PlannedRow(request.row, pages, wanted.logprobs, len(wanted.logprob_ids)))
    width = forced_width or rules.widths.choose(len(batch))
    forced = tuple(request.forced[:width] for request in batch)
    carried = (CARRIED,) * rules.carried
    found = [carried] * len(batch) if forced_width else rules.drafts.propose(batch, width)
    drafts = tuple(
        _with_end_token(request, own or host, width) if own or forced_width else host
        for request, own, host in zip(batch, forced, found)
    )
    return StepPlan(
        generation=generation,
        moves=moves,
        rows=tuple(rows),
        width=width,
        forced_step=forced_width > 0,
        sampling=variant_of(
            [request.sampling for request in batch], any(request.masked for request in batch)
        ),
        drafts=drafts,
        forced=() if drafts or not any(forced) else forced,
        states=_with_states(batch) if rules.hidden_states else (),
    )


def _with_states(batch: Sequence[DecodeRequest]) -> tuple[int, ...]:
    return tuple(
        index for index, request in enumerate(batch) if request.sampling.hidden_states_from is not None
    )


def _with_end_token(request: DecodeRequest, drafts: tuple[int, ...], width: int) -> tuple[int, ...]:
    """Add a token that ends the text to the drafts of a masked request, which the worker pads up to `width`.

    Whatever is drawn past it is dropped, so that no masks have to be computed for the padding.
    """
    if request.matcher is None or not request.masked or len(drafts) == width:
        return drafts
    return (*drafts, request.matcher.end_token)


class Planned(NamedTuple):
    """A plan and the requests of its rows."""

    plan: StepPlan
    batch: Sequence[DecodeRequest]
    forced: Sequence[int]  # per row, how many of its drafts are forced tokens
    at: float  # monotonic seconds


class Planner:
    """Makes plans and reads their results in the same order."""

    def __init__(self, resources: BatchResources, rows: BatchRows, rules: StepRules) -> None:
        self._resources = resources
        self._rows = rows
        self._rules = rules
        self._unread: deque[Planned] = deque()
        self._generation = 0
        self._grown = True  # no results have been read since pages were last allocated
        self._variants = LatestVariant()

    def next(self, now: float) -> Planned | None:
        """Return the plan of this turn; None if the device has nothing to do."""
        self._grown = True
        batch, forced_width = self._resources.batch()
        moves = self._rows.take_moves()
        if not batch and not moves:
            return None
        self._generation += 1
        variant_of = self._variants.of
        plan = step_plan(batch, self._rules, self._generation, moves, forced_width, variant_of)
        forced = [min(len(request.forced), plan.width) for request in batch]
        planned = Planned(plan, batch, forced, now)
        self._unread.append(planned)
        self._resources.planned(self._generation)
        return planned

    def rows(self) -> StepPlan | None:
        """Return a plan without a step that sets rows and pages for the next one; None if there are none to set.

        For the time in which a step runs. Its results are never read: the next step follows it on the device.
        """
        if not self._grown or self._rows.joining:
            self._grown = True
            self._resources.grow_ahead()
        moves = self._rows.take_rows()
        if not moves:
            return None
        self._generation += 1
        return StepPlan(generation=self._generation, moves=moves)

    def launched(self, planned: Planned) -> None:
        """Count the step as in flight."""
        for request in planned.batch:
            request.mark("decode_start", planned.at)
            request.step_launched(self._rules.tokens_of(planned.plan.width))

    def read(self, launched: Launched) -> list[Emission]:
        """Process the results of the oldest unread plan, after its completion."""
        plan, batch, forced, _ = self._unread.popleft()
        result = launched.read()
        self._grown = False
        self._resources.read(plan.generation)
        # Tokens that pad forced ones are not drafts.
        emissions = [
            Emission(
                request,
                row.tokens,
                0 if count else self._rules.carried if plan.forced_step else row.drafted,
                count,
                row.states,
            )
            for request, row, count in zip(batch, result.rows, forced, strict=True)
        ]
        if batch:
            self._rules.observe(plan, emissions, result.seconds)
        for emission in emissions:
            emission.request.step_read(self._rules.tokens_of(plan.width), len(emission.tokens))
        return emissions

    def most_masks(self, planned: Planned) -> int:
        """Bound the masks that a masked step needs."""
        constrained = sum(request.masked for request in planned.batch)
        return constrained * self._rules.tokens_of(planned.plan.width)

    def work(self, planned: Planned) -> Work:
        """Estimate the work of a plan's step. A row may verify fewer drafts than it has room for."""
        batch = planned.batch
        drafts = len(batch) * (self._rules.tokens_of(planned.plan.width) - 1)
        return Work.of(len(batch), sum(request.seq_len for request in batch), drafts)
