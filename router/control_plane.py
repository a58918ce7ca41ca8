"""The router's side of the control socket: passes messages of nodes to the registry and to attempts at requests.

A node may speak only for its own incarnation, which its socket's identity names, and for its own rooms. Frames that
violate the protocol are counted and dropped. Everything runs on the event loop.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence

import msgspec
import zmq

from common.errors import HandshakeRefused, ProtocolError
from common.ipc import LinkSecurity, RouterSocket, packs
from common.messages.node_inbox import HeartbeatAck, PeerLost, Registered, Rejected
from common.messages.protocol import CONTROL_PROTOCOL_VERSION, undecodable_version
from common.messages.router_inbox import (
    ChangeAnswered,
    Failed,
    FirstToken,
    Goodbye,
    Heartbeat,
    HiddenStates,
    PrefillDone,
    ProfileEnded,
    PromptScores,
    Register,
    RouterMessage,
    TokenRun,
    Tokens,
    codec,
)
from common.messages.wire import encode
from common.observability.bounded_log import BoundedLog
from common.observability.logs import Log
from router.dispatch.attempt_messages import AttemptMessages
from router.dispatch.turn_steps import STEPS_PER_TURN, runs_within, steps_of
from router.nodes.message_sender import MessageSender
from router.nodes.operator_orders import OperatorOrders
from router.nodes.registration import RegistrationRules
from router.nodes.registry import Node, NodeRegistry
from router.process.freed_memory import FreedMemory

SWEEP_INTERVAL = 0.25
# Probes that may be postponed while messages wait to be read: a flood must not hide a dead node for more than a second.
MAX_POSTPONED = 50
PEER_CUT_OFF = "disconnected a peer that sends invalid frames"  # log event
TOO_MANY_BAD_FRAMES = "it sent too many invalid frames; the router's log lists them"
FRAMES_PER_TURN = 200  # read in one turn of the event loop
# The pipe of a dead peer disappears a moment after the event, and later on a busy host.
PROBE_PAUSES = (0.02, 0.3, 0.4, 2.0)


class ControlPlane:
    """Owns the control socket. It is built before the registry and the dispatcher, which send through it."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        address: str,
        incarnation: str,
        security: LinkSecurity,
        log: Log,
        queued_bytes: int,
        rules: RegistrationRules,
    ) -> None:
        """`queued_bytes`: the most bytes that may be queued for one node."""
        self._socket = RouterSocket(context, address, security, queued_bytes)
        self._disconnects = self._socket.disconnects
        self._incarnation = incarnation
        self._log = log
        self.rules = rules
        self._registry: NodeRegistry
        self._orders: OperatorOrders
        self._attempts: AttemptMessages
        self._sweeper: asyncio.Task[None] | None = None
        self._swept: Callable[[], None]
        self._closed = False
        self._probes_due = False
        self._look_due = False
        # (routing id, frame or the remaining runs of one): read already, handled in a later turn
        self._unhandled: deque[tuple[bytes, bytes | list[TokenRun]]] = deque()
        self._postponed = 0
        self._unreachable: set[str] = set()  # incarnations that the last probe could not reach
        self._refused_nodes = BoundedLog(log, "refused a node")
        self.freed_memory = FreedMemory()
        self.refused_messages = 0
        self._refused = 0  # bad frames of the socket that are counted in it
        self.address = self._socket.address
        self._local = self.address.startswith("ipc://")  # such a connection closes only when its process ends

    def start(
        self,
        nodes: NodeRegistry,
        attempts: AttemptMessages,
        orders: OperatorOrders,
        swept: Callable[[], None],
    ) -> None:
        """Start to listen on the running event loop. `swept` is called after each sweep over the nodes."""
        self._swept = swept
        self._registry = nodes
        self._attempts = attempts
        self._orders = orders
        loop = asyncio.get_running_loop()
        loop.add_reader(self._socket.fileno(), self._read, True)
        loop.add_reader(self._disconnects.fileno(), self._on_disconnect)
        self._sweeper = loop.create_task(self._sweep())
        self._read()
        # The monitor's edge-triggered descriptor signals only after a read that found it empty.
        self._on_disconnect()

    @property
    def socket(self) -> RouterSocket:
        """The socket to which all nodes are connected."""
        return self._socket

    def close(self) -> None:
        self._closed = True
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._socket.fileno())
        loop.remove_reader(self._disconnects.fileno())
        if self._sweeper is not None:
            self._sweeper.cancel()
        self._socket.close()

    def send(self, peer: str, message: msgspec.Struct) -> bool:
        """Send `message` to the node with this routing id; return False if it cannot be reached."""
        if self._closed:
            return False
        sent = self._socket.send(peer.encode(), encode(message))
        # Sending may consume a readable edge.
        self._look_soon()
        return sent

    def send_all(self, peer: str, messages: Sequence[msgspec.Struct]) -> int:
        """Send messages to the node with this routing id, small ones in common frames; return how many were sent."""
        if self._closed:
            return 0
        address = peer.encode()
        self._look_soon()
        sent = 0
        encoded = list(map(encode, messages))
        for payloads in packs(encoded) if len(encoded) > 1 else (encoded,):
            if not self._socket.send_all(address, payloads):
                break
            sent += len(payloads)
        return sent

    def announce_loss(self, node: Node) -> None:
        """Tell the nodes of the other role that a peer is lost."""
        self._socket.forget(node.routing_id.encode())
        self._unreachable.discard(node.incarnation)
        for other in self._registry:
            if other.role != node.role:
                self.send(other.routing_id, PeerLost(incarnation=node.incarnation))

    def _look_soon(self) -> None:
        """Schedule a read in a later turn of the loop, so that a flood of messages does not starve other tasks."""
        if not self._look_due:
            self._look_due = True
            asyncio.get_running_loop().call_soon(self._look)

    def _look(self) -> None:
        self._look_due = False
        if self._closed or not (self._unhandled or self._socket.has_work()):
            return
        self._read()

    def _read(self, signalled: bool = False) -> None:
        """Read now, unless a look is due anyway: two in one turn would do twice what one turn should.

        `signalled`: the socket's descriptor has just become readable.
        """
        # A read was scheduled before `close`.
        if self._closed or self._look_due:
            return
        if not self._unhandled:
            self._unhandled.extend(self._socket.drain(FRAMES_PER_TURN, signalled))
        self._handle_some()
        refused = self._socket.bad.total
        if refused != self._refused:
            self.refused_messages += refused - self._refused
            self._refused = refused
            for peer in self._socket.take_cut_off():
                self._cut_off(peer)
        if self._unhandled or self._socket.more:
            # The descriptor is edge-triggered: read until it is empty.
            self._look_soon()

    def _handle_some(self) -> None:
        """Handle read messages in order, but no more of them than one turn of the loop should take."""
        left = STEPS_PER_TURN
        while self._unhandled and left > 0:
            identity, read = self._unhandled.popleft()
            try:
                sender = MessageSender.of(identity)
                node = self._registry.get(sender.incarnation)
                if node is not None and identity != node.control_link:
                    sender.check(node)
                message = self._decode(sender, read) if isinstance(read, bytes) else Tokens(runs=read)
                if message is None:
                    left -= 1
                elif isinstance(message, Tokens):
                    runs, steps = runs_within(message.runs, left)
                    self._attempts.on_runs(sender.incarnation, message.runs[:runs])
                    if len(message.runs) > runs:
                        self._unhandled.appendleft((identity, message.runs[runs:]))
                    left -= steps
                else:
                    self._on_message(sender, message, len(read))
                    left -= steps_of(message)
            except (ProtocolError, UnicodeDecodeError) as error:
                left -= 1
                self._socket.refuse(identity, str(error))

    def _decode(self, sender: MessageSender, frame: bytes) -> RouterMessage | None:
        """Return the message; None for a node of another version, which is refused. Raises ProtocolError."""
        try:
            return codec.decode(frame)
        except ProtocolError:
            refusal = undecodable_version(frame, Register.__name__, sender.name)
            if refusal is None:
                raise
            self._answer_registration(sender, sender.name, refusal)
            return None

    def _cut_off(self, peer: str) -> None:
        """Lose a peer that sent too many bad frames: the name of a key, a process, or one link of a process."""
        self._log.error(PEER_CUT_OFF, peer=peer)
        for node in self._registry:
            process = f"{node.name}/{node.incarnation}"
            link = peer.removeprefix(f"{process}/")
            if peer in (node.name, process) or (link != peer and node.register.owns_link(link)):
                # A live process ends on this message; its supervisor starts it again with a new incarnation.
                self._socket.send(node.routing_id.encode(), encode(Rejected(reason=TOO_MANY_BAD_FRAMES)))
                self._registry.lose(node, "it sent too many invalid frames", "cut_off")

    def _on_message(self, sender: MessageSender, message: RouterMessage, nbytes: int) -> None:
        identity = sender.incarnation
        if isinstance(message, Heartbeat):
            if message.incarnation == identity:
                known = self._registry.heartbeat(message)
                answer = HeartbeatAck(
                    router_incarnation=self._incarnation, sequence=message.sequence, known=known
                )
                self._socket.datagram(sender.routing_id, encode(answer))
        elif isinstance(message, FirstToken):
            self._attempts.on_first_token(identity, message)
        elif isinstance(message, PromptScores):
            self._attempts.on_prompt_scores(identity, message)
        elif isinstance(message, HiddenStates):
            self._attempts.on_states(identity, message)
        elif isinstance(message, PrefillDone):
            self._attempts.on_prefill_done(identity, message)
        elif isinstance(message, Failed):
            self._attempts.on_failed(identity, message)
        elif isinstance(message, Register):
            self._on_register(sender, message, nbytes)
        elif isinstance(message, ProfileEnded | ChangeAnswered):
            self._orders.answered(identity, message)
        elif isinstance(message, Goodbye) and message.incarnation == identity:
            self._registry.leave(identity)

    def _on_register(self, sender: MessageSender, message: Register, nbytes: int) -> None:
        if message.link_id().encode() != sender.routing_id:
            raise ProtocolError("a node sent the registration of another node")
        try:
            checked = self.rules.check(message, nbytes)
            pattern = self.rules.pattern(message.node.name)
            if self._registry.undecided(checked, pattern):
                # No answer yet: the node asks again.
                return
            movable = self.rules.movable(message.node.name)
            refusal = self._registry.register(checked, pattern, movable)
        except HandshakeRefused as error:
            refusal = str(error)
        self._answer_registration(sender, message.node.name, refusal)

    def _answer_registration(self, sender: MessageSender, name: str, refusal: str | None) -> None:
        """`refusal`: the sentence that says why the node is refused; None if it is registered now."""
        answer: Registered | Rejected
        if refusal is None:
            self._socket.vouch_for(sender.routing_id)
            answer = Registered(
                router_incarnation=self._incarnation, protocol_version=CONTROL_PROTOCOL_VERSION
            )
        else:
            self._refused_nodes.warning(name, refusal)
            answer = Rejected(reason=refusal)
        self._socket.send(sender.routing_id, encode(answer))

    def _on_disconnect(self) -> None:
        """Probe all nodes to find out whose socket has closed. A dead process is found within milliseconds."""
        if not self._disconnects.take():
            return
        self.freed_memory.connection_ended()
        # At most one round of probes starts at a time, however often sockets close.
        if not self._probes_due:
            self._probes_due = True
            self._probe_after(PROBE_PAUSES)

    def _probe_after(self, pauses: tuple[float, ...]) -> None:
        """Schedule the probes one after the other: a stalled loop must not run them all at once."""
        if pauses:
            asyncio.get_running_loop().call_later(pauses[0], self._probe, pauses[1:])

    def _probe(self, later: tuple[float, ...]) -> None:
        if self._closed:
            return
        if self._unhandled or self._socket.has_work():
            # The last messages of a node that closed its socket may be among those that wait: read them first.
            self._look_soon()
            if self._postponed < MAX_POSTPONED:
                self._postponed += 1
                asyncio.get_running_loop().call_later(PROBE_PAUSES[0], self._probe, later)
                return
        self._postponed = 0
        if len(later) == len(PROBE_PAUSES) - 1:
            self._probes_due = False
        self._probe_after(later)
        for node in self._registry:
            if self._socket.reachable(node.routing_id.encode()):
                self._unreachable.discard(node.incarnation)
            elif node.incarnation in self._unreachable or self._local:
                self._registry.lose(node, "its socket closed", "closed")
            else:
                # A broken TCP connection is re-established within a moment: only the next probe decides.
                self._unreachable.add(node.incarnation)

    async def _sweep(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + SWEEP_INTERVAL
            await asyncio.sleep(SWEEP_INTERVAL)
            # A stall of this process or host must not count as silence of a node.
            late = max(loop.time() - due, 0.0)
            try:
                self._read()
                self._socket.flush_log()
                self._refused_nodes.flush()
                self._registry.sweep(late)
                self._swept()
                await self.freed_memory.give_back()
            except Exception:
                # A defect must not end the supervision of all nodes.
                self._log.exception("the sweep over the nodes failed; it runs again")
