"""Turns scheduling decisions into one plan per turn, and results of plans into the progress of prompts."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from common.engine.sampling.sampling_plan import adjustment_facts, sampling_variant
from common.kv_cache.host_plan import Store
from common.messages.generation import PromptLogprob
from common.node.announced_work import Work
from common.node.hidden_states import StateRows
from prefill_node.parts import Scheduling
from prefill_node.queues import Queues
from prefill_node.request import PrefillRequest
from prefill_node.scheduler import Chunk, chunk_work, fewest_keys_first, plan_chunks
from prefill_node.step_plan import FirstDraw, PlannedChunk, PromptPlan
from prefill_node.step_result import Drawn, Launched
from prefill_node.step_rules import PromptRules


def prompt_plan(
    chunks: Sequence[Chunk],
    page_size: int,
    rules: PromptRules,
    generation: int,
    forget: tuple[int, ...] = (),
    stores: tuple[Store, ...] = (),
) -> PromptPlan:
    """Return a plan of one forward over chunks of prompts that have pages. Without chunks there is no forward."""
    finals = [chunk.request for chunk in chunks if chunk.final]
    sampling = None
    if finals:
        sampling = sampling_variant([each.sampling for each in finals], any(each.mask for each in finals))
    adjusted = sampling is not None and sampling.adjust is not None
    return PromptPlan(
        generation=generation,
        stores=stores,
        chunks=tuple([_planned(chunk, page_size, rules.lookahead, adjusted) for chunk in chunks]),
        sampling=sampling,
        forget=forget,
    )


def _planned(chunk: Chunk, page_size: int, lookahead: int, adjusted: bool) -> PlannedChunk:
    """`adjusted`: whether the logits of any prompt of the batch are adjusted."""
    request, end = chunk.request, chunk.start + chunk.length
    assert request.lease is not None
    state = request.lease.state
    scored = request.sampling.prompt_logprobs
    if scored is not None:
        lookahead = max(lookahead, 1)
    first = request.sampling.hidden_states_from
    return PlannedChunk(
        key=request.room,
        start=chunk.start,
        end=end,
        ids=request.keys[chunk.start : end + lookahead].tobytes(),
        pages=tuple(request.lease.pages[: -(-end // page_size)]),
        slot=state.slot,
        restore=state.restore,
        saves=tuple(
            [(slot, tokens - chunk.start) for tokens, slot in state.saves if chunk.start < tokens <= end]
        ),
        cached=request.reused,
        load=request.load,
        images=request.images,
        scored=scored,
        logprob_ids=() if scored is None else request.sampling.logprob_ids,
        states=0 if first is None else max(end - max(chunk.start, first), 0),
        draw=_draw(request, adjusted) if end == request.num_tokens else None,
    )


def _draw(request: PrefillRequest, adjusted: bool) -> FirstDraw:
    adjusted = adjusted and adjustment_facts([request.sampling]) is not None
    text = request.keys.tobytes() if adjusted else b""
    return FirstDraw(sampling=request.sampling, text=text, outputs=request.emitted, mask=request.mask)


class Planned(NamedTuple):
    """A plan and the chunks that it was made from, in the same order."""

    plan: PromptPlan
    chunks: Sequence[Chunk]


class PromptProgress(NamedTuple):
    """The result of one plan for one prompt."""

    request: PrefillRequest
    drawn: Drawn | None  # None unless this was its last chunk
    first_scored: int = 0  # index in the prompt of the first of `scores`
    scores: Sequence[PromptLogprob] = ()  # for the prompt's tokens that this plan predicted
    states: StateRows | None = None  # hidden states of the last positions that this plan computed
    damaged: bool = False  # it read a cached prefix whose bytes had changed: nothing of it may be used


class Planner:
    """Makes plans and reads their results, in the same order."""

    def __init__(self, queues: Queues, scheduling: Scheduling) -> None:
        self._queues = queues
        self._space = scheduling.space
        self._rules = scheduling.rules
        self._limits = scheduling.limits
        self._times = scheduling.times
        self._tier = scheduling.tier
        self._max_forward_tokens = scheduling.max_forward_tokens
        self._unread: deque[Planned] = deque()
        self._forget: list[int] = []
        self._generation = 0

    def next(self, now: float) -> Planned | None:
        """Return the plan of this turn; None if the device has nothing to do."""
        limits = self._limits
        computing, waiting = self._queues.computing.values(), len(self._queues.waiting)
        times, arrivals = self._times, self._queues.arrivals if self._times.learns else None
        most = self._max_forward_tokens()
        curve = times.curve if most is None else times.curve.up_to(most)
        chosen = plan_chunks(computing, now, curve, limits.max_batch, limits.grid, arrivals, waiting)
        chunks = fewest_keys_first(chosen)
        stores = tuple(self._tier.planned())
        if not chunks and not self._forget and not stores:
            return None
        self._generation += 1
        forget, self._forget = tuple(self._forget), []
        plan = prompt_plan(chunks, self._space.page_size, self._rules, self._generation, forget, stores)
        planned = Planned(plan, chunks)
        self._unread.append(planned)
        return planned

    def begin(self, planned: Planned, now: float) -> None:
        """Mark the chunks of a plan as launched."""
        self._times.begin(planned.chunks)
        for chunk in planned.chunks:
            request = chunk.request
            request.mark("prefill_start", now)
            request.launched_at = now
            request.scheduled += chunk.length
            request.in_flight += 1
            request.load = None
            assert request.lease is not None
            request.lease.state.restored()

    def read(self, launched: Launched) -> list[PromptProgress]:
        """Apply the results of the oldest unread plan, which must be complete."""
        plan, chunks = self._unread.popleft()
        result = launched.read()
        # The time of a forward that waits for copies says nothing about its tokens.
        self._times.end(None if any(each.load for each in plan.chunks) else result.ms)
        drawn = iter(result.drawn)
        progress = []
        for index, chunk in enumerate(chunks):
            request = chunk.request
            request.in_flight -= 1
            loads = plan.chunks[index].load is not None
            damaged = loads and not self._tier.loaded(request, result.damage)
            request.computed, request.computed_by = chunk.start + chunk.length, plan.generation
            scores = result.scores[index] if result.scores else ()
            token = next(drawn) if chunk.final else None
            states = result.states[index] if result.states else None
            progress.append(PromptProgress(request, token, chunk.start + 1, scores, states, damaged))
        return progress

    def ended(self, request: PrefillRequest) -> None:
        """Plan to drop what the worker keeps for a prompt that ends before its last chunk."""
        if request.remaining and (request.images or self._rules.rewrites):
            self._forget.append(request.room)

    def work(self, planned: Planned) -> Work:
        """Return the amount of work in a plan's forward."""
        return chunk_work(planned.chunks)
