"""A connection that the network dropped silently: neither end is told, and the next message must arrive."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing

import pytest
import zmq

from common.ipc import Dealer, RouterSocket, channel
from common.ipc import dealer as dealer_module
from tests.fakes.clock import Clock
from tests.fakes.keyless import Keyless
from tests.fakes.waiting import PATIENCE, until
from tests.fakes.wire import Wire

GREETING = 64  # bytes: signature, version, mechanism, role


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    made = zmq.Context[zmq.Socket[bytes]]()
    yield made
    made.term()


def test_a_peer_that_once_speaks_garbage_is_dialled_again(
    context: zmq.Context[zmq.Socket[bytes]],
) -> None:
    """One flipped byte ends a ZMQ connection for ever, because ZMQ reconnects only after network errors."""
    with closing(socket.create_server(("127.0.0.1", 0))) as garbage:
        port = garbage.getsockname()[1]
        dealer = Dealer(context, f"tcp://127.0.0.1:{port}", b"peer", security=Keyless())
        with closing(dealer):
            garbage.settimeout(PATIENCE)
            with closing(garbage.accept()[0]) as connection:
                connection.settimeout(PATIENCE)
                connection.sendall(b"\xff" + bytes(8) + b"\x7f" + b"\x03\x00NULL" + bytes(48))
                exactly(connection, GREETING)
                # READY: a flag, the length, and that many bytes
                exactly(connection, exactly(connection, 2)[1])
                connection.sendall(b"\x04\xff" + b"garbage" * 40)
                assert dealer.send(b"still here")
                until_closed(connection)
            garbage.close()
            with closing(RouterSocket(context, f"tcp://127.0.0.1:{port}", Keyless())) as router:
                assert until(lambda: dealer.drain() or router.drain()) == [(b"peer", b"still here")]


def exactly(connection: socket.socket, count: int) -> bytes:
    """Read `count` bytes, however the network splits them."""
    received = b""
    while len(received) < count:
        chunk = connection.recv(count - len(received))
        assert chunk, "the peer closed the connection"
        received += chunk
    return received


def until_closed(connection: socket.socket) -> None:
    """Read until the peer closes; if it closes with unread bytes, it resets the connection."""
    with contextlib.suppress(ConnectionError):
        while connection.recv(65536):
            pass


def test_a_connection_that_goes_silent_is_made_anew(
    context: zmq.Context[zmq.Socket[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a silence the connecting side probes and reconnects."""
    assert dealer_module.SILENCE_SECONDS <= 3.0
    monkeypatch.setattr(dealer_module, "SILENCE_SECONDS", 0.1)
    monkeypatch.setattr(channel, "LINGER_MS", 0)
    with closing(RouterSocket(context, "tcp://127.0.0.1:0", Keyless())) as router:
        with closing(Wire(int(router.address.rpartition(":")[2]))) as wire:
            with closing(
                Dealer(context, f"tcp://127.0.0.1:{wire.port}", b"peer", security=Keyless())
            ) as dealer:
                dealer.send(b"before")
                assert until(router.drain)[0] == (b"peer", b"before")
                wire.cut()
                assert dealer.send(b"afterwards")
                assert until(lambda: dealer.drain() or router.drain()) == [(b"peer", b"afterwards")]
                # On a busy machine the dealer may have given up this connection, too.
                until(lambda: dealer.drain() or router.drain() or router.send(b"peer", b"answer"))
                assert until(lambda: router.drain() or dealer.drain()) == [b"answer"]


def test_a_connection_that_was_given_up_is_closed_by_the_listener(
    context: zmq.Context[zmq.Socket[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Data held back by the network arrives after its sender has reconnected: no descriptor of it may remain.

    libzmq 4.3.5 leaks the first connection if both have the same routing id.
    """
    monkeypatch.setattr(dealer_module, "SILENCE_SECONDS", 0.1)
    monkeypatch.setattr(channel, "LINGER_MS", 0)
    with closing(RouterSocket(context, "tcp://127.0.0.1:0", Keyless())) as router:
        with closing(Wire(int(router.address.rpartition(":")[2]))) as wire:
            address = f"tcp://127.0.0.1:{wire.port}"
            with closing(Dealer(context, address, b"peer", security=Keyless())) as dealer:
                dealer.send(b"before")
                assert until(router.drain) == [(b"peer", b"before")]
                wire.withhold()
                assert dealer.send(b"withheld")
                assert until(lambda: dealer.drain() or router.drain()) == [(b"peer", b"withheld")]
                wire.deliver()
                # A busy machine may make the dealer give up more than one connection: only the latest stays.
                assert (
                    until(
                        lambda: (
                            dealer.drain() or router.drain() or wire.ended_by_target == wire.connections - 1
                        )
                    )
                    is True
                )
                until(lambda: dealer.drain() or router.drain() or router.send(b"peer", b"answer"))
                assert until(lambda: router.drain() or dealer.drain()) == [b"answer"]


def test_a_flooding_peer_that_dies_does_not_take_the_process_along() -> None:
    """ZMQ's own heartbeats would abort the process (libzmq 4.3.5) when a connection whose input has stopped breaks."""
    flooded = (
        "import subprocess, sys, time, zmq\n"
        "from common.ipc import RouterSocket\n"
        "from tests.fakes.keyless import Keyless\n"
        "router = RouterSocket(zmq.Context(), 'tcp://127.0.0.1:0', Keyless())\n"
        "router.socket.setsockopt(zmq.RCVHWM, 10)\n"
        "router.socket.unbind(router.address)\n"
        "port = router.socket.bind_to_random_port('tcp://127.0.0.1')\n"
        "flood = 'import sys, time, zmq; d = zmq.Context().socket(zmq.DEALER); d.setsockopt(zmq.SNDHWM, 100000)\\n'\n"
        "flood += 'd.connect(sys.argv[1])\\n'\n"
        "flood += 'for _ in range(20000): d.send(bytes(2000))\\n'\n"
        "flood += 'print(1, flush=True); time.sleep(600)'\n"
        "child = subprocess.Popen([sys.executable, '-c', flood, f'tcp://127.0.0.1:{port}'], stdout=subprocess.PIPE)\n"
        "child.stdout.readline()\n"
        "time.sleep(1)\n"
        "child.kill()\n"
        "child.wait()\n"
        "time.sleep(4)\n"
        "print('alive')\n"
    )
    ended = subprocess.run([sys.executable, "-c", flooded], capture_output=True, text=True, timeout=300)
    assert (ended.returncode, ended.stdout) == (0, "alive\n"), ended.stderr


def test_a_connection_that_is_idle_after_an_acknowledgement_is_kept(
    context: zmq.Context[zmq.Socket[bytes]],
) -> None:
    """Nobody answers an acknowledgement, so the silence after it says nothing about the connection."""
    with closing(RouterSocket(context, "tcp://127.0.0.1:0", Keyless())) as router:
        with closing(Dealer(context, router.address, b"peer", security=Keyless(), silence=3.0)) as dealer:
            dealer.send(b"request")
            until(lambda: dealer.drain() or router.drain())
            until(lambda: router.drain() or dealer.drain() or dealer.idle)
            router.send(b"peer", b"abort")
            until(dealer.drain)
            until(lambda: router.drain() or dealer.drain() or dealer.idle)
            dealer.clock = clock = Clock(dealer.clock())
            for _ in range(8):
                clock.now += 1.0
                dealer.drain()  # probes when it is due
                until(lambda: router.drain() or dealer.drain() or not dealer.awaits_answer)
            assert dealer.dials == 1
