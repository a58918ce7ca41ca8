"""Speculative rounds without a node: prompts in both caches, one relay row each, and the phases run on them."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import torch
from torch import Tensor

from common.engine.attention.step_attention import StepAttention
from common.engine.forward.batch import CaptureHiddenMode, ForwardOutput
from common.engine.forward.draft_inputs import DraftInput
from common.engine.forward.draft_runner import DraftRunner
from common.engine.forward.model_runner import ModelRunner
from common.engine.forward.mtp_runner import MtpRunner
from common.engine.graphs.backends.base import Backend
from common.engine.graphs.rules import Decision, Phase
from common.engine.layers.logit_rows import LogitRows
from common.engine.layers.placement import Placement
from common.engine.sampling.sampler import SampleOutput
from common.engine.sampling.sampling_plan import sampling_variant
from common.engine.state.draft_row import DraftShape
from common.engine.state.relay_state import RelayState
from common.messages.generation import SamplingParams
from decode_node.graphs.decode_graph import VARIANTS
from decode_node.graphs.step_graphs import PhasePlan
from decode_node.page_table import PageTable
from decode_node.speculative.drafters.drafter import Drafter, DrafterSetup
from decode_node.speculative.drafters.table import make_drafter
from decode_node.speculative.rounds import RoundCall, Rounds
from decode_node.speculative.verifier import Acceptor, ChainAcceptor, TreeAcceptor
from decode_node.speculative.verify import Emitted, Verify
from prefill_node.mtp import MtpPrefill
from tests.fakes.draft_models import DRAFTS, standalone_model, tiny_draft
from tests.fakes.mtp_models import FORMATS, MtpModel, mtp_config, mtp_modules, whole_prompt
from tests.fakes.pools import plain_pool
from tests.fakes.tiny_model import VOCAB, reference, tiny_model
from tests.unit.engine.graphs.rig import CPU, DeviceDriver, sequences

ANSWER = 64  # most tokens that a request generates in a test


@dataclass(frozen=True)
class Kind:
    """The drafter of a test and its sizes."""

    name: str  # ngram, standalone, a head of DRAFTS, or modules of FORMATS
    steps: int = 3
    topk: int = 1
    nodes: int = 0  # tokens of a tree

    @property
    def lookahead_slots(self) -> int:
        widest = 2 * self.steps if self.name in FORMATS else 0
        return max(self.nodes, self.steps + 1, (self.steps - 1) * self.topk, widest)


@dataclass
class Seen:
    """The results of one round, on the host."""

    trees: Tensor  # [R, N] drafted tokens, without roots
    parents: Tensor  # [R, N]
    tokens: list[list[int]]  # emitted tokens
    logprobs: Tensor | None  # [R * D]


class RoundRig:
    """`hit` is the probability that a draft of a random head is replaced by the right token before verify."""

    def __init__(
        self,
        kind: Kind,
        prompts: Sequence[Tensor],
        params: Sequence[SamplingParams],
        backend: Callable[[], Backend],
        buckets: Sequence[int],
        page_size: int = 4,
        room: int = ANSWER,
        hit: float = 0.6,
        device: torch.device = CPU,
        variants: Sequence[str] = VARIANTS,
        poisoned: bool = True,
    ) -> None:
        self.kind, self.params, self.device = kind, list(params), device
        self.prompts = [tuple(ids.tolist()) for ids in prompts]
        self._room = room
        self._hit, self._random = (0.0 if kind.name == "standalone" else hit), random.Random(2)
        self._place_target(prompts, page_size, room)
        draft = self._place_draft(page_size)
        decided = lambda phase: (Decision(phase, "full"), tuple(buckets), device, poisoned)  # noqa: E731
        device_plan = lambda phase: _Plan(*decided(phase), backend)  # noqa: E731
        self.rounds = Rounds(self.relay, self.table, page_size, room + 40, kind.lookahead_slots, device_plan)
        self.drafter = self._drafter(draft)
        acceptor: Acceptor = ChainAcceptor()
        if kind.topk > 1:
            deepest = self.drafter.state.walk.ids.shape[1] - 1
            acceptor = TreeAcceptor(self.drafter.lookahead_slots, deepest, (self.pool,))
        self.verify = Verify(self.runner, self.rounds, self.drafter, acceptor, variants)
        self.phases = [*self.drafter.phases, self.verify.phase]
        for phase in self.phases:
            phase.graphs.capture()
            assert not [row.error for row in phase.graphs.rows if row.error]
        self.said: list[list[int]] = [[token] for token in self.first]

    def round(self, requests: Iterable[int]) -> Seen:
        """Run one round of requests, numbered from 0; row = number + 1."""
        chosen = list(requests)
        call = self.call(chosen)
        self.drafter.propose(call)
        tree = self.drafter.state.tree.first(len(chosen))
        drafted = tree.tokens[:, 1:].clone()
        if self.kind.name in FORMATS:  # proposals stay in the relay rows until verify reads them
            drafted = self.relay.draft.draft_topk_ids[[request + 1 for request in chosen]].clone()
        self._correct(chosen, call)
        self._spoil(len(chosen))
        emitted = self.verify(call)
        trees = tree.tokens[:, 1:].clone() if call.drafts is not None else drafted
        parents = tree.parents.clone()
        self._spoil(len(chosen))
        self.drafter.draft_extend(call)
        tokens = said(emitted, len(chosen))
        for request, run in zip(chosen, tokens):
            self.said[request] += run
        logprobs = None if emitted.drawn is None else emitted.drawn.logprobs
        return Seen(trees, parents, tokens, None if logprobs is None else logprobs.clone())

    def call(self, chosen: Sequence[int]) -> RoundCall:
        placed = [[request + 1, self.held[request]] for request in chosen]
        values = torch.tensor(placed, dtype=torch.int64, device=self.device).view(len(chosen), 2)
        drafts = None
        if self.kind.name == "ngram":
            drafts = torch.tensor([self._told(request) for request in chosen], dtype=torch.int64)
            drafts = drafts.view(len(chosen), self.kind.steps).to(self.device)
        return RoundCall(values, sampling_variant(self.params[request] for request in chosen), drafts)

    def _told(self, request: int) -> list[int]:
        """Return drafts like those of an n-gram match: the first few are right."""
        rest = self._answer(request)[len(self.said[request]) :]
        right = self._random.randint(0, self.kind.steps)
        return [*rest[:right], *[7] * self.kind.steps][: self.kind.steps]

    def _answer(self, request: int) -> list[int]:
        sampling = msgspec.structs.replace(self.params[request], max_tokens=self._room + 1, logprobs=None)
        first = self.first[request]
        return [first, *reference((*self.prompts[request], first), sampling, 1)[0]]

    def _correct(self, chosen: Sequence[int], call: RoundCall) -> None:
        """Replace drafts by right tokens along one path."""
        if call.drafts is not None or not self._hit:
            return
        tree = self.drafter.state.tree
        for index, request in enumerate(chosen):
            rest = self._answer(request)[len(self.said[request]) :]
            if self.kind.name in FORMATS:
                for step, right in enumerate(rest[: self.kind.steps]):
                    if self._random.random() > self._hit:
                        break
                    self.relay.draft.draft_topk_ids[request + 1, step] = right
                continue
            tokens, parents = tree.tokens[index].tolist(), tree.parents[index].tolist()
            at = 0
            for right in rest:
                below = [node for node in range(1, len(parents)) if parents[node] == at]
                if not below or self._random.random() > self._hit:
                    break
                at = next((node for node in below if tokens[node] == right), below[-1])
                tree.tokens[index, at] = right

    def _spoil(self, live: int) -> None:
        """Fill rows past the batch, which in use hold an earlier batch's data, with arbitrary values in range."""
        state = self.drafter.state
        state.tree.tokens[live:] = VOCAB - 1
        if self.kind.topk > 1:  # the structure of chains is written once, at the start
            state.tree.depth[live:] = 1
            state.tree.mask[live:] = True
        state.walk.ids[live:] = VOCAB - 2
        state.walk.hidden[live:] = torch.nan
        state.walk.accepted[live:] = state.walk.ids.shape[1] - 1
        state.walk.start[live:] = 11

    def _place_target(self, prompts: Sequence[Tensor], page_size: int, room: int) -> None:
        long = [torch.cat((ids, ids.new_zeros(room))) for ids in prompts]
        aux = DRAFTS[self.kind.name].aux_layers if self.kind.name in DRAFTS else ()
        self.target = _on(tiny_model(aux=aux), self.device)
        driver = DeviceDriver(self.target, long, page_size)
        rows, lengths = list(range(len(prompts))), [len(ids) for ids in prompts]
        self._whole = driver.batch(rows, lengths, hidden_mode=CaptureHiddenMode.FULL)
        output = driver.runner(self._whole)
        self._ends = torch.tensor(lengths, device=self.device).cumsum(0) - 1
        self._hidden = output.hidden
        self.first = output.logits[self._ends].argmax(-1).tolist()
        self.runner, self.pool = driver.runner, driver.pool
        width = max(len(pages) for pages in driver.pages) + -(-2 * self.kind.lookahead_slots // page_size)
        self.table = PageTable(len(prompts) + 2, max(width, -(-200 // page_size)), self.device)
        self.held = [len(pages) for pages in driver.pages]
        for index in rows:
            self.table.write([(index + 1, logical, page) for logical, page in enumerate(driver.pages[index])])

    def _place_draft(self, page_size: int) -> object:
        """Compute the draft's KV of the prompts and the relay rows that a hand-over would bring."""
        if self.kind.name in FORMATS:
            return self._place_modules(page_size)
        config = DRAFTS.get(self.kind.name)
        shape = DraftShape()
        if config is not None:
            shape = DraftShape(self.kind.topk, DraftInput.hidden_size_for(config), vocab=VOCAB)
        self.relay = RelayState.allocate(len(self.prompts) + 2, VOCAB, self.device, shape)
        for index, (ids, sampling) in enumerate(zip(self.prompts, self.params, strict=True)):
            self.relay.write_row(index + 1, [*ids, self.first[index]], 1, sampling)
        if self.kind.name == "ngram":
            return None
        model = self.target.config
        layers = (model if config is None else config.model).num_layers
        place = Placement(torch.float32, self.device)
        self.draft_pool = plain_pool(
            layers,
            model.num_kv_heads,
            model.head_dim,
            page_size,
            self.pool.num_pages,
            place.dtype,
            place.device,
        )
        windows = (None,) * layers if config is None else config.model.sliding_windows
        attention = StepAttention(self.draft_pool, windows)
        if config is None:
            runner = ModelRunner(_on(standalone_model(), self.device), self.draft_pool, attention)
            runner(self._whole)
            return runner
        head = DraftRunner(_on(tiny_draft(self.kind.name), self.device), attention, self.kind.topk)
        following = self._whole.input_ids.roll(-1)
        following[self._ends] = torch.tensor(self.first, device=self.device)
        assert self._hidden is not None
        started = head.extend(replace(self._whole, input_ids=following, logits_rows=self._ends), self._hidden)
        self.relay.write_draft(torch.arange(1, len(self.prompts) + 1, device=self.device), started)
        return head

    def _place_modules(self, page_size: int) -> MtpRunner:
        """Run a prefill node's own step over each whole prompt."""
        model = MtpModel(self.kind.name, self.kind.steps)
        self.relay = RelayState.allocate(len(self.prompts) + 2, VOCAB, self.device, model.serving().shape)
        for index, (ids, sampling) in enumerate(zip(self.prompts, self.params, strict=True)):
            self.relay.write_row(index + 1, [*ids, self.first[index]], 1, sampling)
        shape = self.target.config
        self.draft_pool = plain_pool(
            self.kind.steps,
            shape.num_kv_heads,
            shape.head_dim,
            page_size,
            self.pool.num_pages,
            torch.float32,
            self.device,
        )
        heads = [_on(head, self.device) for head in mtp_modules(self.kind.name, self.kind.steps).heads]
        attention = StepAttention(self.draft_pool, (None,) * self.kind.steps)
        runner = MtpRunner(heads, attention)
        prompts = [whole_prompt(ids) for ids in self.prompts]
        first = SampleOutput(torch.tensor(self.first, device=self.device), self._ends < 0)
        output = ForwardOutput(LogitRows(self._whole.logits_rows), self._hidden)
        started = MtpPrefill(runner.modules, page_size, shape.hidden_size).extend(
            prompts, self._whole, output, first
        )
        assert started is not None
        self.relay.write_draft(torch.arange(1, len(self.prompts) + 1, device=self.device), started)
        return runner

    def _drafter(self, draft: object) -> Drafter:
        kind, config = self.kind, DRAFTS.get(self.kind.name)
        if kind.name in FORMATS:
            config = mtp_config(kind.name, kind.steps)
        made = kind.name if config is None else config.algorithm
        setup = DrafterSetup(draft, config, self.rounds, kind.steps, kind.topk, kind.nodes)
        return make_drafter(made, setup)


@dataclass(frozen=True, slots=True)
class _Plan(PhasePlan):
    """Accepts any backend, by name or not."""

    make: Callable[[], Backend] = None  # type: ignore[assignment]

    def backend(self) -> Backend:
        return self.make()


def said(emitted: Emitted, count: int) -> list[list[int]]:
    """Return the tokens of each request. Waits for the device."""
    sampled, counts = emitted.read()
    assert not sampled.invalid.any()
    ids = sampled.token_ids.view(count, -1).tolist() if count else []
    return [row[:length] for row, length in zip(ids, counts, strict=True)]


def prompts_of(lengths: Sequence[int]) -> list[Tensor]:
    return sequences(lengths, seed=1)


def _on(model: Any, device: torch.device) -> Any:
    """Return the model, or a copy of it on the device."""
    if device.type == "cpu":
        return model
    moved = copy.deepcopy(model).to(device)
    moved.placement = Placement(torch.float32, device)
    return moved


__all__ = ["Kind", "Phase", "RoundRig", "Seen", "prompts_of", "said"]
