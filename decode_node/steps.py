"""The steps of a decode node: plain decoding, or speculation at one or several widths."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from common.engine.forward.model_runner import ModelRunner
from common.engine.graphs.ladders import decode_request_buckets
from common.engine.graphs.rules import Phase, PhaseSwitch
from common.engine.state.relay_state import RelayState
from common.node.completion import completion_for
from common.node.overlap import Completion
from common.node.serving_model import ServingModel
from common.node.stopwatch import stopwatch_for
from common.speculation.forced_widths import DRAFTED_WIDTHS, PLAIN_WIDTHS
from common.speculation.table import algorithm
from decode_node.forced_choice import ForcedChoice, ForcedGain, ForcedShare
from decode_node.forced_steps import ForcedSetup, forced_steps, with_forced_steps
from decode_node.graphs import step_graphs
from decode_node.page_table import PageTable
from decode_node.speculative.drafters.drafter import DrafterSetup
from decode_node.speculative.drafters.forced_chain import ForcedChain
from decode_node.speculative.drafters.table import (
    FORCED_CHAINS,
    make_drafter,
    make_forced_chain,
    make_text_drafts,
)
from decode_node.speculative.rounds import Rounds
from decode_node.speculative.step import SpeculativeStep, no_seconds
from decode_node.speculative.verifier import Acceptor, ChainAcceptor, TreeAcceptor
from decode_node.speculative.verify import Verify
from decode_node.speculative.width_policy import WidthPolicy, batches_of, classes_up_to
from decode_node.step import AutoregressiveStep, DecodeSteps
from decode_node.step_rules import FixedWidth, StepRules, TextDrafts, Widths


@dataclass(frozen=True, slots=True)
class StepSizes:
    """The sizes that the steps have to serve, and their speculation."""

    wanted: PhaseSwitch
    max_running: int
    one_behind: bool  # results are read one step after their launch
    algorithm: str  # the speculative algorithm's name
    steps: int = 0
    topk: int = 1
    nodes: int = 0
    adaptive: bool = False
    forced_drafts: bool = False  # tokens that a grammar forces are drafts
    hidden_states: bool = False  # steps can return hidden states

    @property
    def lookahead_slots(self) -> int:
        """Slots of a request that the widest forward of a round takes."""
        slots = algorithm(self.algorithm).slots(self.steps, self.topk, self.nodes)
        return max(slots, max(self.forced_widths, default=0) + 1)

    @property
    def forced_widths(self) -> tuple[int, ...]:
        """Widths of the steps for forced tokens, widest first."""
        if not self.forced_drafts:
            return ()
        if not algorithm(self.algorithm).drafts:
            return PLAIN_WIDTHS
        if self.algorithm not in FORCED_CHAINS:
            return ()
        # At least as wide as the usual rounds, whose draft phase they save.
        return tuple(sorted({max(width, self.steps) for width in DRAFTED_WIDTHS}, reverse=True))

    def completion(self, device: torch.device) -> Callable[[], Completion]:
        """Return what makes the completion of one launched step."""
        return completion_for(device, one_behind=self.one_behind)


def decode_steps(
    sizes: StepSizes,
    served: ServingModel,
    runner: ModelRunner,
    draft: object,
    table: PageTable,
    relay: RelayState,
) -> DecodeSteps:
    """Compose plain decoding, or speculation with `draft`, and the steps for forced tokens."""
    steps = _Composition(sizes, served, runner, draft, table, relay)
    return steps.drafting() if algorithm(sizes.algorithm).drafts else steps.plain()


@dataclass(frozen=True, slots=True)
class _Composition:
    """Composes the steps of a node from the arguments of `decode_steps`."""

    sizes: StepSizes
    served: ServingModel
    runner: ModelRunner
    draft: object
    table: PageTable
    relay: RelayState

    def plain(self) -> DecodeSteps:
        sizes, runner, device = self.sizes, self.runner, self.runner.pool.device
        graphs = step_graphs.decode_graphs(
            runner,
            self.relay,
            self.table,
            sizes.wanted,
            sizes.max_running,
            self.served.max_model_len,
            sizes.hidden_states,
        )
        step = AutoregressiveStep(graphs.forward, device, sizes.completion(device))
        steps = DecodeSteps({0: step}, StepRules(), [graphs], {})
        if self.relay.state is not None:
            # The windows of models with a state per request have room for one token.
            return steps
        return self._with_forced(steps, sizes.forced_widths, ForcedChain, lambda chain: ForcedShare())

    def drafting(self) -> DecodeSteps:
        sizes = self.sizes
        widths: Widths = FixedWidth(sizes.steps)
        batches = {sizes.steps: (1, sizes.max_running)}
        if sizes.adaptive:
            classes = classes_up_to(sizes.steps)
            widths, batches = WidthPolicy(classes), batches_of(classes, sizes.max_running)
        seconds = no_seconds()
        steps = speculative_steps(
            {width: self._round(width, served_by, seconds) for width, served_by in batches.items()},
            widths,
            make_text_drafts(sizes.algorithm, sizes.max_running),
            seconds,
            sizes.steps if sizes.forced_drafts else 0,
        )
        wide = sizes.forced_widths
        if self.relay.state is not None:
            wide = tuple(width for width in wide if width < self.served.state.window.tokens)
        return self._with_forced(
            steps,
            wide,
            lambda rounds, width: make_forced_chain(
                sizes.algorithm, self._drafter_setup(rounds, sizes.steps), width
            ),
            lambda chain: ForcedGain(sizes.steps, chain.carried, chain.skipped),
        )

    def _round(self, width: int, batches: tuple[int, int], seconds: dict[str, float]) -> SpeculativeStep:
        sizes, runner, device = self.sizes, self.runner, self.runner.pool.device
        smallest, largest = batches
        rounds = self._rounds(step_graphs.round_plans(runner, sizes.wanted, largest, smallest))
        drafter = make_drafter(sizes.algorithm, self._drafter_setup(rounds, width))
        acceptor: Acceptor = ChainAcceptor()
        if sizes.topk > 1:
            deepest = drafter.state.walk.ids.shape[1] - 1
            acceptor = TreeAcceptor(drafter.lookahead_slots, deepest, (runner.pool,))
        verify = Verify(runner, rounds, drafter, acceptor, hidden_states=sizes.hidden_states)
        completion, watch = sizes.completion(device), stopwatch_for(device)
        return SpeculativeStep(verify, drafter, acceptor, device, completion, watch, seconds)

    def _drafter_setup(self, rounds: Rounds, width: int) -> DrafterSetup:
        config = None if self.served.draft is None else self.served.draft.config
        return DrafterSetup(self.draft, config, rounds, width, self.sizes.topk, self.sizes.nodes)

    def _rounds(self, capture: Callable[[Phase], step_graphs.PhasePlan]) -> Rounds:
        served, slots = self.served, self.sizes.lookahead_slots
        return Rounds(self.relay, self.table, served.page_size, served.max_model_len, slots, capture)

    def _with_forced(
        self,
        steps: DecodeSteps,
        widths: Sequence[int],
        chain_of: Callable[[Rounds, int], ForcedChain],
        choice_of: Callable[[ForcedChain], ForcedChoice],
    ) -> DecodeSteps:
        sizes, runner = self.sizes, self.runner

        def rounds_of(smallest: int, largest: int) -> Rounds:
            # Few graphs, since every node captures them and only constrained requests use them.
            plans = step_graphs.round_plans(runner, sizes.wanted, largest, smallest, decode_request_buckets)
            return self._rounds(plans)

        setup = ForcedSetup(
            runner,
            rounds_of,
            chain_of,
            choice_of,
            sizes.completion(runner.pool.device),
            sizes.hidden_states,
        )
        return with_forced_steps(steps, forced_steps(sizes.max_running, widths), setup)


def speculative_steps(
    steps: Mapping[int, SpeculativeStep],
    widths: Widths,
    drafts: TextDrafts,
    phase_seconds: dict[str, float],
    forced_drafts: int = 0,
) -> DecodeSteps:
    """Return steps of one or of several widths; all rows get the pages that the widest needs."""
    ordered = sorted(steps, reverse=True)
    widest = steps[ordered[0]]
    rules = StepRules(widest.tokens_per_step, widest.extra_slots, widths, drafts, forced_drafts)
    graphs = [graph for width in ordered for graph in steps[width].graphs]
    return DecodeSteps(steps, rules, graphs, phase_seconds)
