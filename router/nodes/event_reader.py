"""Reads the KV events of all nodes that publish them, and tells placement what is in their caches.

Each node has separate sockets here, so that it can only speak for itself. Their addresses come with its registration,
over the authenticated control link, and have to be those of the cluster file. What a node says about itself cannot be
checked: a wrong event makes a choice of nodes worse, and nothing else.

All work is done in short turns of the event loop. A node that says more than placement can take in is not read until it
has, and one whose messages take long to read is read less often; ZMQ drops what exceeds its queue, which is a gap like
any other.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import zmq

from common.errors import HandshakeRefused, ProtocolError
from common.ipc.curve import is_ipv6
from common.ipc.host_lookup import Host, listener_of
from common.kv_events.wire import SEQUENCE_BYTES, Batch, decode, sequence_of
from common.observability.bounded_log import BoundedLog
from common.observability.logs import Log
from router.nodes.event_feed import EventFeed
from router.nodes.registration import RegistrationRules
from router.nodes.registry import Node, NodeRegistry
from router.nodes.reported_blocks import ReportedBlocks

TURN_SECONDS = 0.05
LOOK_SECONDS = 0.25  # between two looks at which nodes there are
LOOKUP_SECONDS = 5.0  # between two lookups of the name of a host that is not found
MESSAGES_PER_TURN = 20  # of one socket
READ_SECONDS = 0.01  # after which a turn reads no further message of a socket
REST = 4  # seconds in which a node is not read, per second that reading it has taken
BLOCKS_PER_TURN = 2000  # of all nodes, that placement takes in
MAX_BACKLOG = 50_000  # blocks of one node that wait to be delivered
MAX_BATCH_BYTES = 8 << 20
QUEUED_MESSAGES = 100  # of one socket

Socket = zmq.Socket[bytes]


@dataclass(frozen=True, slots=True)
class _Sink:
    """The part of placement's knowledge that is about one node."""

    reported: ReportedBlocks
    node: Node

    def stored(self, medium: str | None, blocks: Sequence[int]) -> None:
        self.reported.stored(self.node, medium, blocks)

    def removed(self, medium: str | None, blocks: Sequence[int]) -> None:
        self.reported.removed(self.node, medium, blocks)

    def cleared(self) -> None:
        self.reported.cleared(self.node)


@dataclass(slots=True, eq=False)
class _Followed:
    """A node whose events are read."""

    sink: _Sink
    feed: EventFeed
    events: Socket
    events_host: Host
    replay_host: Host
    looked_up_at: float
    connected_to: str | None = None  # address of `events`; None while no address is known
    replay: Socket | None = None  # of the latest question
    answers: bool = True  # the latest question has been answered, or there was none
    rests_until: float = 0.0


class EventReader:
    """The sockets to the nodes of a router process. Used on the event loop only."""

    def __init__(
        self,
        registry: NodeRegistry,
        rules: RegistrationRules,
        reported: ReportedBlocks,
        block_tokens: int,
        clock: Callable[[], float],
        log: Log,
        count_gaps: Callable[[int], None],
    ) -> None:
        self._registry = registry
        self._rules = rules
        self._reported = reported
        self._block_tokens = block_tokens
        self._clock = clock
        self._count_gaps = count_gaps
        self._refused = BoundedLog(log, "refused KV events of a node")
        self._failed = BoundedLog(log, "cannot read KV events; trying again")
        self._context: zmq.Context[Socket] | None = None
        self._poller = zmq.Poller()
        self._nodes: dict[str, _Followed | None] = {}  # incarnation -> None: it publishes nothing
        self._followed_at = -LOOK_SECONDS
        self._turns = 0  # each begins with another node
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to read, on the running event loop, if a policy asks for it."""
        if self._reported.roles:
            self.open()
            self._task = asyncio.get_running_loop().create_task(self._run())

    def open(self) -> None:
        """Start libzmq's thread: if a node's socket did so later, without a free descriptor, libzmq would abort."""
        if self._context is None:
            self._context = zmq.Context()
            self._context.socket(zmq.DEALER).close()

    def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
        if self._context is not None:
            self._context.destroy(linger=0)
            self._context = None

    def turn(self) -> bool:
        """Read a bounded number of messages and tell placement; return whether there is more.

        Raises ZMQError if no socket can be made, for lack of a descriptor. What this turn leaves out follows later.
        """
        now = self._clock()
        if now - self._followed_at >= LOOK_SECONDS:
            self._followed_at = now
            self._follow_registry()
        ready = {socket for socket, _ in self._poller.poll(0)}
        more = False
        left = BLOCKS_PER_TURN
        nodes = [node for node in self._nodes.values() if node is not None]
        self._turns += 1
        first = self._turns % len(nodes) if nodes else 0
        for each in [*nodes[first:], *nodes[:first]]:
            feed = each.feed
            more |= self._read(each, ready)
            replay = self._connect(each)
            if replay is not None and (start := feed.question()) is not None:
                self._ask(each, replay, start)
            left -= feed.deliver(each.sink, left)
            more |= feed.backlog > 0
            self._note(each)
        self._refused.flush()
        self._failed.flush()
        return more

    async def _run(self) -> None:
        while True:
            try:
                more = self.turn()
            except zmq.ZMQError as error:
                self._failed.warning("sockets", str(error))
                more = False
            await asyncio.sleep(0 if more else TURN_SECONDS)

    def _follow_registry(self) -> None:
        """Connect to nodes that are new, and close the sockets to those that are gone."""
        present = {node.incarnation: node for node in self._registry if node.role in self._reported.roles}
        for incarnation in self._nodes.keys() - present.keys():
            followed = self._nodes.pop(incarnation)
            if followed is not None:
                self._poller.unregister(followed.events)
                followed.events.close()
                self._close_replay(followed)
                self._reported.lost(followed.sink.node)  # it may have been heard after it was lost
        for incarnation, node in present.items():
            if incarnation not in self._nodes:
                self._nodes[incarnation] = self._followed(node)

    def _followed(self, node: Node) -> _Followed | None:
        try:
            addresses = self._rules.event_addresses(node.register)
        except HandshakeRefused as error:
            self._refused.warning(node.name, str(error))
            return None
        if addresses is None:
            return None
        events = self._socket(zmq.SUB)
        events.subscribe(b"")
        self._poller.register(events, zmq.POLLIN)
        sink, feed = _Sink(self._reported, node), EventFeed(self._block_tokens, self._clock)
        hosts = listener_of(addresses[0]), listener_of(addresses[1])
        return _Followed(sink, feed, events, hosts[0], hosts[1], self._clock())

    def _socket(self, kind: int) -> Socket:
        assert self._context is not None, "open it first"
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVHWM, QUEUED_MESSAGES)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_BATCH_BYTES)
        # A node may publish where this router cannot connect: the attempts become rare.
        socket.setsockopt(zmq.RECONNECT_IVL, 500)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 30_000)
        return socket

    def _connect(self, node: _Followed) -> str | None:
        """Read events from where the node publishes now; return where it answers, None while that is not known."""
        events, replay = node.events_host.next(), node.replay_host.next()
        if events is None or replay is None:
            self._look_up_again(node)
            return None
        if events != node.connected_to:
            if node.connected_to is not None:
                with contextlib.suppress(zmq.ZMQError):  # ENOENT: ZMQ has given the connection up
                    node.events.disconnect(node.connected_to)
            _connect(node.events, events)
            node.connected_to = events
        return replay

    def _look_up_again(self, node: _Followed) -> None:
        now = self._clock()
        if now - node.looked_up_at < LOOKUP_SECONDS:
            return
        node.looked_up_at = now
        self._failed.warning(node.sink.node.name, node.events_host.problem or node.replay_host.problem)
        node.events_host.ask()
        node.replay_host.ask()

    def _ask(self, node: _Followed, address: str, start: int) -> None:
        """Send a question on a new socket, on which no earlier answer can arrive."""
        self._close_replay(node)
        if not node.answers:
            # The host may have another address by now, for the next question.
            node.events_host.ask()
            node.replay_host.ask()
        node.answers = False
        node.replay = self._socket(zmq.DEALER)
        self._poller.register(node.replay, zmq.POLLIN)
        _connect(node.replay, address)
        node.replay.send_multipart((b"", start.to_bytes(SEQUENCE_BYTES, "big")))

    def _close_replay(self, node: _Followed) -> None:
        if node.replay is not None:
            self._poller.unregister(node.replay)
            node.replay.close()
            node.replay = None

    def _read(self, node: _Followed, ready: Collection[Socket]) -> bool:
        """Read what a node has sent; return whether there is more."""
        began, more = self._clock(), False
        if began < node.rests_until:
            return False
        if node.replay in ready and node.feed.backlog < MAX_BACKLOG:
            more |= self._read_answers(node)
        if node.events in ready and node.feed.backlog < MAX_BACKLOG:
            more |= self._read_events(node)
        ended = self._clock()
        node.rests_until = ended + REST * (ended - began)
        return more

    def _read_events(self, node: _Followed) -> bool:
        until = self._clock() + READ_SECONDS
        for _ in range(MESSAGES_PER_TURN):
            try:
                frames = node.events.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return False
            if (read := self._batch(node, frames)) is not None:
                node.feed.heard(*read)
            if self._clock() > until:
                break
        return True

    def _read_answers(self, node: _Followed) -> bool:
        assert node.replay is not None
        until = self._clock() + READ_SECONDS
        for _ in range(MESSAGES_PER_TURN):
            try:
                _, *frames = node.replay.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return False
            node.answers = True
            if len(frames) == 3 and not frames[2]:
                node.feed.ended()
                self._close_replay(node)
                return False
            if (read := self._batch(node, frames)) is not None:
                node.feed.answered(*read)
            if self._clock() > until:
                break
        return True

    def _batch(self, node: _Followed, frames: Sequence[bytes]) -> tuple[int, Batch] | None:
        """Read a message; what cannot be read is missing."""
        try:
            if len(frames) != 3:
                raise ProtocolError(f"a message of {len(frames)} frames, not 3")
            return sequence_of(frames[1]), decode(frames[2])
        except ProtocolError as error:
            self._refused.warning(node.sink.node.name, str(error))
            return None

    def _note(self, node: _Followed) -> None:
        """Note whether placement can rely on the reported blocks."""
        incarnation, following = node.sink.node.incarnation, self._reported.following
        if node.feed.following and not node.feed.backlog:
            following.add(incarnation)
        elif not node.feed.following:
            following.discard(incarnation)
        if gaps := node.feed.take_gaps():
            self._count_gaps(gaps)


def _connect(socket: Socket, address: str) -> None:
    socket.setsockopt(zmq.IPV6, is_ipv6(address))
    socket.connect(address)
