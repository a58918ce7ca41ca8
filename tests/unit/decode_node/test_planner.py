"""Plans of steps as pure data: widths, drafts and forced tokens of each row, and what is read back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from common.kv_cache.page_space import PageSpace
from common.kv_cache.radix_cache import NoPrefixCache
from common.messages.generation import OutputToken, SamplingParams
from common.messages.identity import NodeRef
from decode_node.batch_rows import BatchRows
from decode_node.planner import Planner, step_plan
from decode_node.request import DecodeRequest
from decode_node.step_plan import CARRIED, NO_MOVES, Moves, PlannedRow, StepPlan
from decode_node.step_result import RowTokens, StepResult
from decode_node.step_rules import FixedWidth, StepRules

END = 99
PREFILL = NodeRef(name="p", role="prefill", incarnation="7" * 32)
CONSTRAINED: Any = SimpleNamespace(end_token=END)


class Texts:
    """Proposes for each request its room, as often as the step is wide, but at most three times."""

    needs_results = True

    def propose(self, requests: Sequence[DecodeRequest], width: int, /) -> tuple[tuple[int, ...], ...]:
        return tuple((request.room,) * min(width, 3) for request in requests)


class Resources:
    """A batch that the test sets."""

    def __init__(self) -> None:
        self.requests: list[DecodeRequest] = []
        self.width = 0
        self.planned_generations: list[int] = []
        self.grown = 0

    def batch(self) -> tuple[list[DecodeRequest], int]:
        return self.requests, self.width

    def planned(self, generation: int) -> None:
        self.planned_generations.append(generation)

    def read(self, generation: int) -> None:
        assert generation in self.planned_generations

    def grow_ahead(self) -> None:
        self.grown += 1


def request(room: int, forced: tuple[int, ...] = (), matcher: Any = None, **sampling: Any) -> DecodeRequest:
    made = DecodeRequest(
        room=room,
        request_id=f"r{room}",
        prompt=[1] * 6,
        emitted=0,
        sampling=SamplingParams(max_tokens=50, **sampling),
        prefill=PREFILL,
        received=0.0,
        deadline=9.0,
        row=room,
        output=[5],
        launched=1,
        forced=forced,
        matcher=matcher,
        masked=matcher is not None,
    )
    space = PageSpace(4, 9, NoPrefixCache())
    made.lease = space.lease(space.keys(made.prompt), 2, 0)
    return made


def plan(rules: StepRules, *batch: DecodeRequest, forced_width: int = 0) -> StepPlan:
    return step_plan(batch, rules, 7, NO_MOVES, forced_width)


def test_a_plain_step_has_rows_and_nothing_else() -> None:
    made = plan(StepRules(), request(3, logprobs=2), request(1))
    assert made.rows == (PlannedRow(3, 2, 2), PlannedRow(1, 2, None))
    assert (made.generation, made.width, made.forced_step) == (7, 0, False)
    assert (made.drafts, made.forced, made.states) == ((), (), ())


def test_drafts_come_from_texts_unless_a_grammar_forces_tokens() -> None:
    """Where a constrained request has fewer drafts than the step is wide, a token that ends the text follows them."""
    rules = StepRules(tokens_per_step=5, widths=FixedWidth(4), drafts=Texts(), forced_drafts=4)
    made = plan(
        rules,
        request(1),
        request(2, forced=(40, 41), matcher=CONSTRAINED),
        request(3, forced=(40, 41, 42, 43, 44), matcher=CONSTRAINED),
        request(4, matcher=CONSTRAINED),
    )
    assert made.width == 4
    assert made.drafts == ((1, 1, 1), (40, 41, END), (40, 41, 42, 43), (4, 4, 4))
    assert made.forced == (), "they are among the drafts"


def test_a_draft_model_hears_of_forced_tokens() -> None:
    rules = StepRules(tokens_per_step=4, widths=FixedWidth(3), forced_drafts=3)
    made = plan(rules, request(1), request(2, forced=(40, 41, 42, 43), matcher=CONSTRAINED))
    assert (made.drafts, made.forced) == ((), ((), (40, 41, 42)))
    assert plan(rules, request(1), request(2, matcher=CONSTRAINED)).forced == ()


def test_a_step_for_forced_tokens_verifies_what_other_rows_carry() -> None:
    rules = StepRules(tokens_per_step=3, widths=FixedWidth(2), drafts=Texts(), carried=2)
    made = plan(
        rules,
        request(1),
        request(2, forced=(40,), matcher=CONSTRAINED),
        request(3, matcher=CONSTRAINED),
        forced_width=7,
    )
    assert (made.width, made.forced_step, made.forced) == (7, True, ())
    assert made.drafts == ((CARRIED, CARRIED), (40, END), (CARRIED, CARRIED, END))


@pytest.mark.parametrize(("serves", "states"), [(True, (0, 2)), (False, ())])
def test_rows_whose_hidden_states_are_wanted(serves: bool, states: tuple[int, ...]) -> None:
    batch = [request(1, hidden_states_from=0), request(2), request(3, hidden_states_from=9)]
    assert plan(StepRules(hidden_states=serves), *batch).states == states


def read_back(plan: StepPlan, *rows: RowTokens) -> Any:
    return SimpleNamespace(read=lambda: StepResult(rows))


def drawn(*ids: int) -> list[OutputToken | None]:
    return [OutputToken(each) for each in ids]


def test_results_are_read_in_the_order_of_plans() -> None:
    resources = Resources()
    stub: Any = resources
    rows = BatchRows(4)
    rules = StepRules(tokens_per_step=4, widths=FixedWidth(3), forced_drafts=3)
    planner = Planner(stub, rows, rules)
    assert planner.next(0.0) is None, "the device has nothing to do"
    first, second = request(1), request(2, forced=(40, 41, 42, 43), matcher=CONSTRAINED)
    resources.requests = [first, second]
    planned = planner.next(3.0)
    assert planned is not None
    assert (planned.plan.generation, list(planned.forced)) == (1, [0, 3])
    assert planner.most_masks(planned) == 4, "one constrained request, four draws"
    assert planner.most_masks(planned._replace(batch=[first, second, second])) == 8
    work = planner.work(planned)
    assert work == type(work).of(2, first.seq_len + second.seq_len, 2 * 3)
    planner.launched(planned)
    assert [each.in_flight for each in planned.batch] == [1, 1]
    assert [each.launched for each in planned.batch] == [5, 5]
    assert [each.stages for each in planned.batch] == [{"decode_start": 3.0}] * 2
    emissions = planner.read(read_back(planned.plan, RowTokens(drawn(8, 9), 3), RowTokens(drawn(40), 3)))
    assert [(each.request.room, each.drafted, each.forced) for each in emissions] == [(1, 3, 0), (2, 0, 3)]
    assert [each.in_flight for each in planned.batch] == [0, 0]
    assert [each.launched for each in planned.batch] == [3, 2], "as many as were drawn"


def test_carried_drafts_count_as_drafts_of_a_step_for_forced_tokens() -> None:
    resources = Resources()
    stub: Any = resources
    planner = Planner(stub, BatchRows(4), replace(StepRules(tokens_per_step=3), carried=2))
    resources.requests, resources.width = [request(1), request(2, forced=(40,), matcher=CONSTRAINED)], 5
    planned = planner.next(0.0)
    assert planned is not None
    planner.launched(planned)
    emissions = planner.read(read_back(planned.plan, RowTokens(drawn(8), 5), RowTokens(drawn(40), 5)))
    assert [(each.drafted, each.forced) for each in emissions] == [(2, 0), (0, 1)]


def test_pages_are_allocated_ahead_once_results_were_read() -> None:
    """A plan of rows only has a generation of its own, since worker and node count plans alike."""
    resources = Resources()
    stub: Any = resources
    rows = BatchRows(4)
    planner = Planner(stub, rows, StepRules())
    resources.requests = [request(1)]
    planned = planner.next(0.0)
    assert planned is not None
    planner.launched(planned)
    assert planner.rows() is None
    assert resources.grown == 0, "nothing was read since the plan"
    planner.read(read_back(planned.plan, RowTokens(drawn(8))))
    rows.append(1, 0, [5])
    made = planner.rows()
    assert made == StepPlan(generation=2, moves=Moves(cells=((1, 0, 5),)))
    assert resources.grown == 1
    assert planner.rows() is None
    assert resources.grown == 1, "once per result"
    following = planner.next(0.0)
    assert following is not None
    assert following.plan.generation == 3
    assert resources.planned_generations == [1, 3]
