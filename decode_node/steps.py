"""The steps of a decode node: plain decoding, or speculation at one or several widths."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from common.engine.forward.model_runner import ModelRunner
from common.engine.graphs import node_graphs
from common.engine.graphs.rules import PhaseSwitch
from common.engine.state.relay_state import RelayState
from common.node.completion import completion_for
from common.node.overlap import Completion
from common.node.serving_model import ServingModel
from common.speculation.table import algorithm
from decode_node.graphs import step_graphs
from decode_node.page_table import PageTable
from decode_node.speculative.drafters.drafter import DrafterSetup
from decode_node.speculative.drafters.table import make_drafter, make_text_drafts
from decode_node.speculative.rounds import Rounds
from decode_node.speculative.step import SpeculativeStep, no_seconds
from decode_node.speculative.verifier import Acceptor, ChainAcceptor, TreeAcceptor
from decode_node.speculative.verify import Verify
from decode_node.speculative.width_policy import WidthPolicy, batches_of, classes_up_to
from decode_node.step import AutoregressiveStep, DecodeStep
from decode_node.step_rules import FixedWidth, StepRules, TextDrafts, Widths
from decode_node.stopwatch import stopwatch_for


@dataclass(frozen=True, slots=True)
class StepSizes:
    """What the steps have to serve, and how they speculate."""

    wanted: PhaseSwitch
    max_running: int
    one_behind: bool  # results are read one step after their launch
    algorithm: str  # of speculation
    steps: int = 0
    topk: int = 1
    nodes: int = 0
    adaptive: bool = False

    @property
    def lookahead_slots(self) -> int:
        """Slots of a request that the widest forward of a round takes."""
        return algorithm(self.algorithm).slots(self.steps, self.topk, self.nodes)

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
            runner, relay, table, sizes.wanted, sizes.max_running, served.max_model_len
        )
        step = AutoregressiveStep(graphs.forward, device, completion)
        return DecodeSteps({0: step}, StepRules(), [graphs], {})
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
        verify = Verify(runner, rounds, drafter, acceptor)
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
    )


def speculative_steps(
    steps: Mapping[int, SpeculativeStep],
    widths: Widths,
    drafts: TextDrafts,
    phase_seconds: Mapping[str, float],
) -> DecodeSteps:
    """Steps of one or of several widths; all rows get the pages that the widest needs."""
    ordered = sorted(steps, reverse=True)
    widest = steps[ordered[0]]
    rules = StepRules(widest.tokens_per_step, widest.extra_slots, widths, drafts)
    graphs = [graph for width in ordered for graph in steps[width].graphs]
    return DecodeSteps(steps, rules, graphs, phase_seconds)
