"""Plans and send orders contain all that a worker needs, and it keeps nothing past a prompt's end."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from common.kv_cache.page_space import PageSpace
from common.kv_cache.radix_cache import NoPrefixCache
from common.messages.generation import ImageSpan, OutputToken, SamplingParams
from common.node.completion import Deferred
from kv_transfer.send_order import SendOrder
from prefill_node.cost_curve import CostCurve
from prefill_node.forward_times import ForwardTimes
from prefill_node.limits import PrefillLimits
from prefill_node.mtp import MtpPrefill
from prefill_node.parts import Scheduling
from prefill_node.planner import Planner, prompt_plan
from prefill_node.queues import Queues
from prefill_node.request import PrefillRequest
from prefill_node.scheduler import Chunk
from prefill_node.send_orders import SendOrders
from prefill_node.step_plan import PromptPlan
from prefill_node.step_result import Drawn, PromptResult
from prefill_node.step_rules import PromptRules
from tests.fakes import mtp_models
from tests.fakes.node_cluster import NodeCluster, Shape
from tests.fakes.plan_wire import Wire
from tests.fakes.scenarios import prompt_of
from tests.fakes.vision import TinyVision
from tests.fakes.vision import prompt_of as seen_prompt_of

PAGE = 4
TEXT_ONLY = PromptRules()
LIMITS = PrefillLimits(
    chunk_tokens=8, max_batch=4, max_queue=8, max_model_len=64, vocab_size=99, drain_timeout=1.0
)
TIMES = ForwardTimes(CostCurve(range(1, LIMITS.chunk_tokens + 1)))
SPAN = ImageSpan(1, 2, bytes(32))


class Rig:
    """A planner over requests that have their pages."""

    def __init__(self, rules: PromptRules = TEXT_ONLY, times: ForwardTimes = TIMES) -> None:
        self.space = PageSpace(PAGE, 99, NoPrefixCache())
        self.queues = Queues()
        self.most: int | None = None  # tokens of a forward
        scheduling = Scheduling(self.space, rules, LIMITS, times, max_forward_tokens=lambda: self.most)
        self.planner = Planner(self.queues, scheduling)

    def request(
        self, room: int, tokens: int, images: tuple[ImageSpan, ...] = (), **sampling: Any
    ) -> PrefillRequest:
        keys = np.arange(10 * room, 10 * room + tokens)
        params = SamplingParams(max_tokens=3, **sampling)
        request = PrefillRequest(room, f"r{room}", keys, 1, params, "d", 0.0, images=images)
        request.lease = self.space.lease(keys, self.space.pages_for(tokens), 0)
        request.keyed = tokens
        self.queues.computing[room] = request
        return request

    def turn(self) -> PromptPlan | None:
        planned = self.planner.next(0.0)
        if planned is None:
            return None
        self.planner.begin(planned, 0.0)
        return planned.plan

    def read(self, *drawn: Drawn) -> list[tuple[int, Drawn | None]]:
        launched: Any = SimpleNamespace(read=lambda: PromptResult(drawn))
        return [(progress.request.room, progress.drawn) for progress in self.planner.read(launched)]


@pytest.mark.parametrize("lookahead", [0, 1, 3])
def test_a_plan_contains_all_that_a_forward_reads(lookahead: int) -> None:
    rig = Rig()
    cut, whole = rig.request(1, 10), rig.request(2, 6, (SPAN,), logprobs=2, presence_penalty=0.5)
    chunks = [Chunk(cut, 3, 5), Chunk(whole, 0, 6)]
    plan = prompt_plan(chunks, PAGE, PromptRules(lookahead), 7, (4, 5))
    assert Wire(PromptPlan)(plan) == plan
    assert (plan.generation, plan.forget) == (7, (4, 5))
    first, last = plan.chunks
    assert (first.key, first.start, first.end, first.length, first.final) == (1, 3, 8, 5, False)
    assert first.tokens(3, 99).tolist() == cut.keys[3 : 8 + lookahead].tolist()
    assert first.tokens(4, 6).tolist() == cut.keys[4:6].tolist()
    assert cut.lease is not None
    assert list(first.pages) == cut.lease.pages[:2], "no pages past the chunk"
    assert (last.images, last.final) == ((SPAN,), True)
    assert last.tokens(0, 99).tolist() == whole.keys.tolist(), "tokens end with the prompt"
    assert last.draw is not None
    assert (last.draw.sampling, last.draw.outputs) == (whole.sampling, 1)
    assert last.draw.tokens().tolist() == whole.keys.tolist(), "penalties count the whole text"
    assert plan.sampling is not None
    assert (plan.sampling.num_logprobs, plan.sampling.adjust is not None) == (2, True)


def test_a_text_without_adjustments_stays_at_home() -> None:
    rig = Rig()
    plan = prompt_plan([Chunk(rig.request(1, 6), 0, 6)], PAGE, PromptRules(), 1)
    assert plan.chunks[0].draw is not None
    assert plan.chunks[0].draw.text == b""
    assert prompt_plan([Chunk(rig.request(2, 6), 0, 5)], PAGE, PromptRules(), 1).sampling is None


@pytest.mark.parametrize(("first", "rows"), [(None, 0), (0, 5), (3, 5), (5, 3), (7, 1), (8, 0), (9, 0)])
def test_hidden_states_are_read_from_the_first_position_that_is_wanted(first: int | None, rows: int) -> None:
    request = Rig().request(1, 12, hidden_states_from=first)
    assert prompt_plan([Chunk(request, 3, 5)], PAGE, PromptRules(), 1).chunks[0].states == rows


def test_forwards_are_shorter_while_a_bound_holds() -> None:
    """As on a movable node that decodes and computes a prompt in between."""
    rig = Rig()
    rig.request(1, 19)
    rig.most = 4
    first = rig.turn()
    rig.most = None
    second = rig.turn()
    assert first is not None
    assert second is not None
    assert [(each.start, each.end) for each in (*first.chunks, *second.chunks)] == [(0, 4), (4, 12)]


def test_results_go_to_the_prompts_that_ended() -> None:
    rig = Rig()
    short, long = rig.request(1, 5), rig.request(2, 19)
    plan = rig.turn()
    assert plan is not None
    assert [(each.key, each.end) for each in plan.chunks] == [(2, 3), (1, 5)]
    assert (short.in_flight, long.in_flight, long.scheduled, long.computed) == (1, 1, 3, 0)
    later = rig.turn()
    assert later is not None
    drawn = Drawn(OutputToken(8))
    assert rig.read(drawn) == [(2, None), (1, drawn)]
    assert (long.in_flight, long.computed, long.computed_by) == (1, 3, plan.generation)
    assert rig.read() == [(2, None)]
    assert (long.in_flight, long.computed, long.computed_by) == (0, 11, later.generation)


@pytest.mark.parametrize(
    ("rules", "images", "kept"),
    [(PromptRules(), (), False), (PromptRules(), (SPAN,), True), (PromptRules(3, 2), (), True)],
)
def test_a_worker_is_told_of_prompts_that_end_early(
    rules: PromptRules, images: tuple[ImageSpan, ...], kept: bool
) -> None:
    """Only prompts that may have data at the worker are named; a last chunk drops its prompt's data itself."""
    rig = Rig(rules)
    begun, other = rig.request(1, 12, images), rig.request(2, 3, images)
    assert rig.turn() is not None
    for request in (begun, other):
        rig.queues.end(request)
        rig.planner.ended(request)
    plan = rig.turn()
    if kept:
        assert plan == PromptPlan(generation=2, forget=(1,))
        rig.read(Drawn(None))
        assert rig.read() == [], "a plan without a forward"
    assert rig.turn() is None


class Slots:
    """A sender whose rooms are granted by the test."""

    def __init__(self) -> None:
        self.granted: dict[int, Any] = {}

    def slots(self, room: int) -> Any:
        return self.granted.get(room)

    def grant(self, room: int, held_pages: int = 0) -> None:
        self.granted[room] = SimpleNamespace(generation=10 + room, held_pages=held_pages)


def orders_of(slots: Slots, listen: Any = lambda: None) -> SendOrders:
    sender: Any = slots
    return SendOrders(sender, PAGE, "", listen)


def test_an_order_names_each_page_once_and_the_plan_that_completes_it() -> None:
    rig, slots = Rig(), Slots()
    orders, request = orders_of(slots), rig.request(1, 10)
    assert request.lease is not None
    pages = request.lease.pages
    assert orders.of(request) is None, "no decode node has granted pages"
    slots.grant(1)
    request.computed, request.computed_by = 8, 3
    order = orders.of(request)
    assert order is not None
    assert order == SendOrder(room=1, generation=11, after=3, complete=2, first=0, pages=tuple(pages[:2]))
    assert Wire(SendOrder)(order) == order
    request.computed, request.computed_by = 10, 4
    request.first_token = OutputToken(5)
    last = orders.of(request)
    assert last is not None
    assert (last.after, last.complete, last.first, list(last.pages)) == (4, 3, 2, pages[2:])
    assert last.record is not None
    assert (last.record.first_token, last.record.num_tokens) == (5, 10)
    assert Wire(SendOrder)(last) == last
    assert orders.of(request) is None, "the event of the grant may come after the record"


def test_a_request_that_has_ended_has_no_order() -> None:
    rig, slots = Rig(), Slots()
    orders, request = orders_of(slots), rig.request(1, 10)
    slots.grant(1)
    request.computed = 8
    request.ended = True
    assert orders.of(request) is None


def test_what_the_decode_node_holds_is_not_sent() -> None:
    rig, slots = Rig(), Slots()
    orders, request = orders_of(slots), rig.request(1, 12)
    slots.grant(1, held_pages=2)
    request.computed = 11
    order = orders.of(request)
    assert order is not None
    assert (order.first, order.pages, order.complete) == (2, (), 2)
    request.computed = 12
    order = orders.of(request)
    assert order is not None
    assert (order.first, len(order.pages)) == (2, 1)


def test_grants_during_a_forward_become_orders_of_that_forward() -> None:
    """Each order covers all pages that the forward completes; the node listens only while prompts wait for grants."""
    rig, slots, heard = Rig(), Slots(), list[int]()
    orders = orders_of(slots, lambda: heard.append(1))
    early, late = rig.request(1, 5), rig.request(2, 8)
    slots.grant(1)
    orders.begin(6, [Chunk(early, 0, 5), Chunk(late, 0, 6)])
    first = orders.of_running()
    assert [(each.room, each.after, each.first, len(each.pages)) for each in first] == [(1, 6, 0, 2)]
    assert orders.of_running() == []
    slots.grant(2)
    second = orders.of_running()
    assert [(each.room, each.after, each.first, len(each.pages)) for each in second] == [(2, 6, 0, 1)]
    assert orders.of_running() == []
    assert len(heard) == 3
    late.computed = 6
    rest = orders.of(late)
    assert rest is not None
    assert (rest.pages, rest.complete) == ((), 1), "what has left with the layers is not sent again"


def test_a_prompt_that_ends_early_leaves_nothing_of_a_draft() -> None:
    """Hidden states of MTP modules stay with the worker from chunk to chunk, until the last one or an abort."""
    draft, step = mtp_models.drafting("mtp", 3)
    shape = Shape(page_size=4, chunk_tokens=4, draft=draft, step=step, completion=Deferred)
    with NodeCluster(shape) as cluster:
        drafts = cluster.prefill.draft
        assert isinstance(drafts, MtpPrefill)
        gone, other = cluster.submit(prompt_of(30), 5), cluster.submit(prompt_of(29, 1), 5)
        cluster.run(until=lambda: bool(drafts.kept))
        assert set(drafts.kept) <= {gone.room, other.room}
        kept = gone if gone.room in drafts.kept else other
        cluster.abort(kept)
        cluster.run()
        assert not drafts.kept
        cluster.settle()


@pytest.mark.parametrize("turns", [0, 2])
def test_a_prompt_that_ends_early_leaves_no_image(turns: int) -> None:
    """This holds whether it waits for its image or has begun; shared rows stay in the cache."""
    vision = TinyVision()
    cluster = NodeCluster(replace(Shape(), vision_stage=vision, chunk_tokens=3))
    try:
        ids, spans = seen_prompt_of((1, 2, (1,), 3, 4, 5, (2,), 7))
        call = cluster.submit(ids, 5, images=spans)
        cluster.turn(2)
        if turns:
            vision.send(1, 2)
            cluster.run(until=lambda: vision.embeds[0].encoded > 0)
        assert len(vision.prompts[0]) == 1
        cluster.abort(call)
        cluster.turn(2)
        assert len(vision.prompts[0]) == 0
        cluster.settle()
    finally:
        vision.close()
        cluster.close()


def test_prompts_that_wait_for_room_decide_how_many_share_a_forward() -> None:
    curve = CostCurve((4, 8), {4: 10.0, 8: 16.0})
    rig = Rig(times=ForwardTimes(curve))
    for room in (1, 2):
        rig.request(room, 4)
    for room in range(3, 12):
        params = SamplingParams(max_tokens=3)
        rig.queues.wait(PrefillRequest(room, f"r{room}", np.arange(4), 1, params, "d", 0.0))
    plan = rig.turn()
    assert plan is not None
    assert [chunk.key for chunk in plan.chunks] == [1, 2]
