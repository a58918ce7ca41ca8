"""The sending side of TCP: one connection and one thread per decode node, opened at the first write."""

from __future__ import annotations

import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from common.errors import ProtocolError
from kv_transfer.copy_plan import Copy
from kv_transfer.limits import TransferLimits
from kv_transfer.transport.base import (
    PeerMemory,
    Region,
    SenderEndpoint,
    SenderSetup,
    Target,
    Ticket,
    WriteState,
)
from kv_transfer.transport.host_rows import gather
from kv_transfer.transport.tcp import frames as tcp_frames
from kv_transfer.transport.tcp.keepalive import keep_alive
from kv_transfer.transport.tcp.kind import TcpDescription, TcpOptions

_BATCH_BYTES = 1 << 20  # handed to the kernel in one call
_BATCH_PARTS = 64  # well below IOV_MAX


@dataclass(slots=True, eq=False)
class _Write(Ticket):
    """One `write`; the connection's thread takes pieces from the front."""

    peer: TcpPeer
    region: Region
    generation: int
    source: memoryview
    pieces: deque[Copy]
    unacked: int = 0  # frames in flight
    refused: bool = False  # a frame was discarded by the receiver or never sent
    state: WriteState = WriteState.PENDING


class TcpPeer(PeerMemory):
    """Queue to one decode node: the node's thread fills it, the connection's thread empties it."""

    def __init__(
        self,
        target: Target,
        description: TcpDescription,
        limits: TransferLimits,
        clock: Callable[[], float],
    ) -> None:
        super().__init__(target)
        self.moved = 0  # bytes acknowledged
        self.last_error = ""  # why the latest connection ended
        self._description = description
        self._limits = limits
        self._clock = clock
        self._lock = threading.Lock()
        self._queue: deque[_Write] = deque()  # writes with unsent pieces
        # frames sent and not acknowledged, with their bytes
        self._inflight: deque[tuple[_Write, int]] = deque()
        self._flying = 0  # bytes in flight
        self._closing = False
        self._connected = False
        self._thread: threading.Thread | None = None
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def post(self, write: _Write) -> None:
        with self._lock:
            if self._closing:
                write.state = WriteState.FAILED
                return
            if not write.pieces:
                write.state = WriteState.DONE
                return
            self._queue.append(write)
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="kv-tcp-send", daemon=True)
                try:
                    thread.start()
                # Too many threads: a later write tries again.
                except RuntimeError as error:
                    self.last_error = str(error)
                    self._fail_all()
                    return
                self._thread = thread
        os.eventfd_write(self._wake, 1)

    def cancel(self, write: _Write) -> None:
        with self._lock:
            if write.state is WriteState.PENDING and write.pieces:
                write.pieces.clear()
                write.refused = True
                self._settle(write)

    def close(self) -> None:
        with self._lock:
            if self._closing:
                return
            self._closing = True
            thread = self._thread
            if thread is None:
                os.close(self._wake)
            elif self._connected:
                os.eventfd_write(self._wake, 1)
        if thread is not None and self._connected:
            thread.join()  # returns at once: the thread neither blocks nor sleeps without watching `_wake`
        with self._lock:
            self._fail_all()  # a thread that is still connecting will find nothing to send

    # ---- the connection's thread

    def _run(self) -> None:
        """Serve the queue over one connection; when it ends, every posted write has settled."""
        reason = ""
        try:
            with self._connect() as sock:
                self._pump(sock)
        except (OSError, ProtocolError) as error:
            reason = f"{self._description.host}:{self._description.port}: {error}"
        finally:
            with self._lock:
                self.last_error = reason
                self._thread, self._connected = None, False
                self._fail_all()
                if self._closing:
                    os.close(self._wake)

    def _connect(self) -> socket.socket:
        where, timeout = (self._description.host, self._description.port), self._limits.handshake_timeout
        sock = socket.create_connection(where, timeout=timeout)
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            keep_alive(sock)
            challenge = b""
            until = time.monotonic() + timeout
            while len(challenge) < tcp_frames.CHALLENGE.size:
                if time.monotonic() >= until or self._closing:
                    raise TimeoutError("the decode node sent no challenge in time")
                part = sock.recv(tcp_frames.CHALLENGE.size - len(challenge))
                if not part:
                    raise ProtocolError("the decode node closed the connection")
                challenge += part
            magic, nonce = tcp_frames.CHALLENGE.unpack(challenge)
            if magic != tcp_frames.CHALLENGE_MAGIC:
                raise ProtocolError("the listener at this address is not a decode node")
            sock.sendall(tcp_frames.proof(self._description.key, nonce))
            sock.setblocking(False)
        except BaseException:
            sock.close()
            raise
        return sock

    def _pump(self, sock: socket.socket) -> None:
        with self._lock:
            self._connected = True
        out: deque[memoryview] = deque()
        acks = bytearray()
        moved_at = self._clock()
        poller = select.poll()
        poller.register(self._wake, select.POLLIN)
        while not self._closing:
            busy = bool(out) or bool(self._inflight)
            if not out:
                self._take(out)
                moved_at = moved_at if busy else self._clock()
            poller.register(sock, select.POLLIN | (select.POLLOUT if out else 0))
            ready = dict(poller.poll(500))
            if self._wake in ready:
                os.eventfd_read(self._wake)
            events = ready.get(sock.fileno(), 0)
            before = self.moved
            if events & select.POLLOUT and self._send(sock, out):
                moved_at = self._clock()
            if events & (select.POLLIN | select.POLLHUP | select.POLLERR):
                self._receive(sock, acks)
            if self.moved != before:
                moved_at = self._clock()
            if (out or self._inflight) and self._clock() - moved_at >= self._limits.stall_timeout:
                raise TimeoutError(f"no progress for {self._limits.stall_timeout:g} s")

    def _take(self, out: deque[memoryview]) -> None:
        """Turn queued pieces into frames, as many as the limits allow."""
        with self._lock:
            batch = 0
            while self._queue and batch < _BATCH_BYTES and len(out) < _BATCH_PARTS:
                write = self._queue[0]
                if not write.pieces:
                    self._queue.popleft()
                    continue
                piece = write.pieces[0]
                if self._inflight and self._flying + piece.nbytes > self._limits.max_inflight_bytes:
                    return
                write.pieces.popleft()
                header = tcp_frames.pack(
                    tcp_frames.Frame(
                        write.region, write.generation, piece.dst, piece.length, piece.rows, piece.dst_stride
                    )
                )
                out.append(memoryview(header))
                out.append(gather(write.source, piece.src, piece.length, piece.rows, piece.src_stride))
                write.unacked += 1
                self._inflight.append((write, piece.nbytes))
                self._flying += piece.nbytes
                batch += piece.nbytes

    @staticmethod
    def _send(sock: socket.socket, out: deque[memoryview]) -> int:
        try:
            sent = total = sock.sendmsg(out)
        except BlockingIOError:
            return 0
        while sent:
            head = out[0]
            if sent < head.nbytes:
                out[0] = head[sent:]
                break
            sent -= head.nbytes
            out.popleft()
        return total

    def _receive(self, sock: socket.socket, acks: bytearray) -> None:
        try:
            data = sock.recv(1 << 16)
        except BlockingIOError:
            return
        if not data:
            raise ProtocolError("the decode node closed the connection")
        acks += data
        with self._lock:
            whole = len(acks) // tcp_frames.ACK.size * tcp_frames.ACK.size
            for magic, status, length in tcp_frames.ACK.iter_unpack(bytes(acks[:whole])):
                if magic != tcp_frames.ACK_MAGIC or not self._inflight or self._inflight[0][1] != length:
                    raise ProtocolError("the decode node acknowledged a frame that was not sent")
                write, _ = self._inflight.popleft()
                write.unacked -= 1
                write.refused |= status != tcp_frames.LANDED
                self.moved += length
                self._flying -= length
                self._settle(write)
            del acks[:whole]

    def _settle(self, write: _Write) -> None:
        if not write.pieces and not write.unacked and write.state is WriteState.PENDING:
            write.state = WriteState.FAILED if write.refused else WriteState.DONE

    def _fail_all(self) -> None:
        for write in (*self._queue, *(write for write, _ in self._inflight)):
            if write.state is WriteState.PENDING:
                write.state = WriteState.FAILED
        self._queue.clear()
        self._inflight.clear()
        self._flying = 0


class TcpSender(SenderEndpoint):
    """Writes to decode nodes over one connection each."""

    takes = TcpDescription

    def __init__(self, limits: TransferLimits, clock: Callable[[], float] = time.monotonic) -> None:
        self._limits = limits
        self._clock = clock
        self._peers: list[TcpPeer] = []

    def attach(self, target: Target) -> PeerMemory:
        assert isinstance(target.description, TcpDescription)
        peer = TcpPeer(target, target.description, self._limits, self._clock)
        self._peers.append(peer)
        return peer

    def write(self, peer: PeerMemory, copies: Sequence[Copy], generation: int) -> Ticket:
        assert isinstance(peer, TcpPeer)
        pieces = deque(tcp_frames.split(copies, self._limits.max_frame_bytes))
        write = _Write(peer, Region.KV, generation, self.kv, pieces)
        peer.post(write)
        return write

    def write_record(self, peer: PeerMemory, offset: int, data: bytes, generation: int) -> Ticket:
        assert isinstance(peer, TcpPeer)
        pieces = deque(tcp_frames.split([Copy(0, offset, len(data))], self._limits.max_frame_bytes))
        write = _Write(peer, Region.RECORDS, generation, memoryview(data), pieces)
        peer.post(write)
        return write

    def poll(self, ticket: Ticket) -> WriteState:
        assert isinstance(ticket, _Write)
        return ticket.state

    def cancel(self, ticket: Ticket) -> None:
        assert isinstance(ticket, _Write)
        ticket.peer.cancel(ticket)

    def progress(self, peer: PeerMemory) -> int:
        assert isinstance(peer, TcpPeer)
        return peer.moved

    def last_error(self, peer: PeerMemory) -> str:
        assert isinstance(peer, TcpPeer)
        return peer.last_error

    def detach(self, peer: PeerMemory) -> None:
        assert isinstance(peer, TcpPeer)
        peer.close()
        if peer in self._peers:
            self._peers.remove(peer)

    def close(self) -> None:
        for peer in list(self._peers):
            self.detach(peer)


def make_sender(setup: SenderSetup[TcpOptions]) -> TcpSender:
    limits = setup.limits.with_inflight(setup.options.max_inflight_mib)
    return TcpSender(limits)
