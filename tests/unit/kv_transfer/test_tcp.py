"""TCP's fence, key, bounds and time limits hold against raw connections and between real endpoints."""

from __future__ import annotations

import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import msgspec
import pytest

from common.exhaustion import RETRY_SECONDS
from kv_transfer.copy_plan import Copy
from kv_transfer.transport.base import PeerMemory, Region, Target, Ticket, Window, WriteState
from kv_transfer.transport.tcp import frames as tcp_frames
from kv_transfer.transport.tcp.frames import Frame
from kv_transfer.transport.tcp.keepalive import IDLE_SECONDS
from kv_transfer.transport.tcp.kind import TcpDescription
from kv_transfer.transport.tcp.receiver import TcpReceiver
from kv_transfer.transport.tcp.sender import TcpSender
from tests.fakes.exhausted_listener import ExhaustedListener
from tests.fakes.ipv6 import needs_ipv6
from tests.fakes.pools import layers_layout
from tests.fakes.waiting import PATIENCE, until
from tests.fakes.wire import Wire
from tests.unit.kv_transfer.rig import LIMITS, Clock, noise

LAYOUT = layers_layout("m", "float32", 2, 8, [(2, 4)])
PAGE = LAYOUT.planes[0].page_bytes
SMALL = msgspec.structs.replace(LIMITS, max_frame_bytes=1 << 16)
PEER = "0a" * 16


@pytest.fixture
def clock() -> Clock:
    """Return the receiver's clock, which stands still, so that nobody is too slow for it."""
    return Clock()


@pytest.fixture
def receiver(clock: Clock) -> Iterator[TcpReceiver]:
    made = TcpReceiver("127.0.0.1", 0, SMALL, clock=clock)
    made.allocate(Region.KV, LAYOUT.total_bytes)
    made.allocate(Region.RECORDS, 4 * 64)
    made.open(LAYOUT, 64)
    yield made
    made.close()


@pytest.fixture
def sender() -> Iterator[TcpSender]:
    made = TcpSender(SMALL, Clock())
    made.register(LAYOUT, memoryview(noise(LAYOUT.total_bytes)))
    yield made
    made.close()


def description(receiver: TcpReceiver, peer: str = PEER) -> TcpDescription:
    made = receiver.describe(peer)
    assert isinstance(made, TcpDescription)
    return made


def passed(clock: Clock, seconds: float) -> bool:
    """Advance the clock repeatedly while a test waits: the other thread may read the time just after an advance."""
    clock.now += seconds
    return True


def attach(sender: TcpSender, receiver: TcpReceiver) -> PeerMemory:
    return sender.attach(Target("0b" * 16, description(receiver), LAYOUT.total_bytes, 256))


def settle(sender: TcpSender, ticket: Ticket) -> WriteState:
    until(lambda: sender.poll(ticket) is not WriteState.PENDING)
    return sender.poll(ticket)


class Raw:
    """A raw connection."""

    def __init__(self, receiver: TcpReceiver, key: bytes | None = None) -> None:
        where = description(receiver)
        self.sock = socket.create_connection((where.host, where.port), timeout=PATIENCE)
        self.nonce = self.read(tcp_frames.CHALLENGE.size)[4:]
        if key is not None:
            self.sock.sendall(tcp_frames.proof(key, self.nonce))

    def read(self, nbytes: int) -> bytes:
        data = b""
        while len(data) < nbytes:
            part = self.sock.recv(nbytes - len(data))
            if not part:
                break
            data += part
        return data

    @property
    def closed(self) -> bool:
        """Return True once the other side has closed, whatever it sent before."""
        try:
            while self.sock.recv(1000):
                pass
        except ConnectionError:
            pass
        return True


@pytest.fixture
def raw(receiver: TcpReceiver) -> Iterator[Callable[..., Raw]]:
    made: list[Raw] = []

    def connect(**kw: bytes) -> Raw:
        made.append(Raw(receiver, **kw))
        return made[-1]

    yield connect
    for each in made:
        each.sock.close()


def proved(raw: Callable[..., Raw], receiver: TcpReceiver) -> Raw:
    return raw(key=description(receiver).key)


def frame(offset: int, data: bytes, generation: int = 1, region: Region = Region.KV) -> bytes:
    return tcp_frames.pack(Frame(region, generation, offset, len(data))) + data


def rows(offset: int, rows: int, length: int, stride: int) -> bytes:
    """Return a frame of several rows, whose bytes are all 0x55."""
    return tcp_frames.pack(Frame(Region.KV, 1, offset, length, rows, stride)) + b"\x55" * (rows * length)


def announce(
    receiver: TcpReceiver, *pages: int, generation: int = 1, peer: str = PEER, slot: int = 0
) -> None:
    receiver.announce(Window(generation, peer, frozenset(pages), slot))


def test_writes_land_in_order_and_are_reported_done(receiver: TcpReceiver, sender: TcpSender) -> None:
    peer = attach(sender, receiver)
    announce(receiver, 2, 3, slot=1)
    v = LAYOUT.planes[1].offset
    pages = sender.write(peer, [Copy(0, 2 * PAGE, 2 * PAGE), Copy(v + PAGE, v + 3 * PAGE, PAGE)], 1)
    record = sender.write_record(peer, 64, b"r" * 64, 1)
    assert settle(sender, record) is WriteState.DONE
    assert sender.poll(pages) is WriteState.DONE  # one connection keeps the order
    assert receiver.kv[2 * PAGE : 4 * PAGE] == sender.kv[: 2 * PAGE]
    assert receiver.kv[v + 3 * PAGE : v + 4 * PAGE] == sender.kv[v + PAGE : v + 2 * PAGE]
    assert receiver.record(1) == b"r" * 64
    assert sender.progress(peer) == 3 * PAGE + 64
    assert settle(sender, sender.write(peer, [], 1)) is WriteState.DONE


def test_a_revoked_window_drops_bytes_and_other_rooms_continue(
    receiver: TcpReceiver, sender: TcpSender
) -> None:
    peer = attach(sender, receiver)
    announce(receiver, 1, generation=1)
    announce(receiver, 2, generation=2)
    assert receiver.revoke(1) is True
    late = sender.write(peer, [Copy(0, PAGE, PAGE)], 1)
    fine = sender.write(peer, [Copy(0, 2 * PAGE, PAGE)], 2)
    assert settle(sender, fine) is WriteState.DONE
    assert sender.poll(late) is WriteState.FAILED
    assert receiver.kv[PAGE : 2 * PAGE] == bytes(PAGE)
    assert not receiver.dropped


def half_sent(receiver: TcpReceiver, raw: Callable[..., Raw]) -> tuple[Raw, bytes]:
    """Send a frame for one page of room 1 but for its last ten bytes; return the connection and these."""
    announce(receiver, 1)
    connection = proved(raw, receiver)
    data = frame(PAGE, b"\x55" * PAGE)
    connection.sock.sendall(data[:-10])
    until(lambda: receiver.kv[2 * PAGE - 11] == 0x55)
    return connection, data[-10:]


def test_after_revoke_not_one_byte_of_a_frame_under_way_lands(
    receiver: TcpReceiver, raw: Callable[..., Raw]
) -> None:
    connection, rest = half_sent(receiver, raw)
    receiver.revoke(1)
    receiver.kv[PAGE : 2 * PAGE] = bytes(PAGE)  # the pages now belong to another room
    connection.sock.sendall(rest)
    magic, status, length = tcp_frames.ACK.unpack(connection.read(tcp_frames.ACK.size))
    assert (magic, status, length) == (tcp_frames.ACK_MAGIC, tcp_frames.REVOKED, PAGE)
    assert receiver.kv[PAGE : 2 * PAGE] == bytes(PAGE)


def test_rows_land_apart_all_at_once_and_not_after_a_revocation(
    receiver: TcpReceiver, raw: Callable[..., Raw]
) -> None:
    announce(receiver, 1, generation=1)
    connection = proved(raw, receiver)
    data = rows(PAGE, 3, 4, 16)
    connection.sock.sendall(data)
    magic, status, length = tcp_frames.ACK.unpack(connection.read(tcp_frames.ACK.size))
    assert (magic, status, length) == (tcp_frames.ACK_MAGIC, tcp_frames.LANDED, 12)
    page = (b"\x55" * 4 + bytes(12)) * 3 + bytes(PAGE - 48)
    assert bytes(receiver.kv[: 3 * PAGE]) == bytes(PAGE) + page + bytes(PAGE)
    receiver.kv[PAGE : 2 * PAGE] = bytes(PAGE)
    connection.sock.sendall(data[:-1])
    receiver.revoke(1)
    connection.sock.sendall(data[-1:])
    assert tcp_frames.ACK.unpack(connection.read(tcp_frames.ACK.size))[1] == tcp_frames.REVOKED
    assert not any(receiver.kv)


@pytest.mark.parametrize(("length", "count", "stride"), [(8, 0, 0), (8, 1, 8), (8, 2, 4), (0, 2, 8)])
def test_rows_that_overlap_or_hold_nothing_are_no_header(length: int, count: int, stride: int) -> None:
    header = tcp_frames.pack(Frame(Region.KV, 1, 0, length, count, stride))
    with pytest.raises(tcp_frames.Violation, match=f"{count} rows of {length} bytes, {stride} apart"):
        tcp_frames.unpack(header, 1 << 16)


@pytest.mark.parametrize(
    "bad",
    [
        frame(0, b"x" * PAGE),  # page 0 was not announced
        frame(PAGE, b"x" * (PAGE + 1)),  # one byte too long
        frame(2 * PAGE - 1, b"xx"),
        frame(LAYOUT.planes[1].offset - 1, b"x"),  # the gap between planes
        frame(10**12, b"x"),
        frame(PAGE, b"x", generation=99),  # never announced
        frame(PAGE, b"x", generation=2),  # another peer's
        frame(0, b"x", region=Region.RECORDS),  # another slot
        frame(64, b"x" * 65, region=Region.RECORDS),
        rows(PAGE, 2, 8, PAGE),  # the second row is in page 2
        rows(PAGE - 8, 2, 8, 8),  # the first row is in page 0
        rows(PAGE, 2, 8, 1 << 40),
    ],
)
def test_what_was_not_announced_is_refused(
    receiver: TcpReceiver, raw: Callable[..., Raw], bad: bytes
) -> None:
    announce(receiver, 1, slot=1)
    announce(receiver, 1, 2, generation=2, peer="ff" * 16, slot=2)
    connection = proved(raw, receiver)
    connection.sock.sendall(bad)
    assert connection.closed
    assert receiver.dropped == {"unannounced": 1}
    assert not any(receiver.kv)
    assert not any(receiver.records)


def test_damaged_headers_and_truncated_frames_drop_the_connection(
    receiver: TcpReceiver, raw: Callable[..., Raw]
) -> None:
    announce(receiver, 1)
    good = frame(PAGE, b"x" * PAGE)
    header = tcp_frames.HEADER_BYTES
    for at in (0, 4, 9, 30, header - 1):
        connection = proved(raw, receiver)
        connection.sock.sendall(good[:at] + bytes([good[at] ^ 1]) + good[at + 1 : header])
        assert connection.closed
    too_long = Frame(Region.KV, 1, PAGE, SMALL.max_frame_bytes + 1)
    connection = proved(raw, receiver)
    connection.sock.sendall(tcp_frames.pack(too_long))
    assert connection.closed
    assert receiver.dropped["header"] == 6
    for cut in (20, header, header + 1, len(good) - 1):
        connection = proved(raw, receiver)
        connection.sock.sendall(good[:cut])
        connection.sock.shutdown(socket.SHUT_WR)
        assert connection.closed
    assert receiver.dropped["truncated"] == 4


def test_a_wrong_key_is_refused_and_nothing_of_it_is_read(
    receiver: TcpReceiver, raw: Callable[..., Raw]
) -> None:
    announce(receiver, 1)
    description(receiver)
    connection = raw(key=secrets.token_bytes(32))
    connection.sock.sendall(frame(PAGE, b"x" * PAGE))
    assert connection.closed
    replay = raw()
    replay.sock.sendall(tcp_frames.proof(description(receiver).key, b"\0" * 32))  # answers another challenge
    assert replay.closed
    assert receiver.dropped == {"proof": 2}
    assert not any(receiver.kv)


def test_silent_and_stuck_peers_are_dropped_and_idle_ones_kept(
    receiver: TcpReceiver, raw: Callable[..., Raw], clock: Clock
) -> None:
    announce(receiver, 1)
    idle = proved(raw, receiver)
    silent = raw()
    stuck = proved(raw, receiver)  # replaces `idle`: one connection per key
    assert idle.closed
    stuck.sock.sendall(frame(PAGE, b"x" * PAGE)[: tcp_frames.HEADER_BYTES + 10])
    until(lambda: receiver.kv[PAGE + 9] == ord("x"))
    until(lambda: passed(clock, SMALL.stall_timeout) and receiver.dropped["stalled"])
    assert silent.closed
    assert stuck.closed
    assert receiver.dropped == {"replaced": 1, "silent": 1, "stalled": 1}
    calm = proved(raw, receiver)
    for _ in range(2):
        calm.sock.sendall(frame(PAGE, b"y" * PAGE))
        assert len(calm.read(tcp_frames.ACK.size)) == tcp_frames.ACK.size
        clock.now += 1000
        receiver.nudge()  # makes it check for overdue connections


def test_an_expelled_peer_is_cut_off_and_needs_a_new_key(receiver: TcpReceiver, sender: TcpSender) -> None:
    peer = attach(sender, receiver)
    announce(receiver, 1)
    assert settle(sender, sender.write(peer, [Copy(0, PAGE, PAGE)], 1)) is WriteState.DONE
    assert not receiver.peer_is_dead(PEER)
    old = description(receiver).key
    receiver.expel(PEER)
    assert receiver.peer_is_dead(PEER)
    until(lambda: receiver.dropped["expelled"] == 1)
    assert settle(sender, sender.write(peer, [Copy(0, PAGE, PAGE)], 1)) is WriteState.FAILED
    # A second try fails in the same way.
    assert settle(sender, sender.write(peer, [Copy(0, PAGE, PAGE)], 1)) is WriteState.FAILED
    assert any(word in sender.last_error(peer) for word in ("closed the connection", "reset", "Broken pipe"))
    assert description(receiver).key != old


def test_nothing_of_an_expelled_peer_lands_even_before_its_connection_is_closed(
    receiver: TcpReceiver, raw: Callable[..., Raw], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its pages are free at once, because the peer counts as dead at once."""
    connection, rest = half_sent(receiver, raw)
    with monkeypatch.context() as patch:
        patch.setattr(receiver, "nudge", lambda: None)
        receiver.expel(PEER)
    receiver.kv[PAGE : 2 * PAGE] = bytes(PAGE)  # the pages now belong to another room
    connection.sock.sendall(rest)
    assert connection.closed
    assert not any(receiver.kv)


def test_an_idle_connection_costs_no_work(
    receiver: TcpReceiver, sender: TcpSender, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[float] = []

    def counted(clock: Clock) -> float:
        looks.append(clock.now)
        return clock.now

    monkeypatch.setattr(Clock, "__call__", counted)
    peer = attach(sender, receiver)
    announce(receiver, 1)
    assert settle(sender, sender.write(peer, [Copy(0, PAGE, PAGE)], 1)) is WriteState.DONE

    def looks_in(seconds: float) -> int:
        before = len(looks)
        time.sleep(seconds)
        return len(looks) - before

    # Idle threads look a few times per second, and this one may be kept from running for a second at times.
    assert any(looks_in(0.1) < 10 for _ in range(20))


def timers(port: int) -> list[tuple[int, float]]:
    """Return kind and remaining seconds of the timers of the established connections of a port, both ends."""
    found = []
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        _, local, remote, state, _, timer, *_ = line.split()
        if state == "01" and f"{port:04X}" in (local.partition(":")[2], remote.partition(":")[2]):
            kind, _, left = timer.partition(":")
            found.append((int(kind, 16), int(left, 16) / os.sysconf("SC_CLK_TCK")))
    return found


def test_firewalls_do_not_forget_an_idle_connection(receiver: TcpReceiver, sender: TcpSender) -> None:
    """Both ends show the kernel's timer for a probe, which is the only one of an idle connection."""
    peer = attach(sender, receiver)
    receiver.announce(Window(1, PEER, frozenset({1}), 0))
    copies = [Copy(LAYOUT.planes[0].offset, LAYOUT.planes[0].offset + PAGE, PAGE)]
    assert settle(sender, sender.write(peer, copies, 1)) is WriteState.DONE
    port, probe = description(receiver).port, 2
    until(lambda: [kind for kind, _ in timers(port)] == [probe, probe])
    assert all(0 < seconds <= IDLE_SECONDS for _, seconds in timers(port))


def test_a_write_for_which_there_is_no_thread_fails_and_a_later_one_does_not(
    receiver: TcpReceiver, sender: TcpSender, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    peer = attach(sender, receiver)
    announce(receiver, 1)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        assert sender.poll(sender.write(peer, [Copy(0, PAGE, PAGE)], 1)) is WriteState.FAILED
    assert "can't start new thread" in sender.last_error(peer)
    assert settle(sender, sender.write(peer, [Copy(0, PAGE, PAGE)], 1)) is WriteState.DONE


@pytest.fixture
def exhausted(monkeypatch: pytest.MonkeyPatch) -> ExhaustedListener:
    """Return the socket on which a receiver will listen."""
    made = ExhaustedListener()
    monkeypatch.setattr(socket, "create_server", lambda where, **options: made)
    return made


def test_descriptors_that_run_out_are_waited_for_without_work(
    exhausted: ExhaustedListener, receiver: TcpReceiver, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[float] = []

    def counted(clock: Clock) -> float:
        looks.append(clock.now)
        return clock.now

    monkeypatch.setattr(Clock, "__call__", counted)
    with socket.create_connection(exhausted.getsockname(), timeout=PATIENCE) as peer:
        until(lambda: exhausted.refused)
        turns = len(looks)
        until(lambda: receiver.nudge() or len(looks) > turns + 10)
        assert exhausted.refused == 1, "the thread of this socket spins"
        exhausted.exhausted = False
        clock.now += RETRY_SECONDS
        assert peer.recv(4) == tcp_frames.CHALLENGE_MAGIC


@needs_ipv6
def test_pages_over_ipv6(sender: TcpSender) -> None:
    with closing(TcpReceiver("::1", 0, SMALL)) as receiver:
        receiver.allocate(Region.KV, LAYOUT.total_bytes)
        receiver.allocate(Region.RECORDS, 4 * 64)
        receiver.open(LAYOUT, 64)
        peer = attach(sender, receiver)
        announce(receiver, 1)
        assert settle(sender, sender.write(peer, [Copy(0, PAGE, PAGE)], 1)) is WriteState.DONE


def test_strangers_are_bounded(
    receiver: TcpReceiver, raw: Callable[..., Raw], clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kv_transfer.transport.tcp.receiver.MAX_PENDING", 3)
    oldest, *others = [raw() for _ in range(3)]
    newest = raw()
    assert oldest.closed, "the oldest gives way: a peer that comes during a flood gets its time, too"
    assert receiver.dropped["full"] == 1
    until(lambda: passed(clock, SMALL.handshake_timeout) and receiver.dropped["silent"] == 3)
    assert all(each.closed for each in (*others, newest))  # they never sent anything


def test_a_peer_gets_in_while_strangers_keep_coming(
    receiver: TcpReceiver, sender: TcpSender, raw: Callable[..., Raw], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kv_transfer.transport.tcp.receiver.MAX_PENDING", 3)
    peer = attach(sender, receiver)
    for _ in range(6):
        raw()
    announce(receiver, 1)
    assert settle(sender, sender.write(peer, [Copy(0, PAGE, PAGE)], 1)) is WriteState.DONE
    assert receiver.dropped["full"] >= 3


def test_a_write_is_done_only_once_all_of_its_frames_have_landed() -> None:
    sender = TcpSender(msgspec.structs.replace(LIMITS, max_frame_bytes=1024), Clock())
    sender.register(LAYOUT, memoryview(bytearray(LAYOUT.total_bytes)))
    with socket.create_server(("127.0.0.1", 0)) as server, closing(sender):
        where = TcpDescription("127.0.0.1", server.getsockname()[1], bytes(32))
        peer = sender.attach(Target("0b" * 16, where, LAYOUT.total_bytes, 256))
        ticket = sender.write(peer, [Copy(0, 0, 2048)], 1)
        accepted, _ = server.accept()
        with accepted:
            accepted.settimeout(PATIENCE)
            accepted.sendall(tcp_frames.CHALLENGE.pack(tcp_frames.CHALLENGE_MAGIC, bytes(32)))
            left = tcp_frames.PROOF.size + 2 * (1024 + tcp_frames.HEADER_BYTES)
            while left:
                left -= len(accepted.recv(left))
            accepted.sendall(tcp_frames.ACK.pack(tcp_frames.ACK_MAGIC, tcp_frames.LANDED, 1024))
            until(lambda: sender.progress(peer) == 1024)
            assert sender.poll(ticket) is WriteState.PENDING
            accepted.sendall(tcp_frames.ACK.pack(tcp_frames.ACK_MAGIC, tcp_frames.REVOKED, 1024))
            assert settle(sender, ticket) is WriteState.FAILED


def test_inflight_bytes_are_bounded() -> None:
    """With a peer that reads nothing, the sender stops at the bound, gives up in time, and everything settles."""
    limits = msgspec.structs.replace(LIMITS, max_frame_bytes=1024, max_inflight_bytes=4096, stall_timeout=7)
    clock = Clock()
    sender = TcpSender(limits, clock)
    memory = memoryview(bytearray(LAYOUT.total_bytes))
    sender.register(LAYOUT, memory)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        peer = sender.attach(
            Target("0b" * 16, TcpDescription("127.0.0.1", port, bytes(32)), LAYOUT.total_bytes, 256)
        )
        ticket = sender.write(peer, [Copy(0, 0, 4096)] * 50, 1)
        accepted, _ = server.accept()
        with accepted:
            accepted.settimeout(PATIENCE)
            accepted.sendall(tcp_frames.CHALLENGE.pack(tcp_frames.CHALLENGE_MAGIC, bytes(32)))
            bound = tcp_frames.PROOF.size + 4 * (1024 + tcp_frames.HEADER_BYTES)
            received = 0
            while received < bound:
                received += len(accepted.recv(1 << 16))
            assert sender.poll(ticket) is WriteState.PENDING
            until(lambda: passed(clock, limits.stall_timeout) and sender.poll(ticket) is WriteState.FAILED)
            assert "no progress for 7 s" in sender.last_error(peer)
            while part := accepted.recv(1 << 16):
                received += len(part)
    assert received == bound
    sender.close()


def test_a_port_without_a_decode_node_fails_the_transfer(sender: TcpSender) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        peer = sender.attach(
            Target("0b" * 16, TcpDescription("127.0.0.1", port, bytes(32)), LAYOUT.total_bytes, 256)
        )
        ticket = sender.write(peer, [Copy(0, 0, 8)], 1)
        accepted, _ = server.accept()
        accepted.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\nand more text to fill it")
        assert settle(sender, ticket) is WriteState.FAILED
        assert "not a decode node" in sender.last_error(peer)
        accepted.close()
    with socket.socket() as deaf:  # holds its port, so that nobody else listens there
        deaf.bind(("127.0.0.1", 0))
        where = TcpDescription("127.0.0.1", deaf.getsockname()[1], bytes(32))
        peer = sender.attach(Target("0b" * 16, where, LAYOUT.total_bytes, 256))
        assert settle(sender, sender.write(peer, [Copy(0, 0, 8)], 1)) is WriteState.FAILED
        assert "refused" in sender.last_error(peer).lower()


def test_detach_settles_at_once_even_while_connecting_or_stalled(sender: TcpSender) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:  # the kernel accepts, but nothing is sent
        port = server.getsockname()[1]
        where = Target("0b" * 16, TcpDescription("127.0.0.1", port, bytes(32)), LAYOUT.total_bytes, 256)
        peer = sender.attach(where)
        ticket = sender.write(peer, [Copy(0, 0, 8)], 1)
        sender.detach(peer)
        assert sender.poll(ticket) is WriteState.FAILED
        assert sender.poll(sender.write(peer, [Copy(0, 0, 8)], 1)) is WriteState.FAILED
    until(lambda: all(each.name != "kv-tcp-send" for each in threading.enumerate()))


def test_cancel_drops_what_is_not_sent(receiver: TcpReceiver) -> None:
    sender = TcpSender(msgspec.structs.replace(SMALL, max_frame_bytes=PAGE, max_inflight_bytes=10 * PAGE))
    sender.register(LAYOUT, memoryview(noise(LAYOUT.total_bytes)))
    announce(receiver, 1)
    with closing(Wire(description(receiver).port)) as wire:
        there = msgspec.structs.replace(description(receiver), port=wire.port)
        peer = sender.attach(Target("0b" * 16, there, LAYOUT.total_bytes, 256))
        assert settle(sender, sender.write(peer, [Copy(0, PAGE, PAGE)], 1)) is WriteState.DONE
        wire.withhold()  # nothing is acknowledged meanwhile
        big = sender.write(peer, [Copy(0, PAGE, PAGE)] * 20_000, 1)
        sender.cancel(big)
        wire.deliver()
        assert settle(sender, big) is WriteState.FAILED
        assert settle(sender, sender.write(peer, [Copy(0, PAGE, PAGE)], 1)) is WriteState.DONE
        assert sender.progress(peer) <= 12 * PAGE
    sender.close()


def test_threads_and_descriptors_end_with_the_endpoints() -> None:
    before = set(threading.enumerate())
    receiver = TcpReceiver("127.0.0.1", 0, SMALL)
    receiver.allocate(Region.KV, LAYOUT.total_bytes)
    receiver.allocate(Region.RECORDS, 256)
    receiver.open(LAYOUT, 64)
    sender = TcpSender(SMALL)
    sender.register(LAYOUT, memoryview(bytearray(LAYOUT.total_bytes)))
    peer = attach(sender, receiver)
    announce(receiver, 1)
    settle(sender, sender.write(peer, [Copy(0, PAGE, PAGE)], 1))
    sender.close()
    receiver.close()
    receiver.close()
    assert not set(threading.enumerate()) - before
