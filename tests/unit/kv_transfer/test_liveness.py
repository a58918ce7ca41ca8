"""LivenessConnections: only the end of the connection that proved its key counts, and only some time after it."""

from __future__ import annotations

import errno
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import msgspec
import pytest

from common.errors import HandshakeRefused
from common.exhaustion import RETRY_SECONDS
from kv_transfer.transport.nixl import liveness
from kv_transfer.transport.nixl.liveness import GRACE, LivenessConnections, LivenessListener
from kv_transfer.transport.tcp import frames as tcp_frames
from kv_transfer.transport.tcp.kind import TcpDescription
from tests.fakes.exhausted_listener import ExhaustedListener
from tests.fakes.waiting import PATIENCE, until
from tests.fakes.wire import Wire
from tests.unit.kv_transfer.rig import Clock


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def keeper(clock: Clock) -> Iterator[LivenessListener]:
    made = LivenessListener("127.0.0.1", 0, clock)
    yield made
    made.close()


def look(keeper: LivenessListener, clock: Clock, who: str = "p", seconds: float = 0.0) -> bool:
    """Return the keeper's verdict after it has polled and some time has passed."""
    keeper.poll()
    clock.now += seconds
    return keeper.dead(who)


def met(keeper: LivenessListener, who: str = "p") -> None:
    """Wait for the connection: thread and kernel need a moment, while the clock stands still."""
    until(lambda: keeper.connected(who))


def ended(keeper: LivenessListener, who: str = "p") -> None:
    until(lambda: keeper.ended(who))


def test_descriptors_that_run_out_are_waited_for_without_work(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    listener = ExhaustedListener()
    monkeypatch.setattr(socket, "create_server", lambda where, **options: listener)
    with closing(LivenessListener("127.0.0.1", 0, clock)) as keeper, closing(LivenessConnections()) as lines:
        for _ in range(5):
            keeper.poll()
        assert listener.refused == 1
        listener.exhausted = False
        clock.now += RETRY_SECONDS
        lines.hold(keeper.describe("p"))
        met(keeper)


def test_the_end_of_the_connection_is_proof_after_a_while(keeper: LivenessListener, clock: Clock) -> None:
    lines = LivenessConnections()
    assert not look(keeper, clock, seconds=100)  # nobody was described
    lines.hold(keeper.describe("p"))
    met(keeper)
    keeper.describe("q")
    assert not look(keeper, clock, seconds=100)
    lines.hold(keeper.describe("p"))  # the same one
    assert len(lines) == 1
    lines.close()
    ended(keeper)
    assert not look(keeper, clock, seconds=GRACE - 0.1)
    assert look(keeper, clock, seconds=0.2)
    assert not look(keeper, clock, "q", 100)
    keeper.forget("p")
    assert not keeper.dead("p")


@pytest.fixture
def dialled(monkeypatch: pytest.MonkeyPatch) -> list[socket.socket]:
    """The connections that `socket.create_connection` has made, in order."""
    made: list[socket.socket] = []
    real = socket.create_connection

    def create_connection(*args: Any, **options: Any) -> socket.socket:
        made.append(real(*args, **options))
        return made[-1]

    monkeypatch.setattr(socket, "create_connection", create_connection)
    return made


def time_out(keeper: LivenessListener, description: TcpDescription) -> None:
    """Let the connection of "p" time out, as Linux reports it: an error once, then reads that look like an end."""
    real, told = socket.socket.recv, list[int]()

    def recv(sock: socket.socket, *args: int) -> bytes:
        if sock.getsockname()[1] != description.port:
            return real(sock, *args)
        told.append(sock.fileno())
        if told.count(sock.fileno()) > 1:
            return b""
        raise TimeoutError(110, "Connection timed out")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket.socket, "recv", recv)
        until(lambda: not keeper.connected("p"))


def test_a_reset_is_proof_and_a_timeout_is_not(
    keeper: LivenessListener, clock: Clock, dialled: list[socket.socket]
) -> None:
    lines = LivenessConnections()
    description = keeper.describe("p")
    lines.hold(description)
    met(keeper)
    assert not look(keeper, clock)

    time_out(keeper, description)
    assert not look(keeper, clock, seconds=100)
    assert not look(keeper, clock, seconds=100)
    lines.close()
    lines.hold(description)  # it replaces the lost one
    met(keeper)
    assert not look(keeper, clock)
    dialled[-1].setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    lines.close()
    ended(keeper)
    assert look(keeper, clock, seconds=GRACE)


def challenge_of(connection: socket.socket) -> bytes:
    """Read the nonce that the keeper sends first."""
    data = b""
    while len(data) < tcp_frames.CHALLENGE.size:
        data += connection.recv(tcp_frames.CHALLENGE.size - len(data))
    magic, nonce = tcp_frames.CHALLENGE.unpack(data)
    assert magic == tcp_frames.CHALLENGE_MAGIC
    return bytes(nonce)


def test_a_recorded_proof_proves_nothing(keeper: LivenessListener, clock: Clock) -> None:
    """An attacker who replays the recorded messages of a sender that was lost later proves nothing."""
    description = keeper.describe("p")
    lines = LivenessConnections()
    with closing(Wire(description.port)) as wire:
        lines.hold(TcpDescription("127.0.0.1", wire.port, description.key))
        met(keeper)
        recorded = bytes(wire.recorded)
        time_out(keeper, description)
        with socket.create_connection(("127.0.0.1", description.port), timeout=PATIENCE) as thief:
            thief.sendall(recorded)
            until(lambda: closed(thief))
        assert not look(keeper, clock, seconds=100)
        assert not keeper.connected("p")
    lines.close()


def closed(connection: socket.socket) -> bool:
    try:
        return connection.recv(4096) == b""
    except ConnectionError:
        return True


def test_other_connections_prove_nothing(keeper: LivenessListener, clock: Clock) -> None:
    """Connections of unknown peers, with another key, and a second one with the right key prove nothing."""
    description = keeper.describe("p")
    where = (description.host, description.port)
    for sent in (b"", b"GET / HTTP/1.1\r\n\r\n" * 9, None):
        with socket.create_connection(where, timeout=PATIENCE) as stranger:
            nonce = challenge_of(stranger)
            stranger.sendall(tcp_frames.proof(bytes(32), nonce) if sent is None else sent)
            assert not look(keeper, clock)
        assert not look(keeper, clock, seconds=100)
    lines = LivenessConnections()
    lines.hold(description)
    met(keeper)
    assert not look(keeper, clock)
    with socket.create_connection(where, timeout=PATIENCE) as second:
        second.sendall(tcp_frames.proof(description.key, challenge_of(second)))
        assert not look(keeper, clock)
    assert not look(keeper, clock, seconds=100)
    until(lambda: not keeper.pending)
    assert not look(keeper, clock, seconds=100)
    lines.close()


def test_a_new_connection_revokes_the_proof(keeper: LivenessListener, clock: Clock) -> None:
    lines = LivenessConnections()
    description = keeper.describe("p")
    lines.hold(description)
    met(keeper)
    lines.close()
    ended(keeper)
    assert not look(keeper, clock)
    lines.hold(description)
    met(keeper)
    assert not look(keeper, clock, seconds=100)
    lines.close()


def test_strangers_are_bounded_and_sent_away(
    keeper: LivenessListener, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The oldest is dropped, so that a flood keeps no sender out; a silent one is dropped after a while."""
    monkeypatch.setattr(liveness, "MAX_PENDING", 2)
    where = (keeper.describe("p").host, keeper.describe("p").port)
    silent = [socket.create_connection(where, timeout=PATIENCE) for _ in range(3)]
    until(lambda: closed(silent[0]))
    lines = LivenessConnections()
    lines.hold(keeper.describe("p"))
    met(keeper)
    lines.close()
    clock.now += 11
    for each in silent:
        until(lambda: closed(each))  # noqa: B023
        each.close()
    assert not keeper.pending


def test_a_listener_without_a_challenge_is_refused(clock: Clock) -> None:
    """A program that sends no challenge is no decode node."""

    def answer() -> None:
        with closing(listener.accept()[0]) as connection:
            connection.sendall(b"HTTP/1.1 400 Bad Request\r\n" * 2)

    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        answering = threading.Thread(target=answer)
        answering.start()
        with pytest.raises(HandshakeRefused, match="not a decode node of this version"):
            LivenessConnections().hold(TcpDescription("127.0.0.1", listener.getsockname()[1], bytes(32)))
        answering.join()


def test_a_port_without_a_listener_is_refused(keeper: LivenessListener, clock: Clock) -> None:
    with pytest.raises(HandshakeRefused, match="cannot be reached"):
        LivenessConnections().hold(TcpDescription("127.0.0.1", 1, bytes(32)))


def test_a_place_that_does_not_answer_is_not_waited_for_again_at_once(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def silence(where: tuple[str, int], timeout: float) -> socket.socket:
        asked.append(where)
        raise TimeoutError("timed out")

    monkeypatch.setattr(socket, "create_connection", silence)
    lines, description = LivenessConnections(clock), TcpDescription("10.0.0.1", 7, bytes(32))
    for _ in range(3):
        with pytest.raises(HandshakeRefused, match=r"10\.0\.0\.1:7 .* cannot be reached \(timed out\)"):
            lines.hold(description)
    assert len(asked) == 1
    clock.now += 11
    with pytest.raises(HandshakeRefused):
        lines.hold(description)
    assert len(asked) == 2


def test_a_name_server_that_does_not_answer_does_not_hold_the_main_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A node that waited as long as a resolver does would count as hung."""
    answered = threading.Event()

    def lookup(*arguments: object, **options: object) -> list[object]:
        answered.wait()
        return []

    monkeypatch.setattr(socket, "getaddrinfo", lookup)
    monkeypatch.setattr("kv_transfer.transport.nixl.lookup.LOOKUP_SECONDS", 0.01)
    try:
        with pytest.raises(
            HandshakeRefused, match=r"the addresses of decode\.example were not found within 0.01 s"
        ):
            LivenessConnections().hold(TcpDescription("decode.example", 7, bytes(32)))
    finally:
        answered.set()


@pytest.mark.parametrize(
    ("error", "says"),
    [(socket.gaierror(-2, "Name or service not known"), "not known"), (UnicodeError("x"), "x")],
)
def test_a_name_that_is_not_found_is_refused(
    monkeypatch: pytest.MonkeyPatch, error: Exception, says: str
) -> None:
    def lookup(*arguments: object, **options: object) -> list[object]:
        raise error

    monkeypatch.setattr(socket, "getaddrinfo", lookup)
    with pytest.raises(HandshakeRefused, match=f"decode.example:7 .*cannot be reached .*{says}"):
        LivenessConnections().hold(TcpDescription("decode.example", 7, bytes(32)))


def test_each_address_of_a_name_is_tried(keeper: LivenessListener, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name of both protocols often has an address at which nobody listens."""
    description = keeper.describe("p")
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (at, 0)) for at in ("127.0.0.2", "127.0.0.1")]
    lookup = socket.getaddrinfo

    def of_name(host: str, *arguments: Any, **options: Any) -> Any:
        return found if host == "decode.example" else lookup(host, *arguments, **options)

    monkeypatch.setattr(socket, "getaddrinfo", of_name)
    with closing(LivenessConnections()) as lines:
        lines.hold(TcpDescription("decode.example", description.port, description.key))
        met(keeper)


def test_a_sender_without_a_free_descriptor_blames_no_place_and_tries_again_at_once(
    keeper: LivenessListener, monkeypatch: pytest.MonkeyPatch
) -> None:
    def exhausted(where: tuple[str, int], timeout: float) -> socket.socket:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with closing(LivenessConnections()) as lines:
        with monkeypatch.context() as patch:
            patch.setattr(socket, "create_connection", exhausted)
            with pytest.raises(OSError, match="Too many open files"):
                lines.hold(keeper.describe("p"))
        lines.hold(keeper.describe("p"))
        met(keeper)


def test_a_sender_forgets_decode_nodes_that_are_gone(clock: Clock, dialled: list[socket.socket]) -> None:
    lines = LivenessConnections()
    for _ in range(3):
        keeper = LivenessListener("127.0.0.1", 0, clock)
        lines.hold(keeper.describe("p"))
        met(keeper)
        keeper.close()
        assert select.select([dialled[-1]], [], [], PATIENCE)[0], "the end has not arrived"
    assert len(lines) == 1
    lines.close()


CHILD = """
import sys, time, msgspec
from kv_transfer.transport.tcp.kind import TcpDescription
from kv_transfer.transport.nixl.liveness import LivenessConnections
lines = LivenessConnections(); lines.hold(msgspec.json.decode(sys.argv[1], type=TcpDescription))
print("up", flush=True); time.sleep(600)
"""


def test_a_stopped_process_is_alive_and_a_killed_one_is_not(keeper: LivenessListener, clock: Clock) -> None:
    told = msgspec.json.encode(keeper.describe("p")).decode()
    command = [sys.executable, "-c", CHILD, told]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=os.getcwd()) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"up\n"
        met(keeper)
        os.kill(child.pid, signal.SIGSTOP)
        assert not look(keeper, clock, seconds=100)
        os.kill(child.pid, signal.SIGKILL)
        child.wait()
        ended(keeper)
        assert not look(keeper, clock)
        assert look(keeper, clock, seconds=GRACE)
