"""The steps of a decode node: plain decoding, or speculation at one or several widths."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from common.engine.forward.model_runner import ModelRunner
from common.engine.graphs import node_graphs
from common.engine.graphs.ladders import decode_request_buckets
from common.engine.graphs.rules import PhaseSwitch
from common.engine.state.relay_state import RelayState
from common.node.completion import completion_for
from common.node.overlap import Completion
from common.node.serving_model import ServingModel
from common.speculation.table import algorithm
from decode_node.graphs import step_graphs
from decode_node.graphs.decode_graph import GREEDY, LOGITS
from decode_node.page_table import PageTable
from decode_node.speculative.drafters.drafter import DrafterSetup
from decode_node.speculative.drafters.ngram import NgramDrafter
from decode_node.speculative.drafters.table import make_drafter, make_text_drafts
from decode_node.speculative.rounds import Rounds
from decode_node.speculative.step import SpeculativeStep, no_seconds
from decode_node.speculative.verifier import Acceptor, ChainAcceptor, TreeAcceptor
from decode_node.speculative.verify import Verify
from decode_node.speculative.width_policy import WidthPolicy, batches_of, classes_up_to
from decode_node.step import AutoregressiveStep, DecodeStep
from decode_node.step_rules import FixedWidth, ForcedStep, StepRules, TextDrafts, Widths
from decode_node.stopwatch import stopwatch_for

# Forced tokens that steps of plain decoding verify per request, and the most tokens of their forwards. Up to there a
# forward takes hardly longer than for one token per request; its logits take 4 bytes per token and vocabulary entry.
FORCED_STEPS, FORCED_TOKENS = 7, 256
FORCED_WIDTHS = (FORCED_STEPS, 3)


@dataclass(frozen=True, slots=True)
class StepSizes:
    """The sizes that the steps have to serve, and their speculation."""

    wanted: PhaseSwitch
    max_running: int
    one_behind: bool  # results are read one step after their launch
    algorithm: str  # of speculation
    steps: int = 0
    topk: int = 1
    nodes: int = 0
    adaptive: bool = False
    forced_drafts: bool = False  # tokens that a grammar forces are drafts
    hidden_states: bool = False  # steps can return hidden states

    @property
    def lookahead_slots(self) -> int:
        """Slots of a request that the widest forward of a round takes."""
        record = algorithm(self.algorithm)
        slots = record.slots(self.steps, self.topk, self.nodes)
        return max(slots, FORCED_STEPS + 1) if self.forced_drafts and not record.drafts else slots

    def completion(self, device: torch.device) -> Callable[[], Completion]:
        """Return what makes the completion of one launched step."""
        return completion_for(device, one_behind=self.one_behind)


@dataclass(frozen=True, slots=True)
class DecodeSteps:
    """The node's steps by width, how they are planned, and their forwards, not captured yet."""

    by_width: Mapping[int, DecodeStep]
    rules: StepRules
    graphs: Sequence[node_graphs.NodeGraphs[Any]]
    phase_seconds: Mapping[str, float]


def decode_steps(
    sizes: StepSizes,
    served: ServingModel,
    runner: ModelRunner,
    draft: object,
    table: PageTable,
    relay: RelayState,
) -> DecodeSteps:
    """Compose plain decoding, or speculation with `draft`."""
    device = runner.pool.device
    completion = sizes.completion(device)
    if not algorithm(sizes.algorithm).drafts:
        graphs = step_graphs.decode_graphs(
            runner,
            relay,
            table,
            sizes.wanted,
            sizes.max_running,
            served.max_model_len,
            sizes.hidden_states,
        )
        step = AutoregressiveStep(graphs.forward, device, completion)
        plain = DecodeSteps({0: step}, StepRules(), [graphs], {})
        if not sizes.forced_drafts or relay.state is not None:
            # The windows of models with a state per request have room for one token.
            return plain
        longest, slots = served.max_model_len, sizes.lookahead_slots

        def rounds_of(smallest: int, largest: int) -> Rounds:
            # Few graphs, since every node captures them and only constrained requests use them.
            capture = step_graphs.round_plans(runner, sizes.wanted, largest, smallest, decode_request_buckets)
            return Rounds(relay, table, served.page_size, longest, slots, capture)

        forced = forced_steps(sizes.max_running)
        return with_forced_drafts(plain, runner, rounds_of, forced, completion, sizes.hidden_states)
    seconds = no_seconds()

    def of_width(width: int, batches: tuple[int, int]) -> SpeculativeStep:
        smallest, largest = batches
        rounds = Rounds(
            relay,
            table,
            served.page_size,
            served.max_model_len,
            sizes.lookahead_slots,
            step_graphs.round_plans(runner, sizes.wanted, largest, smallest),
        )
        config = None if served.draft is None else served.draft.config
        setup = DrafterSetup(draft, config, rounds, width, sizes.topk, sizes.nodes)
        drafter = make_drafter(sizes.algorithm, setup)
        acceptor: Acceptor = ChainAcceptor()
        if sizes.topk > 1:
            deepest = drafter.state.walk.ids.shape[1] - 1
            acceptor = TreeAcceptor(drafter.lookahead_slots, deepest, (runner.pool,))
        verify = Verify(runner, rounds, drafter, acceptor, hidden_states=sizes.hidden_states)
        watch = stopwatch_for(device)
        return SpeculativeStep(verify, drafter, acceptor, device, completion, watch, seconds)

    widths: Widths = FixedWidth(sizes.steps)
    batches = {sizes.steps: (1, sizes.max_running)}
    if sizes.adaptive:
        classes = classes_up_to(sizes.steps)
        widths, batches = WidthPolicy(classes), batches_of(classes, sizes.max_running)
    return speculative_steps(
        {width: of_width(width, served_by) for width, served_by in batches.items()},
        widths,
        make_text_drafts(sizes.algorithm, sizes.max_running),
        seconds,
        sizes.steps if sizes.forced_drafts else 0,
    )


def forced_steps(max_running: int) -> tuple[ForcedStep, ...]:
    """Return the steps for forced tokens: for larger batches, fewer per request."""
    steps: list[ForcedStep] = []
    for width in FORCED_WIDTHS:
        batch = min(max_running, FORCED_TOKENS // (width + 1))
        if not steps or batch > steps[-1].batch:
            steps.append(ForcedStep(width, batch))
    return tuple(steps)


def with_forced_drafts(
    plain: DecodeSteps,
    runner: ModelRunner,
    rounds_of: Callable[[int, int], Rounds],
    forced: Sequence[ForcedStep],
    completion: Callable[[], Completion],
    hidden_states: bool = False,
) -> DecodeSteps:
    """Add steps to plain decoding that verify the tokens that grammars force.

    `rounds_of` returns the rounds of batches from a smallest to a largest number of requests.
    """
    device = runner.pool.device
    by_width, graphs = dict(plain.by_width), list(plain.graphs)
    smallest = 1
    for width, largest in forced:
        drafter, acceptor = NgramDrafter(rounds := rounds_of(smallest, largest), width), ChainAcceptor()
        # Every batch with forced tokens is masked, and so served by the variant of logits. Capturing another one
        # compiles the kernels that follow the logits, for each number of requests.
        verify = Verify(runner, rounds, drafter, acceptor, (GREEDY, LOGITS), hidden_states)
        step = SpeculativeStep(
            verify, drafter, acceptor, device, completion, stopwatch_for(device), no_seconds()
        )
        by_width[width] = step
        graphs += step.graphs
        smallest = largest + 1
    rules = replace(plain.rules, forced_drafts=forced[0].width, forced_steps=tuple(forced))
    return replace(plain, by_width=by_width, rules=rules, graphs=graphs)


def speculative_steps(
    steps: Mapping[int, SpeculativeStep],
    widths: Widths,
    drafts: TextDrafts,
    phase_seconds: Mapping[str, float],
    forced_drafts: int = 0,
) -> DecodeSteps:
    """Return steps of one or of several widths; all rows get the pages that the widest needs."""
    ordered = sorted(steps, reverse=True)
    widest = steps[ordered[0]]
    rules = StepRules(widest.tokens_per_step, widest.extra_slots, widths, drafts, forced_drafts)
    graphs = [graph for width in ordered for graph in steps[width].graphs]
    return DecodeSteps(steps, rules, graphs, phase_seconds)
