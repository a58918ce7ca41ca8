"""Composes a prefill node from its parts. build.py makes the parts from a config, tests make their own."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from common.engine.forward.rotary_places import RotaryPlaces
from common.engine.graphs import node_graphs
from common.engine.graphs.ladders import prefill_token_buckets
from common.engine.sampling.logit_adjustments import AdjustmentRows
from common.engine.state.draft_row import HiddenDtype
from common.grammar.grammars import NO_GRAMMARS, Grammars
from common.kv_cache.page_space import PageSpace
from common.node.overlap import Completion
from prefill_node.cost_curve import CostCurve
from prefill_node.forward_times import ForwardTimes
from prefill_node.forwards import Forwards
from prefill_node.host_parts import HostParts
from prefill_node.limits import PrefillLimits
from prefill_node.measure import NOT_MEASURED, MeasuredTimes
from prefill_node.node import PrefillNode
from prefill_node.pacing import NO_PACING, LaunchPacing
from prefill_node.page_sending import GroupPageSending, Orders, PageSending, given_to_all, page_sending
from prefill_node.parts import Links, Observation, Scheduling
from prefill_node.peer_frames import take_peer_frames
from prefill_node.prompt_scores import PromptScorer
from prefill_node.send_orders import SendOrders
from prefill_node.step import PrefillStep
from prefill_node.step_result import Worker
from prefill_node.worker import DeviceWorker


@dataclass(frozen=True, slots=True)
class Computation:
    """The node's forwards, and its state on the device."""

    forwards: Forwards
    adjustments: AdjustmentRows
    rotary: RotaryPlaces
    completion: Callable[[], Completion]
    hidden_dtype: HiddenDtype  # dtype of the draft's hidden states in a record
    measured: MeasuredTimes = NOT_MEASURED  # forwards are planned by the default curve then
    host: HostParts = field(default_factory=HostParts)


def prompt_step(computation: Computation) -> PrefillStep:
    """Compose the step that executes the plans of a node on one device; ranks that have no scheduler need only this."""
    parts, forwards = computation, computation.forwards
    model = forwards.runner.model
    return PrefillStep(
        forwards.target.forward,
        forwards.vision.embeds,
        forwards.draft,
        parts.adjustments,
        parts.rotary,
        forwards.layout.page_size,
        parts.completion,
        PromptScorer(model.compute_logits, model.config.vocab_size),
    )


def assemble(
    links: Links,
    space: PageSpace,
    computation: Computation,
    limits: PrefillLimits,
    observation: Observation,
    wrap: Callable[[Worker], Worker] = lambda worker: worker,
    wrap_orders: Callable[[Orders], Orders] = lambda orders: orders,
    grammars: Grammars = NO_GRAMMARS,
) -> PrefillNode:
    """Compose a node that has not started.

    Args:
        wrap: returns the worker that the node talks to; by default the node talks to the device worker itself.
        wrap_orders: returns what the worker asks for send orders during a forward; by default it asks the node.
        grammars: compiles the grammars of requests; by default they are refused.
    """
    parts, forwards = computation, computation.forwards
    step = prompt_step(computation)
    listen = functools.partial(take_peer_frames, links.peers, links.transfers)
    orders = SendOrders(links.transfers, forwards.layout.page_size, parts.hidden_dtype, listen)
    of_running = wrap_orders(orders.of_running)
    if links.group is not None:
        of_running = functools.partial(given_to_all, links.group, of_running)
    sending: PageSending = page_sending(links.sender, forwards.signalled, of_running)
    if links.group is not None:
        sending = GroupPageSending(sending, links.group)
    sizes, measured = prefill_token_buckets(limits.chunk_tokens), parts.measured
    curve = CostCurve(sizes, measured.by_tokens, limits.grid, measured.context_ms)
    times = ForwardTimes(curve, learns=bool(measured.by_tokens))
    pacing = LaunchPacing(observation.clock) if measured.by_tokens else NO_PACING
    return PrefillNode(
        links,
        Scheduling(
            space,
            forwards.draft.rules,
            limits,
            times,
            grammars,
            pacing,
            parts.host.tier,
            links.role.max_forward_tokens,
        ),
        wrap(DeviceWorker(step, sending, forwards.runner.pool, parts.completion, parts.host.copies)),
        orders,
        replace(observation, graphs=node_graphs.totals(*forwards.graphs)),
    )
