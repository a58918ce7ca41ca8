"""Nodes that answer a real router's messages when, and in which order, a test lets them; in one process, in no time.

Tokens follow from the request and their position, so a token that is lost, repeated or of another request is found.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any
from unittest import mock

import msgspec

from common.errors import BY_CODE
from common.ipc.curve import Plain
from common.messages import decode_inbox, prefill_inbox
from common.messages.decode_inbox import Reserve
from common.messages.generation import FINISH_LENGTH, FINISH_STOP, OutputToken
from common.messages.identity import ROLES, NodeCounters, NodeLoad, NodeState, Role
from common.messages.node_inbox import Abort, HeartbeatAck, PeerLost, Rejected
from common.messages.prefill_inbox import Prefill
from common.messages.router_inbox import (
    Failed,
    FirstToken,
    Goodbye,
    Heartbeat,
    PrefillDone,
    Register,
    TokenRun,
    Tokens,
)
from common.messages.wire import encode
from common.observability.logs import Log
from router import control_plane
from router.core import assemble_core
from router.dispatch.generation import GenerationRequest
from router.dispatch.limits import DispatchLimits
from router.nodes.placement import PlacementPolicy
from router.nodes.placement_rules import PlacementRules
from router.nodes.registration import ExpectedNode, RegistrationRules
from router.parts import ControlLink, Dispatching, NodeRules
from router.process.freed_memory import FreedMemory
from tests.fakes.fake_node import PEER_ADDRESS, registration
from tests.fakes.memory_router_socket import MemoryRouterSocket
from tests.fakes.observing import observation
from tests.fakes.placement_rules import DEFAULT_RULES
from tests.fakes.stepped_loop import SteppedLoop

BEAT = 0.25  # seconds between the heartbeats of a node
NODE_TIMEOUT = 2.5
VOCAB_SIZE = 50_000
PAGE = 16  # tokens


def token_at(request_id: str, position: int) -> int:
    """Return the token that every node computes for a position of the answer to a request."""
    return 1000 + Random(f"{request_id} {position}").randrange(40_000)


@dataclass
class AskedPrompt:
    """A request of a client, and what its answer should be."""

    request: GenerationRequest
    length: int  # tokens of the whole answer

    @property
    def finish(self) -> str:
        return FINISH_LENGTH if self.length == self.request.sampling.max_tokens else FINISH_STOP

    @property
    def answer(self) -> list[int]:
        return [token_at(self.request.request_id, position) for position in range(self.length)]


@dataclass
class Job:
    """A room that a node works on."""

    message: Prefill | Reserve
    sent: int = 0  # tokens of this attempt
    first_token_sent: bool = False
    over: bool = False  # the node holds nothing of it any more


@dataclass
class ScriptedCluster:
    """A router and its nodes. Messages wait in `SteppedNode.outgoing` until a test delivers them."""

    loop: SteppedLoop
    limits: DispatchLimits
    policies: dict[Role, PlacementPolicy]
    total_pages: int = 100
    placement: PlacementRules = DEFAULT_RULES
    movable: Sequence[str] = ()  # names of nodes that can change their role
    prompt_times: tuple[tuple[int, float], ...] = ()  # that prefill nodes report
    asked: dict[str, AskedPrompt] = field(default_factory=dict)
    nodes: list[SteppedNode] = field(default_factory=list)  # the living ones
    # Room and incarnation of each half that was sent.
    sent_to: set[tuple[int, str]] = field(default_factory=set)
    aborted: set[tuple[int, str]] = field(default_factory=set)
    handed_over: set[int] = field(default_factory=set)  # rooms whose pages the decode node has
    broken: list[str] = field(default_factory=list)  # what the router should not have sent

    def __post_init__(self) -> None:
        self.socket = MemoryRouterSocket(self.loop)
        expected: dict[str, ExpectedNode] = {}
        for number in range(3):
            expected[f"prefill-{number}"] = ExpectedNode("prefill", PEER_ADDRESS, 1, None)
            expected[f"decode-{number}"] = ExpectedNode("decode", "", 1, None)
        for name in self.movable:
            decoding = ExpectedNode("decode", "", 1, None)
            expected[name] = ExpectedNode("prefill", PEER_ADDRESS, 1, None, decoding=decoding)
        rules = NodeRules(
            RegistrationRules(expected, page_size=PAGE, max_model_len=4096, vocab_size=VOCAB_SIZE),
            "f" * 64,
            configured={role: [name for name in expected if name.startswith(role)] for role in ROLES},
            node_timeout=NODE_TIMEOUT,
            loop_timeout=3.0,
            return_window=8.0,
            slow_start=1.0,
        )
        with mock.patch.object(control_plane, "RouterSocket", return_value=self.socket):
            self.core = assemble_core(
                ControlLink(mock.Mock(), "ipc://nowhere", "router", Plain(), 1 << 20),
                rules,
                Dispatching(self.policies, self.limits, 0.0, Random(1), self.placement),
                observation(Log("router"), self.loop.time),
            )
        self.core.control.freed_memory = mock.AsyncMock(FreedMemory)  # which uses a thread
        self.loop.run_now(self.core.start)

    @property
    def dispatcher(self) -> Any:
        return self.core.dispatcher

    def expect(self, holds: bool, problem: str) -> None:
        """Note a problem with what the router sends: it would handle an exception itself."""
        if not holds:
            self.broken.append(problem)

    def registration(self, role: Role, name: str) -> Register:
        """Return the first message of a node."""
        return registration(role, name, total_pages=self.total_pages)

    def start(self, role: Role, name: str) -> SteppedNode:
        node = SteppedNode(self, role, name)
        self.nodes.append(node)
        node.register()
        node.deliver()
        return node

    def beat(self) -> None:
        for node in self.nodes:
            node.beat()

    def pass_time(self, seconds: float) -> None:
        """Let time pass, in which nodes send heartbeats."""
        while seconds > 0:
            self.loop.run_for(min(seconds, BEAT))
            seconds -= BEAT
            self.beat()
            self.loop.run_for()

    def close(self) -> None:
        self.loop.run_now(self.core.close)
        self.loop.run_for(10.0)


class SteppedNode:
    """One process. It does what a test tells it, if a node of its role could do that."""

    def __init__(self, cluster: ScriptedCluster, role: Role, name: str) -> None:
        self.cluster = cluster
        self.role = role
        self.record = cluster.registration(role, name)
        self.incarnation = self.record.node.incarnation
        self.link, self.beat_link = self.record.link_id().encode(), self.record.link_id("beat").encode()
        self.codec = prefill_inbox.codec if role == "prefill" else decode_inbox.codec
        self.jobs: dict[int, Job] = {}
        self.outgoing: deque[bytes] = deque()
        self.incoming: deque[msgspec.Struct] = deque()
        self.state: NodeState = "up"
        self.alive = True
        self.closed = False  # its socket is closed, and the router's socket knows
        self.cut_off = False  # nothing passes in either direction
        self.full = False  # the router cannot send to it now
        self.loop_age = 0
        self._sequence = 0

    # ---- the link

    def register(self) -> None:
        """Open a session, as a node does when it starts and when the router does not know it any more."""
        for waiting in self.jobs, self.outgoing, self.incoming:
            waiting.clear()
        self.outgoing.append(encode(self.record))

    def deliver(self, most: int = 1_000_000) -> None:
        """Let its next messages reach the router."""
        socket = self.cluster.socket
        while self.outgoing and most > 0 and not self.cut_off:
            most -= 1
            frame = self.outgoing.popleft()
            if frame == encode(self.record):
                socket.peers[self.link] = self.take
                socket.links[self.beat_link] = self.take_answer
            elif self.link not in socket.peers:
                # The router has forgotten the session and answers RESET.
                self.register()
                continue
            socket.arrive(self.link, frame)
        self.cluster.loop.run_for()

    def take(self, payload: bytes | None) -> bool:
        """Take a message of the router, or None: a probe."""
        if self.closed or (self.full and payload is not None):
            return False
        if payload is None:
            return True
        message = self.codec.decode(payload)
        self.check(message)
        if self.alive:
            self.incoming.append(message)
        return True

    def check(self, message: msgspec.Struct) -> None:
        """Note what the router should not have sent."""
        cluster, room = self.cluster, getattr(message, "room", 0)
        known = cluster.core.registry.get(self.incarnation) is not None
        half = room, self.incarnation
        if isinstance(message, Prefill | Reserve):
            asked = cluster.asked[message.request_id]
            tokens = [*asked.request.token_ids, *asked.answer[: message.emitted]]
            cluster.expect(half not in cluster.sent_to, "a half was sent twice")
            cluster.expect(known, "a half was sent to a node that is not registered")
            cluster.expect(list(message.token_ids) == tokens, "an attempt continues a wrong answer")
            cluster.expect(message.emitted < asked.length, "an attempt continues a complete answer")
            cluster.sent_to.add(half)
        elif isinstance(message, Abort):
            cluster.expect(half in cluster.sent_to, "an abort of a room that was not sent")
            cluster.expect(half not in cluster.aborted, "a second abort of a room")
            cluster.aborted.add(half)
        elif isinstance(message, PeerLost):
            cluster.expect(cluster.core.registry.get(message.incarnation) is None, "a peer is not lost")

    def take_answer(self, payload: bytes) -> None:
        """Take the answer to a heartbeat."""
        answer = self.codec.decode(payload)
        assert isinstance(answer, HeartbeatAck)
        if self.alive and not answer.known and not self.cut_off:
            self.register()

    def beat(self) -> None:
        if not self.alive or self.cut_off:
            return
        self._sequence += 1
        queued = sum(not job.sent for job in self.jobs.values())
        beat = Heartbeat(
            incarnation=self.incarnation,
            sequence=self._sequence,
            state=self.state,
            loop_age_ms=self.loop_age,
            as_of=1.0,
            load=NodeLoad(
                queued=queued,
                running=len(self.jobs) - queued,
                free_pages=max(self.cluster.total_pages - len(self.jobs), 0),
                total_pages=self.cluster.total_pages,
                prompt_times=self.cluster.prompt_times if self.role == "prefill" else (),
            ),
            counters=NodeCounters(),
        )
        self.cluster.socket.links[self.beat_link] = self.take_answer
        self.cluster.socket.arrive(self.beat_link, encode(beat))

    # ---- what it does

    def read(self) -> None:
        """Handle the messages of the router that have arrived."""
        while self.incoming:
            message = self.incoming.popleft()
            if isinstance(message, Prefill | Reserve):
                self.jobs[message.room] = Job(message)
            elif isinstance(message, Abort):
                self.jobs.pop(message.room, None)
            else:
                self.cluster.expect(not isinstance(message, Rejected), "a node was rejected")

    def say(self, message: msgspec.Struct) -> None:
        self.outgoing.append(encode(message))

    def work(self, job: Job, tokens: int, again: int = 0) -> None:
        """Make progress with a job. `tokens`: of a decode node's next run. `again`: repeats so many earlier ones."""
        if isinstance(job.message, Prefill):
            self._prefill(job.message, job)
        elif job.message.room in self.cluster.handed_over:
            self._decode(job.message, job, tokens, again)

    def _asked(self, message: Prefill | Reserve) -> AskedPrompt:
        return self.cluster.asked[message.request_id]

    def _prefill(self, message: Prefill, job: Job) -> None:
        asked, at = self._asked(message), message.emitted
        if not job.first_token_sent:
            job.first_token_sent = True
            last = at + 1 == asked.length
            token = OutputToken(token_at(message.request_id, at))
            finish = asked.finish if last else None
            self.say(FirstToken(room=message.room, token=token, finish_reason=finish, cached_tokens=0))
            job.over = last
        else:
            self.cluster.handed_over.add(message.room)
            stages = {"prefill_start": 0.1, "prefill_end": 0.2, "slots": 0.1, "last_page_sent": 0.3}
            self.say(PrefillDone(room=message.room, stages=stages))
            job.over = True
        if job.over:
            del self.jobs[message.room]

    def _decode(self, message: Reserve, job: Job, tokens: int, again: int) -> None:
        asked, base = self._asked(message), message.emitted
        job.sent = max(job.sent, 1)  # the first one is the prefill node's
        end = min(job.sent + tokens, asked.length - base)
        begin = max(job.sent - again, 0)
        last = base + end == asked.length
        ids = [token_at(message.request_id, base + offset) for offset in range(begin, end)]
        stages = {"first_decode": 0.4, "finished": 0.5} if last else None
        finish = asked.finish if last else None
        run = TokenRun(message.room, begin, [OutputToken(each) for each in ids], finish, stages)
        self.say(Tokens(runs=[run]))
        job.sent = end
        if last:
            del self.jobs[message.room]

    def fail(self, job: Job, code: str) -> None:
        """Give a job up."""
        del self.jobs[job.message.room]
        self.say(Failed.of(job.message.room, BY_CODE[code]("scripted")))

    def die(self, read: int) -> None:
        """End without a word; of what it has said last, `read` messages still arrive."""
        self.deliver(read)
        self.alive = False
        self.closed = True
        self.jobs.clear()
        self.cluster.nodes.remove(self)
        self.cluster.socket.closed()

    def leave(self) -> None:
        """Say goodbye and end."""
        self.say(Goodbye(incarnation=self.incarnation))
        self.die(1_000_000)
