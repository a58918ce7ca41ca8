"""Speculative steps over the tiny model for node tests: the real drafters, and one with scripted drafts."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from common.engine.forward.batch import CaptureHiddenMode
from common.engine.forward.model_runner import ModelRunner
from common.engine.graphs.backends.names import FULL, NONE
from common.engine.graphs.rules import Decision, Phase
from common.engine.graphs.slots import Inputs, Slot
from common.node.stopwatch import HostStopwatch
from decode_node.forced_choice import ForcedShare, ForcedStep
from decode_node.forced_steps import ForcedSetup, with_forced_steps
from decode_node.graphs.step_graphs import PhasePlan
from decode_node.request import DecodeRequest
from decode_node.speculative.drafters.drafter import Drafter, DrafterSetup
from decode_node.speculative.drafters.forced_chain import ForcedChain
from decode_node.speculative.drafters.ngram import NgramDrafter
from decode_node.speculative.drafters.table import make_forced_chain
from decode_node.speculative.ngram_texts import NgramTexts
from decode_node.speculative.rounds import Round, RoundCall, RoundPhase, Rounds
from decode_node.speculative.state import RoundState
from decode_node.speculative.step import SpeculativeStep, no_seconds
from decode_node.speculative.tree import tree
from decode_node.speculative.verifier import Acceptor, ChainAcceptor, TreeAcceptor
from decode_node.speculative.verify import Verify
from decode_node.step import DecodeSteps
from decode_node.step_rules import Drafts, FixedWidth, NoTextDrafts, TextDrafts
from decode_node.steps import speculative_steps
from tests.fakes.node_cluster import LOOKAHEAD_SLOTS, MakeStep, Parts
from tests.fakes.tiny_model import PLACEMENT, VOCAB, reference


@dataclass(frozen=True)
class Bench:
    """The parts from which a drafter is made."""

    parts: Parts
    rounds: Rounds


MakeDrafter = Callable[[Bench], Drafter]


def plans(buckets: Sequence[int], device: torch.device = PLACEMENT.device) -> Callable[[Phase], PhasePlan]:
    """Return full graphs (on a CPU the tape) for these numbers of requests, with poisoned padding.

    Without buckets everything runs eagerly.
    """
    backend = FULL if buckets else NONE
    return lambda phase: PhasePlan(Decision(phase, backend), tuple(buckets), device, poisoned=True)


def speculative(
    make_drafter: MakeDrafter,
    make_acceptor: Callable[[ModelRunner], Acceptor] = lambda runner: ChainAcceptor(),
    buckets: Sequence[int] = (),
    texts: Callable[[], TextDrafts] = NoTextDrafts,
) -> MakeStep:
    """Compose a step as build.py does, with captured graphs for `buckets` requests.

    A drafter's `batch` gets the requests of each step.
    """

    def make(parts: Parts) -> DecodeSteps:
        rounds = Rounds(
            parts.relay, parts.table, parts.page_size, parts.max_len, LOOKAHEAD_SLOTS, plans(buckets)
        )
        drafter, acceptor = make_drafter(Bench(parts, rounds)), make_acceptor(parts.runner)
        verify = Verify(parts.runner, rounds, drafter, acceptor, hidden_states=parts.hidden_states)
        seconds = no_seconds()
        step = SpeculativeStep(
            verify, drafter, acceptor, PLACEMENT.device, parts.completion, HostStopwatch, seconds
        )
        for phase in step.graphs:
            phase.forward.graphs.capture()
            assert not [row.error for row in phase.forward.graphs.rows if row.error]
        drafts = drafter.nodes - 1
        batch: TextDrafts = getattr(drafter, "batch", None) or texts()
        return speculative_steps({drafts: step}, FixedWidth(drafts), batch, seconds)

    return make


def forcing(step: MakeStep) -> MakeStep:
    """Verify the tokens that grammars force in the place of the drafts of `step`."""

    def make(parts: Parts) -> DecodeSteps:
        made = step(parts)
        return replace(made, rules=replace(made.rules, forced_drafts=max(made.by_width)))

    return make


def chaining(
    step: MakeStep, algorithm: str, config: Any, steps: int, width: int, buckets: Sequence[int] = ()
) -> MakeStep:
    """Add a step for forced tokens, which every batch that has some takes; usual rounds draft `steps` tokens.

    `config`: of the draft model.
    """

    def make(parts: Parts) -> DecodeSteps:
        def rounds_of(smallest: int, largest: int) -> Rounds:
            sizes = parts.page_size, parts.max_len, LOOKAHEAD_SLOTS
            return Rounds(parts.relay, parts.table, *sizes, plans(buckets))

        def chain_of(rounds: Rounds, width: int) -> ForcedChain:
            return make_forced_chain(algorithm, DrafterSetup(parts.draft, config, rounds, steps, 1, 0), width)

        usual = forcing(step)(parts)
        rest = parts.completion, parts.hidden_states
        setup = ForcedSetup(parts.runner, rounds_of, chain_of, lambda chain: ForcedShare(), *rest)
        made = with_forced_steps(usual, (ForcedStep(width, 64),), setup)
        for phase in made.graphs[len(usual.graphs) :]:
            phase.forward.graphs.capture()
            assert not [row.error for row in phase.forward.graphs.rows if row.error]
        return made

    return make


class LatestBatch:
    """Proposes nothing from texts but remembers the batch, for test drafters that inspect requests."""

    needs_results = False

    def __init__(self) -> None:
        self.requests: Sequence[DecodeRequest] = ()

    def propose(self, requests: Sequence[DecodeRequest], width: int, /) -> Drafts:
        self.requests = requests
        return ()


def ngram(steps: int, buckets: Sequence[int] = ()) -> MakeStep:
    return speculative(
        lambda bench: NgramDrafter(bench.rounds, steps),
        buckets=buckets,
        texts=lambda: NgramTexts(max_texts=8),
    )


def foresight(hit: float, nodes: int, branch: int, buckets: Sequence[int] = ()) -> MakeStep:
    """Return a drafter that is right with probability `hit`: chains (branch 1), or trees with `branch` siblings."""
    if branch == 1:
        return speculative(lambda bench: Foresight(bench, hit, nodes, nodes - 1, 1), buckets=buckets)
    depth = (nodes - 1) // branch
    return speculative(
        lambda bench: Foresight(bench, hit, nodes, depth, branch),
        lambda runner: TreeAcceptor(nodes, depth, (runner.pool,)),
        buckets,
    )


class Foresight:
    """Knows the tokens of plain decoding, even those that the device has drawn and the host has not read."""

    hidden_mode = CaptureHiddenMode.NULL
    phases: Sequence[RoundPhase[Any]] = ()
    slots: Sequence[Slot[RoundCall]] = ()

    def __init__(self, bench: Bench, hit: float, nodes: int, depth: int, branch: int) -> None:
        self.nodes = self.lookahead_slots = nodes
        self.state = RoundState.allocate(bench.rounds.max_rows, nodes, depth + 1, bench.rounds.device)
        self._relay = bench.parts.relay
        self._depth = depth
        self._hit = hit
        self._branch = branch
        self._random = random.Random(7)
        self.batch = LatestBatch()

    def propose(self, call: RoundCall) -> None:
        for index, request in enumerate(self.batch.requests):
            length = int(self._relay.seq_len[call.placed[index, 0]])  # a test may synchronize with the device
            tokens, parents = self._grow(request, length)
            grown = tree(torch.tensor([[0, *tokens]]), torch.tensor([parents]), self._depth)
            for field in ("tokens", "parents", "depth", "mask"):
                getattr(self.state.tree, field)[index] = getattr(grown, field)[0]

    def trees(self, call: RoundCall) -> tuple[torch.Tensor, torch.Tensor]:
        return self.state.drafts(call.placed.shape[0])

    def fill(self, batch: Round, inputs: Inputs) -> None:
        pass

    def draft_extend(self, call: RoundCall) -> None:
        pass

    def _grow(self, request: DecodeRequest, length: int) -> tuple[list[int], list[int]]:
        told = length + 1 - len(request.prompt)  # tokens drawn so far, of which the last has no KV
        text = reference(tuple(request.prompt), request.sampling, request.emitted)[0][told:]
        tokens: list[int] = []
        parents = [-1]
        parent, level = 0, 0
        while len(tokens) < self.nodes - 1:
            right = text[level] if level < len(text) else self._random.randrange(VOCAB)
            if self._random.random() > self._hit:
                right = (right + 1 + self._random.randrange(VOCAB - self._branch)) % VOCAB
            siblings = [(right + offset) % VOCAB for offset in range(self._branch)]
            self._random.shuffle(siblings)
            siblings = siblings[: self.nodes - 1 - len(tokens)]
            first = len(tokens) + 1
            tokens += siblings
            parents += [parent] * len(siblings)
            parent = first + (siblings.index(right) if right in siblings else 0)
            level += 1
        return tokens, parents
