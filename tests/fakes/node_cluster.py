"""Real prefill and decode nodes in one process, joined by kv_transfer's loopback transport and inproc sockets.

The test plays the router: `submit` places a request; `turn` gives every node one turn of its loop and processes its
messages. Tokens are merged by offset; a gap or a differing repetition is an error at once.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import msgspec
import zmq
from torch import Tensor

import decode_node.host_tier
import decode_node.node
import decode_node.step_result
import prefill_node.node
import prefill_node.step_result
from common.checkpoint.model_config import ModelConfig
from common.engine.forward.model_runner import ModelRunner
from common.engine.forward.rotary_places import rotary_places
from common.engine.graphs.rules import PhaseSwitch
from common.engine.models.causal_lm import CausalLM
from common.engine.sampling.logit_adjustments import AdjustmentRows
from common.engine.state.pool import KvPool
from common.engine.state.relay_state import RelayState
from common.engine.state.state_rows import WindowShape
from common.grammar.grammars import NO_GRAMMARS, Grammars
from common.ipc import RouterSocket
from common.kv_cache.host_layout import HostLayout
from common.kv_cache.kv_values import AS_COMPUTED, KvValues
from common.kv_cache.layer_kinds import prompt_grid, window_widths
from common.kv_cache.page_space import PageSpace
from common.kv_cache.pool_layout import PoolLayout
from common.kv_cache.pool_spec import pool_spec
from common.kv_cache.snapshot_budget import SnapshotBudget
from common.messages import decode_inbox, prefill_inbox
from common.messages.decode_inbox import Reserve
from common.messages.generation import ImageSpan, OutputToken, SamplingParams
from common.messages.identity import NodeRef
from common.messages.node_inbox import Abort, PeerLost
from common.messages.prefill_inbox import Prefill
from common.messages.router_inbox import Failed, FirstToken, HiddenStates, PrefillDone, Tokens
from common.node.completion import Deferred, Immediate
from common.node.host_bytes import HostBytes
from common.node.host_lane import HostLane, Inline
from common.node.host_share import HostShare, ItemBytes
from common.node.host_store import Expect, HostStore, Lanes
from common.node.memory import MemoryPlan
from common.node.overlap import Completion
from common.node.serving_draft import ServingDraft
from common.node.serving_model import NO_STATE, KeptState, NodeMemory, ServingModel, page_space
from common.node_plan import PoolBudget
from common.observability.logs import Log
from decode_node.assemble import Computation, assemble
from decode_node.backups import Backups
from decode_node.batch_rows import BatchRows
from decode_node.draft_watch import DraftWatch, NoWatch
from decode_node.forced_choice import ForcedShare, ForcedStep
from decode_node.forced_steps import ForcedSetup, with_forced_steps
from decode_node.forwards import step_forwards
from decode_node.graphs import step_graphs
from decode_node.limits import DecodeLimits
from decode_node.node import DecodeNode
from decode_node.pacing import Pacing
from decode_node.page_table import PageTable
from decode_node.parts import Links, Observation
from decode_node.peers import PeerConnections
from decode_node.retraction import Retraction
from decode_node.speculative.drafters.forced_chain import ForcedChain
from decode_node.speculative.rounds import Rounds
from decode_node.step import AutoregressiveStep, DecodeSteps
from decode_node.step_rules import StepRules
from decode_node.steps import StepSizes
from kv_transfer.handoff_record import record_bytes
from kv_transfer.limits import TransferLimits
from kv_transfer.receiver import Receiver
from kv_transfer.sender import Sender
from kv_transfer.transport.base import Region
from kv_transfer.transport.cuda.pool_copies import MovedPool
from kv_transfer.transport.cuda.pool_memory import as_memory, as_storage
from prefill_node import assemble as prefill_assemble
from prefill_node import parts as prefill_parts
from prefill_node.draft import PrefillDraft
from prefill_node.forwards import Forwards, PromptSizes, prompt_forwards
from prefill_node.graphs.backends.compiled_body import CompiledBodies
from prefill_node.host_parts import HostParts, host_prefixes
from prefill_node.host_tier import HostPrefixes, HostTier
from prefill_node.images import NoImages
from prefill_node.limits import PrefillLimits
from prefill_node.measure import MeasuredTimes
from prefill_node.node import PrefillNode
from prefill_node.vision import TextEmbeds
from prefill_node.vision_stage import VisionStage
from router.dispatch.answer_states import AnswerStates
from tests.fakes.clock import Clock
from tests.fakes.fake_link import FakeLink, FakeLinks
from tests.fakes.late_graphs import capture_late
from tests.fakes.loopback import Fabric
from tests.fakes.plan_wire import WirePromptWorker, WireWorker, wired
from tests.fakes.tiny_model import CONFIG, MAX_LEN, PLACEMENT, tiny_model

MakeCompletion = Callable[[], Completion]
LOOKAHEAD_SLOTS = 64  # for the widest drafts of any test


@dataclass(frozen=True)
class Parts:
    """The parts from which a decode step is made."""

    runner: ModelRunner
    draft: object  # the draft's runner; None without a draft model
    table: PageTable
    relay: RelayState
    page_size: int
    max_len: int
    completion: MakeCompletion
    hidden_states: bool = False

    @property
    def draft_pool(self) -> KvPool:
        """The draft's planes of the node's pool."""
        return KvPool(self.runner.pool.layout, "draft", self.runner.pool.storage)


MakeStep = Callable[[Parts], DecodeSteps]
MakeVisionStage = Callable[[zmq.Context[zmq.Socket[bytes]], CausalLM], VisionStage]


class NoDraftModel:
    """A cluster without a draft model. tests/fakes/draft_models.py has some with a draft model."""

    algorithm = "none"
    aux_layers: tuple[int, ...] = ()

    def serving(self) -> ServingDraft | None:
        """The draft as nodes load it."""
        return None


WANTED = PhaseSwitch("full", poisoned=True)
BODIES = CompiledBodies()  # for the models that all tests share
RETRYABLE = ("node_lost", "transfer_failed", "checksum_failed", "preempted", "cache_damaged", "moved")


def autoregressive(parts: Parts) -> DecodeSteps:
    """Return plain decoding, with tape graphs for up to three requests; larger batches run eagerly."""
    graphs = step_graphs.decode_graphs(
        parts.runner, parts.relay, parts.table, WANTED, 3, MAX_LEN, parts.hidden_states
    )
    capture_late(graphs.forward.graphs)
    step = AutoregressiveStep(graphs.forward, PLACEMENT.device, parts.completion)
    return DecodeSteps({0: step}, StepRules(), [graphs], {})


def with_forced_tokens(parts: Parts) -> DecodeSteps:
    """Return plain decoding that verifies up to 7 forced tokens, or 3 in batches of more than 5.

    Tape graphs serve batches of 1, 2 and 6.
    """

    def rounds_of(smallest: int, largest: int) -> Rounds:
        captured = min(2 if smallest == 1 else 6, len(parts.relay.seq_len) - 1)
        capture = step_graphs.round_plans(parts.runner, WANTED, captured, smallest)
        return Rounds(parts.relay, parts.table, parts.page_size, parts.max_len, LOOKAHEAD_SLOTS, capture)

    forced = ForcedStep(7, 5), ForcedStep(3, 8)
    plain = autoregressive(parts)
    setup = ForcedSetup(
        parts.runner,
        rounds_of,
        ForcedChain,
        lambda chain: ForcedShare(),
        parts.completion,
        parts.hidden_states,
    )
    steps = with_forced_steps(plain, forced, setup)
    for graphs in steps.graphs[1:]:
        capture_late(graphs.forward.graphs)
    return steps


@dataclass(frozen=True, kw_only=True)
class HostShape:
    """Host memory of a node."""

    blocks: int  # without block 0
    slots: int = 0  # of snapshots, without slot 0
    block_pages: int = 2
    lanes: Callable[[], Lanes] = lambda: Lanes(Inline(), Inline())

    def layout(self, device: PoolLayout) -> HostLayout:
        pages, slots = (self.blocks + 1) * self.block_pages, self.slots + 1 if self.slots else 0
        return HostLayout(msgspec.structs.replace(device, num_pages=pages, num_slots=slots), self.block_pages)


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes of everything; pools are in tokens, without the padding page."""

    routers: int = 1
    page_size: int = 16
    prefill_pool: int = 1024
    decode_pool: int = 1024
    chunk_tokens: int = 64
    prefill_batch: int = 8
    max_queue: int = 64
    max_running: int = 8
    max_transferring: int = 8
    reserved_tokens: int = 16
    skip_ahead: int = 4
    backup_bytes: int = 1 << 24
    lane: HostLane | None = None  # copies the pages of retracted requests
    prefill_slots: int = 16  # state slots beside slot 0, where the model keeps a state per request
    decode_slots: int = 24
    measured: Mapping[int, float] = field(default_factory=dict)  # milliseconds of forwards by tokens
    prefill_snapshots: int = 0  # saved states of cached prefixes
    round_tokens: int = 1  # new tokens of a request in one step, at most
    host: HostShape | None = None  # host memory of prefill nodes for cached prefixes
    decode_host: HostShape | None = None
    prefill_cache: bool = True
    decode_cache: bool = True
    completion: MakeCompletion = Immediate
    step: MakeStep = autoregressive
    watch: DraftWatch = field(default_factory=NoWatch)
    grammars: Grammars = NO_GRAMMARS
    prompt_graphs: str = "breakable"
    layers: bool = False  # whether pages are sent layer by layer
    hidden_states: bool = False  # whether requests may ask for hidden states
    draft: NoDraftModel = field(default_factory=NoDraftModel)
    vision_stage: MakeVisionStage = lambda context, model: VisionStage(NoImages(), TextEmbeds())
    change_prompts: Callable[[Forwards], Forwards] = lambda forwards: forwards
    prefills: int = 1
    model: ModelConfig = CONFIG
    kv: KvValues = AS_COMPUTED  # how pages store keys and values
    target: CausalLM | None = None  # built for `model`; None: the tiny one
    decodes: int = 1
    fencing: bool = False
    checks_later: bool = False  # decode nodes compare the pages of a request while it takes part in steps
    max_len: int = MAX_LEN
    transfer: TransferLimits = field(
        default_factory=lambda: TransferLimits(record_bytes=record_bytes(MAX_LEN), slots_timeout=1e6)
    )


ONE_BEHIND = Deferred


class Watched(Deferred):
    """A Deferred completion that lets transfers continue while it waits, as they do during a forward on a GPU."""

    def wait(self, meanwhile: Callable[[], None] | None = None) -> None:
        assert meanwhile is not None, "the node does no other work while a forward runs"
        for _ in range(3):
            meanwhile()


@dataclass(slots=True)
class Side:
    """The parts that both kinds of node have."""

    ref: NodeRef
    links: list[FakeLink]  # one to each router
    space: PageSpace
    alive: bool = True

    @property
    def link(self) -> FakeLink:
        """The link to the first router."""
        return self.links[0]


@dataclass(slots=True)
class PrefillSide(Side):
    node: PrefillNode = None  # type: ignore[assignment]
    sender: Sender = None  # type: ignore[assignment]
    peers: RouterSocket = None  # type: ignore[assignment]
    draft: PrefillDraft = None  # type: ignore[assignment]
    forwards: Forwards = None  # type: ignore[assignment]
    host: HostParts = None  # type: ignore[assignment]

    @property
    def tier(self) -> HostPrefixes:
        """Its host memory."""
        assert isinstance(self.host.tier, HostPrefixes)
        return self.host.tier

    @property
    def store(self) -> HostStore:
        """The bytes of its host memory."""
        assert isinstance(self.host.copies, HostStore)
        return self.host.copies


@dataclass(slots=True)
class DecodeSide(Side):
    node: DecodeNode = None  # type: ignore[assignment]
    receiver: Receiver = None  # type: ignore[assignment]
    peers: PeerConnections = None  # type: ignore[assignment]
    retraction: Retraction = None  # type: ignore[assignment]
    steps: DecodeSteps = None  # type: ignore[assignment]
    backups: Backups = None  # type: ignore[assignment]
    pool: KvPool = None  # type: ignore[assignment]
    relay: RelayState = None  # type: ignore[assignment]
    rows: BatchRows = None  # type: ignore[assignment]
    pacing: Pacing = None  # type: ignore[assignment]
    host: HostShare | None = None
    host_tier: decode_node.host_tier.DecodeTier = None  # type: ignore[assignment]

    @property
    def tier(self) -> decode_node.host_tier.DecodePrefixes:
        """Its host memory."""
        assert isinstance(self.host_tier, decode_node.host_tier.DecodePrefixes)
        return self.host_tier


@dataclass(slots=True, eq=False)
class Call:
    """One request as its client sees it; `room` belongs to the current attempt."""

    prompt: list[int]
    sampling: SamplingParams
    images: tuple[ImageSpan, ...] = ()
    salt: bytes = b""
    room: int = 0
    router: int = 0  # which sent it
    prefill: PrefillSide = None  # type: ignore[assignment]
    decode: DecodeSide = None  # type: ignore[assignment]
    output: list[OutputToken] = field(default_factory=list)
    base: int = 0  # output tokens of earlier attempts
    early: dict[int, tuple[list[OutputToken], str | None]] = field(default_factory=dict)
    finish: str | None = None
    error: Failed | None = None
    cached_tokens: int | None = None
    attempts: int = 0
    first_token_turn: int | None = None
    done_turn: int | None = None
    prefill_stages: dict[str, float] | None = None
    decode_stages: dict[str, float] | None = None
    rounds: int = 0  # runs of steps that verified drafts
    tokens_of_rounds: int = 0  # in these runs
    accept_length: float | None = None  # in the last run
    aborted: bool = False
    states: AnswerStates | None = None

    @property
    def ids(self) -> list[int]:
        return [token.id for token in self.output]

    @property
    def over(self) -> bool:
        return self.finish is not None or self.error is not None or self.aborted


class NodeCluster:
    """The cluster (see the module docstring). Call `close` at the end, or use it as a context manager."""

    def __init__(self, shape: Shape = Shape(), resubmit: bool = True) -> None:
        self._patches = [
            mock.patch.object(module, name, 0)  # idle turns must not wait: the test controls time
            for module, name in (
                (prefill_node.node, "IDLE_WAIT_MS"),
                (prefill_node.node, "BUSY_WAIT_MS"),
                (decode_node.node, "IDLE_WAIT_MS"),
                (decode_node.node, "BUSY_WAIT_MS"),
            )
        ]
        for patch in self._patches:
            patch.start()
        self.shape = shape
        self.clock = Clock()
        self.fabric = self.make_fabric()
        self.context = zmq.Context[zmq.Socket[bytes]]()
        self.calls: list[Call] = []
        self.turns = 0
        self.failures: list[Failed] = []
        self.resubmit = resubmit
        self._rooms = itertools.count(1)
        self.by_room: dict[int, Call] = {}
        self._names = itertools.count()
        self.prefills = [self._prefill() for _ in range(shape.prefills)]
        self.decodes = [self._decode() for _ in range(shape.decodes)]

    def make_fabric(self) -> Fabric:
        """Return what pages are sent over."""
        return Fabric(self.clock)

    def __enter__(self) -> NodeCluster:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        for prefill in self.prefills:
            prefill.peers.close()
            for link in prefill.links:
                link.close()
        for decode in self.decodes:
            decode.peers.close()
            for link in decode.links:
                link.close()
        self.context.term()
        for patch in self._patches:
            patch.stop()

    @property
    def prefill(self) -> PrefillSide:
        return self.prefills[0]

    @property
    def decode(self) -> DecodeSide:
        return self.decodes[0]

    # -- the router's part

    def submit(
        self,
        prompt: Sequence[int],
        max_tokens: int = 8,
        prefill: int = 0,
        decode: int = 0,
        deadline: float = 1e6,
        legs: str = "dp",
        images: tuple[ImageSpan, ...] = (),
        salt: bytes = b"",
        router: int = 0,
        **sampling: object,
    ) -> Call:
        """Submit a request. `legs`: the messages to send, in order: d for the reservation, p for the prompt."""
        params = SamplingParams(**{"temperature": 0.0, "max_tokens": max_tokens, **sampling})  # type: ignore[arg-type]
        call = Call(list(prompt), params, images, salt, router=router)
        if params.hidden_states_from is not None:
            size = self.shape.model.hidden_size
            call.states = AnswerStates(params.hidden_states_from, len(prompt), max_tokens, size)
        self.calls.append(call)
        self.place(call, prefill, decode, deadline, legs)
        return call

    def place(
        self, call: Call, prefill: int = 0, decode: int = 0, deadline: float = 1e6, legs: str = "dp"
    ) -> None:
        """Start a new attempt with the tokens of the call so far."""
        call.room = next(self._rooms)
        call.prefill, call.decode = self.prefills[prefill], self.decodes[decode]
        call.base, call.early, call.error = len(call.output), {}, None
        call.attempts += 1
        self.by_room[call.room] = call
        if call.states is not None:
            call.states.resume(len(call.prompt) + call.base)
            first = call.states.wanted_from
            call.sampling = msgspec.structs.replace(call.sampling, hidden_states_from=first)
        for leg in legs:
            self.send_leg(call, leg, deadline)

    def send_leg(self, call: Call, leg: str, deadline: float = 1e6) -> None:
        common = {
            "room": call.room,
            "request_id": f"r{call.room}",
            "token_ids": call.prompt + call.ids[: call.base],
            "emitted": call.base,
            "sampling": call.sampling,
            "images": call.images,
            "salt": call.salt,
            "deadline_ms": int(deadline * 1000),
        }
        if leg == "d":
            call.decode.links[call.router].deliver(Reserve(prefill=call.prefill.ref, **common))  # type: ignore[arg-type]
        else:
            call.prefill.links[call.router].deliver(Prefill(decode=call.decode.ref.incarnation, **common))  # type: ignore[arg-type]

    def abort(self, call: Call, reason: str = "client left") -> None:
        call.aborted = True
        self._end_attempt(call, reason)

    def lose(self, side: Side) -> None:
        """Act as a router that declares a node lost: tell the other role, and place its requests again or fail them."""
        for other in (*self.prefills, *self.decodes):
            if other.alive and other.ref.role != side.ref.role:
                for link in other.links:
                    link.deliver(PeerLost(incarnation=side.ref.incarnation))
        for call in self.calls:
            if not call.over and side in (call.prefill, call.decode):
                self._failed(call, Failed(room=call.room, code="node_lost", message="the node is gone"))

    def kill(self, side: Side) -> None:
        """End the node's process without anybody noticing."""
        side.alive = False
        if isinstance(side, PrefillSide):
            self.fabric.kill(side.ref.incarnation)

    def restart(self, side: PrefillSide | DecodeSide) -> None:
        """Start a new incarnation of a node that was killed. The routers have yet to `lose` the earlier one."""
        if isinstance(side, PrefillSide):
            self.prefills.append(self._prefill())
        else:
            self.decodes.append(self._decode())

    # -- time

    def turn(self, count: int = 1, dt: float = 0.001) -> None:
        for _ in range(count):
            self.turns += 1
            self.clock.now += dt
            for side in self._sides():
                if side.alive:
                    side.node.loop.turn()
                    self._listen(side)

    def _sides(self) -> list[PrefillSide | DecodeSide]:
        return [*self.prefills, *self.decodes]

    def turn_one(self, side: PrefillSide | DecodeSide) -> None:
        """Run one turn of one node only."""
        self.clock.now += 0.001
        side.node.loop.turn()
        self._listen(side)

    def run(self, until: Callable[[], bool] | None = None, limit: int = 3000, dt: float = 0.001) -> None:
        """Run turns until every call is over (or `until`). More than `limit` turns count as a hang."""
        done = until or (lambda: all(call.over for call in self.calls))
        for _ in range(limit):
            if done():
                return
            self.turn(dt=dt)
        raise AssertionError(f"nothing ends after {limit} turns: {self.describe()}")

    def settle(self, limit: int = 200) -> None:
        """Run turns until all nodes are idle, then check that nothing leaked."""

        def idle() -> bool:
            live = [side for side in self._sides() if side.alive]
            return all(not len(side.node.queues) for side in live)

        self.run(idle, limit)
        self.turn(3)
        self.check_idle()

    def check_idle(self) -> None:
        for prefill in self.prefills:
            if prefill.alive:
                assert prefill.sender.active == 0, "a room is left in the sender"
                self._check_host(prefill.host.tier)
                self._check_space(prefill)
        for decode in self.decodes:
            if decode.alive:
                assert decode.receiver.active == 0, "a room is left in the receiver"
                assert decode.receiver.quarantined_pages == 0
                assert decode.rows.free == self.shape.max_running, "a row is held"
                assert decode.retraction.used_bytes == decode.backups.nbytes == 0, "a backup is held"
                assert decode.pacing.counters.missing == 0, "a step wrote no progress marks"
                self._check_host(decode.host_tier)
                self._check_space(decode)

    def _check_host(self, tier: HostTier | decode_node.host_tier.DecodeTier) -> None:
        if isinstance(tier, HostPrefixes | decode_node.host_tier.DecodePrefixes):
            self.run(lambda: not tier.busy)
            tier.cache.check_integrity()
            assert tier.cache.writing_blocks == 0, "a write has not ended"
            assert tier.cache.held_blocks == 0, "a retracted request is held"
            assert tier.cache.tree.evictable_pages == tier.cache.cached_blocks, "a lock is held"
            assert tier.cache.tree.snapshots.writing == 0, "a slot is written"

    def _check_space(self, side: PrefillSide | DecodeSide) -> None:
        space = side.space
        assert not len(side.node.queues), "a queue is not empty"
        space.check_integrity()
        assert space.leased_pages == 0, f"{space.leased_pages} pages are leased"
        assert space.leased_slots == 0, f"{space.leased_slots} state slots are leased"
        assert space.free_pages + space.cache.cached_pages == space.total_pages
        assert space.cache.evictable_pages == space.cache.cached_pages, "a lock is held"
        told = side.link.load  # the load that /server_info would show
        assert (told.running, told.queued, told.transferring) == (0, 0, 0)
        assert told.free_pages + told.cached_pages == told.total_pages == space.total_pages

    def describe(self) -> str:
        queues = [
            {
                name: [r.room for r in _requests(getattr(side.node.queues, name))]
                for name, queue in vars(side.node.queues).items()
                if isinstance(queue, Iterable)
            }
            for side in self._sides()
        ]
        spaces = [(s.space.free_pages, s.space.cache.cached_pages) for s in self._sides()]
        return f"queues {queues}, (free, cached) {spaces}, failures {self.failures}"

    # -- messages of nodes

    def _listen(self, side: PrefillSide | DecodeSide) -> None:
        for message in (message for link in side.links for message in link.taken()):
            if isinstance(message, FirstToken):
                call = self.by_room.get(message.room)
                if call is not None:
                    call.first_token_turn = call.first_token_turn or self.turns
                    call.cached_tokens = message.cached_tokens
                    self._tokens(call, 0, [message.token], message.finish_reason)
                    if call.finish is not None and call.decode.alive:
                        # As the router: the decode node waits for pages that it does not need.
                        call.decode.links[call.router].deliver(Abort(room=call.room, reason="finished"))
            elif isinstance(message, Tokens):
                for run in message.runs:
                    call = self.by_room.get(run.room)
                    if call is not None:
                        call.decode_stages = run.stages or call.decode_stages
                        call.rounds += run.verified
                        call.tokens_of_rounds += len(run.tokens) if run.verified else 0
                        call.accept_length = run.accept_length
                        self._tokens(call, run.offset, run.tokens, run.finish_reason)
            elif isinstance(message, HiddenStates):
                call = self.by_room.get(message.room)
                if call is not None:
                    assert call.states is not None, "hidden states that nobody asked for"
                    decoded = isinstance(side, DecodeSide)
                    add = call.states.add_decoded if decoded else call.states.add_prefilled
                    add(message.start, message.states)
            elif isinstance(message, PrefillDone):
                call = self.by_room.get(message.room)
                if call is not None:
                    call.prefill_stages = message.stages
            elif isinstance(message, Failed):
                self.failures.append(message)
                call = self.by_room.get(message.room)
                if call is not None and not call.over:
                    self._failed(call, message)

    def _tokens(self, call: Call, offset: int, tokens: list[OutputToken], finish: str | None) -> None:
        assert call.finish is None, "tokens after the last one"
        assert offset not in call.early, "the same tokens twice"
        call.early[offset] = (tokens, finish)
        while (run := call.early.pop(len(call.output) - call.base, None)) is not None:
            call.output.extend(run[0])
            if run[1] is not None:
                call.finish, call.done_turn = run[1], self.turns
                del self.by_room[call.room]
                break

    def _failed(self, call: Call, failed: Failed) -> None:
        retry = self.resubmit and failed.code in RETRYABLE
        prefill = next((i for i, side in enumerate(self.prefills) if side.alive), None)
        decode = next((i for i, side in enumerate(self.decodes) if side.alive), None)
        self._end_attempt(call, "the request ended at the router")
        if retry and prefill is not None and decode is not None:
            self.place(call, prefill, decode)
        else:
            call.error, call.done_turn = failed, self.turns

    def _end_attempt(self, call: Call, reason: str) -> None:
        self.by_room.pop(call.room, None)
        for side in (call.prefill, call.decode):
            if side.alive:
                side.links[call.router].deliver(Abort(room=call.room, reason=reason))

    # -- parts, as the nodes' build.py makes them from a config

    def _served(self, section: str, pool_tokens: int, slots: int) -> ServingModel:
        """The models as loaded at a node's start, with a pool of `pool_tokens`."""
        shape, draft = self.shape, self.shape.draft.serving()
        drafting = None if draft is None else draft.config.model
        spec = pool_spec(shape.model, drafting, shape.page_size, "float32", shape.kv)
        pages = pool_tokens // shape.page_size
        return ServingModel(
            model=shape.target or tiny_model(aux=shape.draft.aux_layers, config=shape.model),
            config=shape.model,
            placement=PLACEMENT,
            fingerprint="tiny",
            spec=spec,
            num_pages=pages + 1,
            max_model_len=min(shape.max_len, pages * shape.page_size),
            memory=NodeMemory(PoolBudget(pool_tokens, 1.0, section), MemoryPlan(0, 0, 0)),
            draft=draft,
            state=KeptState(slots, WindowShape(window_widths(shape.model), shape.round_tokens))
            if spec.state_bytes
            else NO_STATE,
        )

    def make_steps(
        self,
        sizes: StepSizes,
        served: ServingModel,
        runner: ModelRunner,
        draft: object,
        table: PageTable,
        relay: RelayState,
    ) -> DecodeSteps:
        """Make the steps of a decode node."""
        shape, longest, page_size = self.shape, served.max_model_len, served.page_size
        hidden = shape.hidden_states
        return shape.step(Parts(runner, draft, table, relay, page_size, longest, shape.completion, hidden))

    def wrap_worker(self, worker: decode_node.step_result.Worker) -> decode_node.step_result.Worker:
        """Return the worker that a decode node talks to."""
        return WireWorker(worker)

    def wrap_prompt_worker(self, worker: prefill_node.step_result.Worker) -> prefill_node.step_result.Worker:
        """Return the worker that a prefill node talks to."""
        return WirePromptWorker(worker)

    def _incarnation(self) -> str:
        return f"{next(self._names) + 1:032x}"

    def _prompt_forwards(self, served: ServingModel) -> Forwards:
        shape = self.shape
        sizes = PromptSizes(
            PhaseSwitch(shape.prompt_graphs, poisoned=True),
            32,
            8,
            shape.layers,
            shape.draft.algorithm,
            shape.hidden_states,
            shape.host is not None,
        )
        stage = shape.vision_stage(self.context, served.model)
        forwards = prompt_forwards(sizes, served, lambda wanted: stage, BODIES)
        for each in forwards.graphs:
            if shape.layers:  # a listener would also be called during capture
                each.forward.graphs.capture()
                assert not [row for row in each.forward.graphs.rows if row.error]
            else:
                capture_late(each.forward.graphs)
        return shape.change_prompts(forwards)

    def _prefill(self) -> PrefillSide:
        shape, incarnation = self.shape, self._incarnation()
        name = f"prefill-{len(getattr(self, 'prefills', []))}-{incarnation[-2:]}"
        served = self._served("prefill", shape.prefill_pool, shape.prefill_slots)
        snapshots = SnapshotBudget(shape.prefill_snapshots)
        served = replace(served, state=replace(served.state, snapshots=snapshots))
        forwards = self._prompt_forwards(served)
        endpoint = self.fabric.sender(incarnation)
        endpoint.register(forwards.layout, as_memory(forwards.runner.pool.storage))
        peers = RouterSocket(self.context, f"inproc://{incarnation}")
        sender = Sender(incarnation, name, endpoint, forwards.layout, peers.post, self.clock, shape.transfer)
        space = page_space(served, "auto" if shape.prefill_cache else False)
        computation = prefill_assemble.Computation(
            forwards,
            AdjustmentRows.allocate(shape.prefill_batch, shape.model.vocab_size, PLACEMENT.device),
            rotary_places(shape.model.rope),
            shape.completion,
            served.draft_shape.dtype_name,
            MeasuredTimes(dict(shape.measured)),
            self._host(forwards, space),
        )
        limits = PrefillLimits(
            chunk_tokens=shape.chunk_tokens,
            max_batch=shape.prefill_batch,
            max_queue=shape.max_queue,
            max_model_len=served.max_model_len,
            vocab_size=shape.model.vocab_size,
            drain_timeout=10.0,
            grid=prompt_grid(shape.model, shape.page_size),
            hidden_states=shape.hidden_states,
        )
        links = [FakeLink(self.context, prefill_inbox.codec) for _ in range(shape.routers)]  # type: ignore[arg-type]
        routers = FakeLinks(links, self.clock)
        node = prefill_assemble.assemble(
            prefill_parts.Links(incarnation, routers, peers, sender, forwards.vision.images),
            space,
            computation,
            limits,
            prefill_parts.Observation(Log(name), clock=self.clock),
            self.wrap_prompt_worker,
            wired,
            shape.grammars,
        )
        ref = NodeRef(
            name=name, role="prefill", incarnation=incarnation, peer_address=f"inproc://{incarnation}"
        )
        return PrefillSide(
            ref,
            links,
            space,
            True,
            node,
            sender,
            peers,
            forwards.draft,
            forwards,
            computation.host,
        )

    def _host(self, forwards: Forwards, space: PageSpace) -> HostParts:
        if self.shape.host is None:
            return HostParts()
        pool = forwards.layout, forwards.runner.pool.storage
        made = self._host_memory(self.shape.host, pool, forwards.arriving.expect)
        return HostParts(host_prefixes(made.layout, made.items, made.store, space), made.store)

    def _host_memory(
        self, shape: HostShape, pool: tuple[PoolLayout, Tensor], expect: Expect | None
    ) -> HostShare:
        layout = shape.layout(pool[0])
        memory = HostBytes(layout.planes.total_bytes, PLACEMENT.device)
        lanes, copies = shape.lanes(), MovedPool(*pool)
        store = HostStore(layout, memory, pool, expect, lanes, copies, self.clock)
        return HostShare(store, layout, ItemBytes.of(pool[0]))

    def _decode(self) -> DecodeSide:
        shape, incarnation = self.shape, self._incarnation()
        name = f"decode-{incarnation[-2:]}"
        served = self._served("decode", shape.decode_pool, shape.decode_slots)
        endpoint = self.fabric.receiver(incarnation, fencing=shape.fencing)
        relay = RelayState.allocate(
            shape.max_running,
            shape.model.vocab_size,
            PLACEMENT.device,
            served.draft_shape,
            served.state.window,
        )
        # As many lookahead slots as any drafter of a test takes.
        sizes = StepSizes(WANTED, shape.max_running, False, "ngram", nodes=LOOKAHEAD_SLOTS)
        forwards = step_forwards(
            sizes,
            served,
            relay,
            lambda nbytes: as_storage(endpoint.allocate(Region.KV, nbytes)),
            self.make_steps,
        )
        slots = 2 * shape.max_transferring
        receiver = Receiver(
            incarnation,
            name,
            endpoint,
            forwards.layout,
            self.clock,
            shape.transfer,
            slots,
            shape.checks_later,
        )
        space = page_space(served, "auto" if shape.decode_cache else False)
        links = [FakeLink(self.context, decode_inbox.codec) for _ in range(shape.routers)]  # type: ignore[arg-type]
        routers = FakeLinks(links, self.clock)
        poller = zmq.Poller()
        peers = PeerConnections(self.context, name, incarnation, receiver, poller)
        host, pool = None, (forwards.layout, forwards.pools[0].storage)
        if shape.decode_host is not None:
            host = self._host_memory(shape.decode_host, pool, None)
        computation = Computation(
            forwards,
            relay,
            shape.completion,
            rotary_places(shape.model.rope),
            served.draft_shape,
            shape.lane,
            host,
        )
        limits = DecodeLimits(
            max_running=shape.max_running,
            max_transferring=shape.max_transferring,
            max_queue=shape.max_queue,
            max_model_len=served.max_model_len,
            vocab_size=shape.model.vocab_size,
            reserved_tokens=shape.reserved_tokens,
            skip_ahead=shape.skip_ahead,
            drain_timeout=10.0,
            hidden_states=shape.hidden_states,
        )
        made = assemble(
            Links(incarnation, routers, peers, poller, receiver),
            space,
            computation,
            limits,
            shape.backup_bytes,
            Observation(Log(name), drafts=shape.watch, clock=self.clock),
            self.wrap_worker,
            shape.grammars,
        )
        ref = NodeRef(name=name, role="decode", incarnation=incarnation)
        side = DecodeSide(
            ref, links, space, True, made.node, receiver, peers, made.retraction, forwards.steps
        )
        side.backups, side.rows, side.pacing = made.backups, made.rows, made.pacing
        side.pool, side.relay = forwards.pools[0], relay
        side.host, side.host_tier = host, made.tier
        return side


def _requests(queue: Any) -> list[Any]:
    return list(queue.values()) if isinstance(queue, dict) else list(queue)
