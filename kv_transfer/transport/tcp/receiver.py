"""The receiving side of TCP: a listening socket, one I/O thread, and a fence around every page."""

from __future__ import annotations

import math
import mmap
import os
import secrets
import select
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable

from common.exhaustion import EXHAUSTED, RETRY_SECONDS
from common.kv_cache.pool_layout import PoolLayout
from kv_transfer.limits import TransferLimits
from kv_transfer.transport.base import ReceiverEndpoint, ReceiverSetup, Region, Window
from kv_transfer.transport.host_rows import scatter
from kv_transfer.transport.tcp import frames as tcp_frames
from kv_transfer.transport.tcp.frames import Frame, Violation
from kv_transfer.transport.tcp.keepalive import keep_alive
from kv_transfer.transport.tcp.kind import TcpDescription, TcpOptions
from kv_transfer.transport.tcp.listener import listening_socket
from kv_transfer.transport.tcp.windows import Windows

_STEP_BYTES = 1 << 20  # read at once under the lock: bounds how long `revoke` waits
MAX_PENDING = 64  # connections that have not proved a key yet
_MAX_UNSENT_ACKS = 1 << 20  # bytes; a peer that does not read its acks is dropped


class _Connection:
    """One accepted socket: challenge, proof, then frames."""

    def __init__(self, sock: socket.socket, now: float) -> None:
        self.sock = sock
        self.nonce = secrets.token_bytes(32)
        self.incarnation = ""  # empty until proved
        self.moved_at = now
        self.inbox = bytearray(max(tcp_frames.PROOF.size, tcp_frames.HEADER_BYTES))
        self.have = 0  # received bytes of the proof or header in `inbox`
        self.frame: Frame | None = None
        self.landed = 0  # payload bytes of `frame` read
        self.rows = bytearray()  # payload of a frame of several rows, until it is complete
        self.discard = False  # the frame's window was closed
        self.outbox = bytearray(tcp_frames.CHALLENGE.pack(tcp_frames.CHALLENGE_MAGIC, self.nonce))

    @property
    def idle(self) -> bool:
        """True while it is authenticated and between two frames, so that it may stay silent."""
        return bool(self.incarnation) and self.frame is None and self.have == 0 and not self.outbox


class TcpReceiver(ReceiverEndpoint):
    """Listens on host:port (0: any)."""

    kv: memoryview

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = 0,
        limits: TransferLimits | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.dropped: Counter[str] = Counter()  # connections by cause
        self._limits = limits or TransferLimits()
        self._clock = clock
        self._listener = listening_socket(host, port)
        self._host = host
        self._port = int(self._listener.getsockname()[1])
        self._windows = Windows()
        self._keys: dict[str, bytes] = {}  # incarnation -> key
        self._owners: dict[bytes, str] = {}  # id of a key -> incarnation
        self._connections: dict[int, _Connection] = {}  # by descriptor; I/O thread only
        self._scratch = bytearray(_STEP_BYTES)
        self._closing = False
        self._thread: threading.Thread | None = None
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poller = select.poll()
        self._accepts_from = -math.inf  # by the clock; later after descriptors have run out

    # ---- the node's thread

    def allocate(self, region: Region, nbytes: int) -> memoryview:
        view = memoryview(mmap.mmap(-1, max(1, nbytes)))
        if region is Region.KV:
            self.kv = view
        else:
            self.records = view
        return view

    def open(self, layout: PoolLayout, record_bytes: int) -> None:
        super().open(layout, record_bytes)
        self._windows.use(layout, record_bytes)
        self._thread = threading.Thread(target=self._run, name="kv-tcp-receive", daemon=True)
        self._thread.start()

    def describe(self, incarnation: str) -> TcpDescription:
        key = self._keys.get(incarnation) or secrets.token_bytes(tcp_frames.KEY_BYTES)
        self._keys[incarnation] = key
        self._owners[tcp_frames.key_id(key)] = incarnation
        return TcpDescription(self._host, self._port, key)

    def expel(self, incarnation: str) -> None:
        key = self._keys.pop(incarnation, None)
        if key is not None:
            del self._owners[tcp_frames.key_id(key)]
        self._windows.revoke_all_of(incarnation)
        self.nudge()  # the I/O thread closes connections that have no key

    def announce(self, window: Window) -> None:
        self._windows.announce(window)

    def revoke(self, generation: int) -> bool:
        self._windows.revoke(generation)
        return True

    def peer_is_dead(self, incarnation: str) -> bool:
        """Return True for an expelled peer, which has no key, no window and no connection."""
        return incarnation not in self._keys

    def close(self) -> None:
        if self._closing:
            return
        self._closing = True
        if self._thread is not None:
            self.nudge()
            self._thread.join()
        self._listener.close()
        os.close(self._wake)

    def nudge(self) -> None:
        os.eventfd_write(self._wake, 1)

    # ---- the I/O thread

    def _run(self) -> None:
        poller = self._poller
        poller.register(self._wake, select.POLLIN)
        while not self._closing:
            if self._clock() >= self._accepts_from:
                poller.register(self._listener, select.POLLIN)
            for fd, events in poller.poll(200):
                if fd == self._wake:
                    os.eventfd_read(self._wake)
                elif fd == self._listener.fileno():
                    self._accept()
                elif fd in self._connections:
                    self._serve(self._connections[fd], events)
            self._drop_overdue()
        for connection in list(self._connections.values()):
            self._drop(connection, "shutdown")

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError as error:
            if error.errno in EXHAUSTED:
                self._poller.unregister(self._listener)
                self._accepts_from = self._clock() + RETRY_SECONDS
            return
        pending = [each for each in self._connections.values() if not each.incarnation]
        if len(pending) >= MAX_PENDING:
            # The oldest has had time for its proof, and a peer that connects during a flood of others gets time too.
            self._drop(pending[0], "full")
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        keep_alive(sock)
        connection = _Connection(sock, self._clock())
        self._connections[sock.fileno()] = connection
        self._poller.register(sock, select.POLLIN | select.POLLOUT)

    def _serve(self, connection: _Connection, events: int) -> None:
        try:
            if events & (select.POLLIN | select.POLLHUP | select.POLLERR):
                self._read(connection)
            if connection.outbox:
                self._write(connection)
            wanted = select.POLLIN | (select.POLLOUT if connection.outbox else 0)
            self._poller.modify(connection.sock, wanted)
        except Violation as error:
            self._drop(connection, error.cause)
        except OSError:
            self._drop(connection, "lost")

    def _read(self, connection: _Connection) -> None:
        """Read a bounded amount, so that no connection starves the others. Raises Violation, OSError."""
        for _ in range(64):
            need = tcp_frames.HEADER_BYTES if connection.incarnation else tcp_frames.PROOF.size
            try:
                if connection.frame is not None:
                    got = self._read_payload(connection, connection.frame)
                else:
                    got = connection.sock.recv_into(memoryview(connection.inbox)[connection.have : need])
                    connection.have += got
            except BlockingIOError:
                return
            if not got:
                cause = "truncated" if connection.frame or connection.have else "closed"
                raise Violation(cause, "the peer closed the connection")
            connection.moved_at = self._clock()
            if connection.frame is not None:
                if connection.landed == connection.frame.nbytes:
                    self._acknowledge(connection, connection.frame)
            elif connection.have == need:
                data = bytes(connection.inbox[:need])
                connection.have = 0
                if connection.incarnation:
                    self._begin(connection, data)
                else:
                    self._authenticate(connection, data)
            if got >= _STEP_BYTES:
                return

    def _begin(self, connection: _Connection, header: bytes) -> None:
        frame = tcp_frames.unpack(header, self._limits.max_frame_bytes)
        connection.discard = not self._windows.admits(frame, connection.incarnation)
        connection.frame, connection.landed = frame, 0
        if frame.rows > 1 and not connection.discard:
            connection.rows = bytearray(frame.nbytes)

    def _read_payload(self, connection: _Connection, frame: Frame) -> int:
        left = min(frame.nbytes - connection.landed, _STEP_BYTES)
        if frame.rows > 1 and not connection.discard:
            return self._read_rows(connection, frame, left)
        if not connection.discard:
            region = self.kv if frame.region is Region.KV else self.records
            start = frame.offset + connection.landed
            view = region[start : start + left]
            got = self._windows.land(frame.generation, lambda: connection.sock.recv_into(view))
            if got is not None:
                connection.landed += got
                return got
            connection.discard = True
        got = connection.sock.recv_into(memoryview(self._scratch)[:left])
        connection.landed += got
        return got

    def _read_rows(self, connection: _Connection, frame: Frame, left: int) -> int:
        """Read part of a frame of several rows, which land together once all have arrived."""
        view = memoryview(connection.rows)[connection.landed : connection.landed + left]
        got = connection.sock.recv_into(view)
        connection.landed += got
        if connection.landed == frame.nbytes:
            region = self.kv if frame.region is Region.KV else self.records
            rows, connection.rows = connection.rows, bytearray()

            def land() -> int:
                scatter(region, frame.offset, frame.length, frame.rows, frame.stride, rows)
                return got

            connection.discard = self._windows.land(frame.generation, land) is None
        return got

    def _acknowledge(self, connection: _Connection, frame: Frame) -> None:
        status = tcp_frames.REVOKED if connection.discard else tcp_frames.LANDED
        connection.outbox += tcp_frames.ACK.pack(tcp_frames.ACK_MAGIC, status, frame.nbytes)
        connection.frame = None
        if len(connection.outbox) > _MAX_UNSENT_ACKS:
            raise Violation("acks_unread", "the peer does not read its acks")

    def _authenticate(self, connection: _Connection, answer: bytes) -> None:
        _, who, _ = tcp_frames.PROOF.unpack(answer)
        incarnation = self._owners.get(who, "")
        key = self._keys.get(incarnation, b"") or secrets.token_bytes(tcp_frames.KEY_BYTES)
        if not tcp_frames.proves(answer, key, connection.nonce):
            raise Violation("proof", "the peer does not know the key")
        for other in list(self._connections.values()):
            if other.incarnation == incarnation:
                self._drop(other, "replaced")
        connection.incarnation = incarnation

    def _write(self, connection: _Connection) -> None:
        try:
            sent = connection.sock.send(connection.outbox)
        except BlockingIOError:
            return
        del connection.outbox[:sent]
        connection.moved_at = self._clock()

    def _drop_overdue(self) -> None:
        now = self._clock()
        for connection in list(self._connections.values()):
            waited = now - connection.moved_at
            if connection.incarnation and connection.incarnation not in self._keys:
                self._drop(connection, "expelled")
            elif not connection.incarnation and waited >= self._limits.handshake_timeout:
                self._drop(connection, "silent")
            elif connection.incarnation and not connection.idle and waited >= self._limits.stall_timeout:
                self._drop(connection, "stalled")

    def _drop(self, connection: _Connection, cause: str) -> None:
        self.dropped[cause] += 1
        self._poller.unregister(connection.sock)
        del self._connections[connection.sock.fileno()]
        connection.sock.close()


def make_receiver(setup: ReceiverSetup[TcpOptions]) -> TcpReceiver:
    limits = setup.limits.with_inflight(setup.options.max_inflight_mib)
    return TcpReceiver(setup.host, setup.port, limits)
