"""A node's link to one router: registration, heartbeats with echo, fencing. RouterLinks holds those to all routers.

Two sockets. The main loop's Dealer carries requests and tokens and is used only by the main thread. A separate thread
sends heartbeats and reads their echo, so that a long forward does not look like a dead node. The heartbeat contains
the time since the main loop's last turn, so that a hang does not look like a working node.

A node that receives no echo for `router_timeout` has lost its router: it must drop the router's requests (`lost()`),
since another node may have taken them over. When a router answers again, the node registers again.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import zmq

from common.errors import ProtocolError
from common.ipc.curve import LinkSecurity
from common.ipc.dealer import Dealer
from common.ipc.host_lookup import Host
from common.messages.identity import ROUTER_NAME, NodeCounters, NodeLoad, NodeState, OtherRouters
from common.messages.node_inbox import (
    Abort,
    AnyNodeMessage,
    HeartbeatAck,
    PeerLost,
    Registered,
    Rejected,
)
from common.messages.protocol import undecodable_version, version_mismatch
from common.messages.router_inbox import Heartbeat, Register, RouterMessage
from common.messages.wire import InboxCodec, encode
from common.node.to_router import ToRouter
from common.node_plan import RouterPlan
from common.observability.logs import Log

M = TypeVar("M")  # the inbox of the node's role
_CONTROL = (Abort, PeerLost, Registered, Rejected, HeartbeatAck)
BEAT = "beat"  # last part of the routing id of the socket for heartbeats
ROUTER = "the router"  # in sentences
REGISTER_INTERVAL = 0.5  # seconds between repetitions until the router answers
NO_OTHERS = OtherRouters()


def control_first(messages: list[AnyNodeMessage | M]) -> list[AnyNodeMessage | M]:
    """Return messages that arrived together, control before work, so that an abort never waits for prompts.

    Work that is aborted by one of these messages is left out, because the abort would overtake it.
    """
    if len(messages) < 2:
        return messages
    aborted = {message.room for message in messages if isinstance(message, Abort)}
    kept = [m for m in messages if isinstance(m, _CONTROL) or getattr(m, "room", None) not in aborted]
    return sorted(kept, key=lambda message: not isinstance(message, _CONTROL))


@dataclass(frozen=True, slots=True)
class HeartbeatContent:
    """The state that the main loop publishes for the heartbeat thread; replaced as a whole, so no lock is needed."""

    state: NodeState
    load: NodeLoad
    counters: NodeCounters
    turned_at: float
    busy_until: float  # end of the time that the loop has announced since its last turn
    as_of: float  # Unix seconds
    # What each router is told about the requests of the others; none for the only router.
    others: Mapping[ToRouter, OtherRouters] = field(default_factory=dict)

    @classmethod
    def now(
        cls,
        state: NodeState,
        load: NodeLoad,
        counters: NodeCounters,
        now: float,
        others: Mapping[ToRouter, OtherRouters],
    ) -> HeartbeatContent:
        """Return the content of a main loop that turns at the monotonic time `now`."""
        return cls(state, load, counters, now, now, time.time(), others)

    def busy(self, until: float) -> HeartbeatContent:
        """Return the same content of a main loop that may also be busy up to the monotonic time `until`."""
        until = max(self.busy_until, until)
        return HeartbeatContent(
            self.state, self.load, self.counters, self.turned_at, until, self.as_of, self.others
        )


class RouterLink(Generic[M]):
    """Used by the node's main thread; the module's docstring describes the heartbeat thread."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        plan: RouterPlan,
        address: str | Host,
        register: Register,
        codec: InboxCodec[M],
        log: Log,
        clock: Callable[[], float] = time.monotonic,
        security: LinkSecurity | None = None,
    ) -> None:
        """`address`: the control address of this router, one of the plan's."""
        self._context = context
        self._security = security
        self._address = address
        self._register = register
        self._codec = codec
        self._interval = plan.heartbeat_interval
        self._timeout = plan.timeout
        self._log = log
        self._clock = clock
        self._dealer = Dealer(context, address, register.link_id().encode(), ROUTER_NAME, security)
        self._router: str | None = None  # incarnation that has registered this node
        self._asked_at = -1e9
        self._registration_waits = False  # for a connection
        self._echo: tuple[str, float] | None = None  # (router incarnation, when), written by the thread
        self._resets = 0
        self._given_up = False  # the router answers but does not know this node; written by the thread
        self._late_work = False  # work has arrived that the node read while it was not registered
        self._forgotten = False  # the router has forgotten that work
        self._refusal = ""  # the router's reason, after it has refused the last registration
        self._sequence = 0
        self._registered_at = 0  # echoes up to this sequence precede the registration
        self._content = HeartbeatContent.now("loading", NodeLoad(), NodeCounters(), clock(), {})
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self.refused_messages = 0
        self.unsent_messages = 0

    @property
    def socket(self) -> zmq.Socket[bytes]:
        return self._dealer.socket

    @property
    def readable(self) -> bool:
        """True if frames have arrived."""
        return bool(int(self._dealer.socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)

    @property
    def registered(self) -> bool:
        return self._router is not None

    @property
    def address(self) -> str:
        """The address at which the router is looked for."""
        return self._dealer.at

    def unregistered_because(self) -> str:
        """Say why the router has not registered this node."""
        if trouble := self._dealer.trouble():
            return trouble
        return self._refusal or "it is connected and has not answered the registration"

    @property
    def last_echo(self) -> tuple[str, float] | None:
        """The router's incarnation that answered last, and the time; None before the first registration or echo."""
        return self._echo

    @property
    def heartbeats(self) -> int:
        """Number of heartbeats sent so far."""
        return self._sequence

    def start(self) -> None:
        """Begin to send heartbeats. Raises what the constructor of Dealer does, and RuntimeError without a thread."""
        identity = self._register.link_id(BEAT).encode()
        dealer = Dealer(self._context, self._address, identity, ROUTER_NAME, self._security, opens=False)
        thread = threading.Thread(target=self._beat, args=(dealer,), name="heartbeat", daemon=True)
        try:
            thread.start()
        except RuntimeError:
            dealer.close()
            raise
        self._thread = thread

    def publish(self, content: HeartbeatContent) -> None:
        """Set the content of the next heartbeats."""
        self._content = content

    def send(self, message: RouterMessage) -> None:
        """Send without blocking. A message that does not fit into the queue is lost, and counted.

        That means that the router has read nothing for long: it counts as lost by its silence.
        """
        if not self._dealer.send(encode(message)):
            self.unsent_messages += 1

    def drain(self) -> list[AnyNodeMessage | M]:
        """Return the messages that have arrived, in the order of `control_first`.

        Work may arrive while the node is not registered: a router that only stalled has lost nothing.
        """
        messages: list[AnyNodeMessage | M] = []
        for frame in self._dealer.drain():
            try:
                messages.append(self._decode(frame))
            except ProtocolError as error:
                self.refused_messages += 1
                self._log.warning("refused a message from the router", error=str(error))
        if self._router is None and any(not isinstance(each, _CONTROL) for each in messages):
            self._late_work = True
        if self._dealer.resets != self._resets:
            # Another router listens at the address, or this one has forgotten the node and its requests.
            self._resets = self._dealer.resets
            self._given_up = True
            self._forgotten, self._late_work = self._late_work, False
            self._asked_at = -1e9
        for message in messages:
            if isinstance(message, Registered):
                self._router = message.router_incarnation
                # An older echo proves nothing.
                self._echo = (message.router_incarnation, self._clock())
                self._registered_at = self._sequence
                self._given_up = self._forgotten = self._late_work = False
                self._refusal = ""
            elif isinstance(message, Rejected):
                self._refusal = message.reason
        self._register_if_needed()
        return control_first(messages)

    def lost(self) -> bool:
        """Return True once when the router has ended or was replaced: its requests must be dropped.

        Also while the node is not registered, since a node that was stopped may notice its loss before it reads work
        that was sent to it before.
        """
        if self._router is None:
            forgotten, self._forgotten = self._forgotten, False
            return forgotten
        echo = self._echo
        silent = echo is not None and (self._clock() - echo[1] > self._timeout or echo[0] != self._router)
        gone = silent or self._given_up
        if gone:
            self._router = None
            self._asked_at = -1e9
        return gone

    def close(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout=self._interval * 4 + 1)
        self._dealer.close()

    def _decode(self, frame: bytes) -> AnyNodeMessage | M:
        """Return a message; Rejected for the first one of a router of another version. Raises ProtocolError."""
        try:
            message: AnyNodeMessage | M = self._codec.decode(frame)
        except ProtocolError:
            refusal = undecodable_version(frame, Registered.__name__, ROUTER)
            if refusal is None:
                raise
            return Rejected(reason=refusal)
        if isinstance(message, Registered):
            refusal = version_mismatch(ROUTER, message.protocol_version)
            return message if refusal is None else Rejected(reason=refusal)
        return message

    def _register_if_needed(self) -> None:
        now = self._clock()
        if self._router is not None or now - self._asked_at < REGISTER_INTERVAL:
            return
        connected = self._dealer.disconnected_for() == 0.0
        # Without a connection one registration waits for it; more would pile up for as long as there is no router.
        if connected or not self._registration_waits:
            self._registration_waits = not connected
            self._asked_at = now
            self.send(self._register)

    def _beat(self, dealer: Dealer) -> None:
        """Send heartbeats on a socket that belongs to this thread from now on."""
        try:
            while not self._stop.wait(self._interval):
                self._sequence += 1
                dealer.datagram(encode(self._heartbeat(self._content)))
                for frame in dealer.drain():
                    self._take_echo(frame)
        finally:
            dealer.close()

    def _heartbeat(self, content: HeartbeatContent) -> Heartbeat:
        return Heartbeat(
            incarnation=self._register.node.incarnation,
            sequence=self._sequence,
            state=content.state,
            loop_age_ms=int((self._clock() - content.turned_at) * 1000),
            announced_ms=int((content.busy_until - content.turned_at) * 1000),
            as_of=content.as_of,
            load=content.load,
            counters=content.counters,
            others=content.others.get(self, NO_OTHERS),
        )

    def _take_echo(self, frame: bytes) -> None:
        """Note an echo. Other frames are ignored and not counted: the main socket counts, this one only gets echoes."""
        try:
            message = self._codec.decode(frame)
        except ProtocolError:
            return
        if isinstance(message, HeartbeatAck):
            self._echo = (message.router_incarnation, self._clock())
            if not message.known and message.sequence > self._registered_at:
                self._given_up = True
