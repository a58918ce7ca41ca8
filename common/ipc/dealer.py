"""The connecting socket: a session with one peer over connections that are re-established whenever they break."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Sequence

import zmq

from common.errors import ConfigError, ProtocolError
from common.ipc.channel import DRAIN_LIMIT, HIGH_WATER_MARK, MAX_MESSAGE_BYTES, QUEUED_BYTES, Channel, as_part
from common.ipc.connection_watch import ConnectionWatch
from common.ipc.curve import LinkSecurity, Plain, is_ipv6, is_tcp
from common.ipc.host_lookup import Host, host_of
from common.ipc.routes import dial_id
from common.ipc.session import PACK, Frame, FrameKind, Session, read_header, unpack
from common.ipc.silence_watch import SilenceWatch

REDIAL_SECONDS = 0.75  # without a connection, after which it is dialled again
SILENCE_SECONDS = 3.0  # without an answer of the peer, after which its connection is dialled again


class Dealer(Channel):
    """A connected socket with one peer; it reconnects by itself."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        address: str | Host,
        identity: bytes,
        server: str = "",
        security: LinkSecurity | None = None,
        received: int = HIGH_WATER_MARK,
        opens: bool = True,
        silence: float | None = None,
    ) -> None:
        """`server` is the process at `address`, whose key is checked; at most `received` messages wait here.

        Without `opens` there are only datagrams. A TCP connection on which an answer is missing for `silence` seconds
        (default: SILENCE_SECONDS) is dialled again. The name of a host is looked up for each dial. Raises ConfigError,
        and zmq.ZMQError if the process has run out of descriptors.
        """
        super().__init__(context, zmq.DEALER, received)
        # How often the peer was another process or had forgotten this one; unacknowledged messages were dropped each
        # time.
        self.resets = 0
        self.dials = 0  # how often a connection was begun
        self.damaged = 0  # frames that do not belong to a session or whose digest is wrong
        self._opens = opens
        self._host = host_of(address) if isinstance(address, str) else address
        address = self._host.text
        self._dialled: str | None = None  # the address of the latest dial; None while the host's is not known
        self._identity = identity
        self._dialled_at = self.clock()
        self._silence = SilenceWatch(silence or SILENCE_SECONDS, self.clock()) if is_tcp(address) else None
        self._session = self._new_session()
        try:
            self._watch = ConnectionWatch(self._socket, address, self.clock())
        except zmq.ZMQError:
            super().close()
            raise
        try:
            (security or Plain()).secure_client(self._socket, address, server)
            self._socket.setsockopt(zmq.RECONNECT_IVL, 50)
            self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1_000)
            self._dial()
        except ConfigError:
            self.close()
            raise
        except zmq.ZMQError as error:
            self.close()
            raise ConfigError("", f"cannot connect to {address}: {error.strerror or error}") from error
        self._tend(self.clock())

    def send(self, payload: bytes) -> bool:
        """Send now, or when there is a connection. Returns False if too much is waiting."""
        if len(payload) > MAX_MESSAGE_BYTES:
            return False
        frame = self._session.keep(payload, self.clock())
        if frame is None:
            return False
        self._send_frame(frame)
        return True

    def datagram(self, payload: bytes) -> bool:
        """Send once, without any guarantee of delivery."""
        return len(payload) <= MAX_MESSAGE_BYTES and self._ask((payload,))

    def disconnected_for(self) -> float:
        """Return the seconds since there was a connection; 0 while there is one."""
        now = self.clock()
        self._look_at_connection(now)
        return self._watch.disconnected_for(now)

    @property
    def at(self) -> str:
        """The configured address, and the one that was dialled for it last."""
        text = self._host.text
        return text if self._dialled in (None, text) else f"{text} ({self._dialled})"

    def trouble(self) -> str:
        """Say why there is no connection; empty while there is one."""
        if self.disconnected_for() == 0.0:
            return ""
        if self._dialled is None:
            return self._host.problem
        if self._watch.met:
            return (
                "connections are accepted and ended before their handshake is over: check what listens there, and that "
                "both have the keys of one cluster"
            )
        return "nobody accepts a connection there"

    @property
    def idle(self) -> bool:
        """True if no frame waits for an acknowledgement, sent or received."""
        return self._session.idle

    @property
    def awaits_answer(self) -> bool:
        """True if the peer of a TCP connection owes an answer, which bounds its silence."""
        return self._silence is not None and self._silence.awaits_answer

    def drain(self, most: int = DRAIN_LIMIT) -> list[bytes]:
        """Return the messages that have arrived, from at most `most` frames; bad frames are counted and dropped."""
        messages: list[bytes] = []
        read = 0
        while not messages and read < most:
            now = self.clock()
            self._look_at_connection(now)
            self._tend(now)
            received = self._receive(most)
            self._listen(bool(received), now)
            if not received:
                break
            read += len(received)
            for parts in received:
                if len(parts) == 1:
                    messages.append(parts[0])
                elif len(parts) == 2:
                    messages += self._take(parts[0], parts[1], now)
                else:
                    self.damaged += 1
        return messages

    def close(self) -> None:
        self._watch.close()
        super().close()

    def _take(self, header: bytes, payload: bytes, now: float) -> Sequence[bytes]:
        """Process a frame; return the messages that it delivers."""
        try:
            head = read_header(header, payload)
            if head.epoch != self._session.epoch:
                return ()
            if head.kind is not FrameKind.RESET and self._session.continues(head):
                delivered = self._session.receive(head, payload, now)
                if delivered is None:
                    return ()
                return unpack(delivered) if head.kind == PACK else (delivered,)
        except ProtocolError:
            self.damaged += 1
            return ()
        # The peer has forgotten this session; or, until it is established, not received OPEN, which is repeated.
        if self._session.established:
            self.resets += 1
            self._session = self._new_session()
        return ()

    def _look_at_connection(self, now: float) -> None:
        if self._watch.reconnected(now) and self._opens:
            self._send_frame(self._session.probe(now))
        if self._dialled is None and now - self._dialled_at <= REDIAL_SECONDS:
            self._dial()
        elif self._watch.disconnected_for(now) > REDIAL_SECONDS and now - self._dialled_at > REDIAL_SECONDS:
            self._redial(now)

    def _listen(self, heard: bool, now: float) -> None:
        """Probe a silent peer, and dial again if it does not answer: a connection may break without an error."""
        if self._silence is None:
            return
        if heard:
            self._silence.heard(now)
        elif self._silence.too_long(now):
            self._redial(now)
        elif self._opens and self._silence.should_ask(now):
            self._send_frame(self._session.probe(now))

    def _redial(self, now: float) -> None:
        """Dial again.

        ZMQ reconnects after a network error by itself, but not after bytes that it cannot parse, nor while it has not
        noticed the error.
        """
        self._dialled_at = now
        if self._dialled is not None:
            with contextlib.suppress(zmq.ZMQError):  # ENOENT: ZMQ has given the connection up
                self._socket.disconnect(self._dialled)
        # Its result serves the next dial, if the peer has moved.
        self._host.ask()
        self._dial()

    def _dial(self) -> None:
        """Connect under a new routing id: the listener may not know yet that an earlier connection has ended."""
        address = self._host.next()
        if address is None:
            # Asked again with every look at the connection.
            return
        self.dials += 1
        self._dialled = address
        self._socket.setsockopt(zmq.IDENTITY, dial_id(self._identity))
        self._socket.setsockopt(zmq.IPV6, is_ipv6(address))
        self._socket.connect(address)

    def _tend(self, now: float) -> None:
        if self._opens:
            for frame in self._session.due(now):
                if not self._send_frame(frame):
                    break

    def _send_frame(self, frame: Frame) -> bool:
        header, payload = frame
        parts = (header, as_part(payload))
        return self._send(parts) if header[0] == FrameKind.ACK else self._ask(parts)  # nobody answers an ACK

    def _ask(self, frames: Sequence[bytes | zmq.Frame]) -> bool:
        if self._silence is not None:
            self._silence.asked(self.clock())
        return self._send(frames)

    def _new_session(self) -> Session:
        return Session(secrets.randbits(64), 0, HIGH_WATER_MARK, QUEUED_BYTES, self.clock())
