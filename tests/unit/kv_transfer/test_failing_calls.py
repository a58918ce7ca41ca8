"""Each call of a transfer into the system, or into NIXL, fails once: later requests are served, and nothing is left.

A process may lack descriptors, memory or threads for a moment, and a library may refuse a call. With TANDEM_EXPLORE=1
all calls take their turn, also those of nixl and tcp, whose threads take time and make their number vary.
"""

from __future__ import annotations

import errno
import mmap
import os
import secrets
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from common.errors import RequestError
from kv_transfer.events import Arrived, PagesFree, PeerForgot, PeerRefused, SlotsGranted
from kv_transfer.transport.base import ReceiverEndpoint, SenderEndpoint
from kv_transfer.transport.nixl.receiver import NixlReceiver
from kv_transfer.transport.nixl.sender import NixlSender
from kv_transfer.transport.shm.receiver import ShmReceiver
from kv_transfer.transport.shm.sender import ShmSender
from kv_transfer.transport.tcp.receiver import TcpReceiver
from kv_transfer.transport.tcp.sender import TcpSender
from tests.fakes.descriptors import open_descriptors
from tests.fakes.failing_calls import EXPLORE, FailingCalls, fail_with, numbers
from tests.fakes.fake_nixl import Agent, FakeNixl, NixlRefusal
from tests.unit.kv_transfer.rig import LIMITS, RECORD, Clock, Decode, Prefill, same_pages

PAGES = range(1, 16)
FAILURES = 4  # of each call, without TANDEM_EXPLORE
IDLE_TURNS = 40  # without an event, after which a second passes

Error = Callable[[], BaseException]


def system(*codes: int) -> list[Error]:
    return [lambda code=code: OSError(code, os.strerror(code)) for code in codes]  # type: ignore[misc]


NO_THREAD: list[Error] = [lambda: RuntimeError("can't start new thread")]
REFUSED: list[Error] = [lambda: NixlRefusal("NIXL_ERR_BACKEND")]
SHM: dict[tuple[Any, str], list[Error]] = {
    (os, "open"): system(errno.EMFILE, errno.ENOMEM, errno.EACCES),
    (os, "fstat"): system(errno.ENOMEM),
    (mmap, "mmap"): system(errno.ENOMEM),
    (os, "pidfd_open"): system(errno.EMFILE, errno.ENOMEM),
    (Path, "read_bytes"): system(errno.EMFILE),
}
TCP: dict[tuple[Any, str], list[Error]] = {
    (os, "eventfd"): system(errno.EMFILE),
    (threading.Thread, "start"): NO_THREAD,
    (socket, "create_connection"): [*system(errno.EMFILE, errno.ECONNREFUSED), TimeoutError],
    (socket.socket, "accept"): system(errno.EMFILE, errno.ECONNABORTED),
    (socket.socket, "recv"): system(errno.ECONNRESET),
    (socket.socket, "recv_into"): system(errno.ECONNRESET),
    (socket.socket, "send"): system(errno.EPIPE),
    (socket.socket, "sendall"): system(errno.EPIPE),
    (socket.socket, "sendmsg"): system(errno.EPIPE, errno.ENOBUFS),
}
NIXL: dict[tuple[Any, str], list[Error]] = {
    (Agent, name): REFUSED
    for name in (
        "add_remote_agent",
        "make_connection",
        "remove_remote_agent",
        "prep_xfer_dlist",
        "release_dlist_handle",
        "make_prepped_xfer",
        "transfer",
        "check_xfer_state",
        "release_xfer_handle",
    )
}


class Transfers:
    """Two nodes, each of which does what its main loop does about transfers."""

    def __init__(self, transport: str) -> None:
        self.clock = Clock()
        names = secrets.token_hex(16), secrets.token_hex(16)
        sender, receiver = self._endpoints(transport, *names)
        self.waits = transport == "tcp"  # for its threads
        self.prefill = Prefill(self.clock, sender, incarnation=names[0])
        self.decode = Decode(self.clock, receiver, incarnation=names[1])
        self.free = set(PAGES)
        self.greeted = False
        self.rooms = 0
        self.source: dict[int, list[int]] = {}
        self.target: dict[int, list[int]] = {}  # pages that are not free
        self.granted: set[int] = set()
        self.arrived: set[int] = set()
        self.ends: Counter[tuple[str, int]] = Counter()  # of rooms, on either side

    def _endpoints(
        self, transport: str, prefill: str, decode: str
    ) -> tuple[SenderEndpoint, ReceiverEndpoint]:
        if transport == "shm":
            return ShmSender(), ShmReceiver(decode)
        if transport == "tcp":
            return TcpSender(LIMITS, self.clock), TcpReceiver(limits=LIMITS, clock=self.clock)
        net = FakeNixl()
        sender = NixlSender(prefill, "lo", LIMITS, library=net, clock=self.clock)
        return sender, NixlReceiver(decode, "lo", library=net, clock=self.clock)

    def close(self) -> None:
        self.prefill.sender.close()
        self.decode.receiver.shutdown()

    # ---- what the nodes do

    def turn(self) -> bool:
        """Process all events; return whether there were any."""
        sent, received = self.prefill.poll(), self.decode.poll()
        for told in sent:
            if isinstance(told, SlotsGranted):
                self.granted.add(told.room)
            else:
                self.ends["prefill", told.room] += 1
        for event in received:
            if isinstance(event, PeerRefused | PeerForgot):
                self.greeted = False
            elif isinstance(event, Arrived | PagesFree):
                self.ends["decode", event.room] += 1
                pages = self.target.pop(event.room)
                self.free.update(pages)
            if isinstance(event, Arrived):
                assert same_pages(self.prefill, self.source[event.room], self.decode, pages)
                self.arrived.add(event.room)
                self.decode.receiver.close(event.room)
        return bool(sent or received)

    def run(self, done: Callable[[], bool]) -> None:
        idle = 0
        for _ in range(4000):
            if done():
                return
            idle = 0 if self.turn() else idle + 1
            if self.waits:
                time.sleep(0.001)
            if idle >= IDLE_TURNS or (idle and not self.waits):
                self.clock.now, idle = self.clock.now + 1.0, 0
        raise AssertionError(f"rooms that do not end: {sorted(self.target)}, {self.prefill.sender.active}")

    def begin(self) -> int:
        """Begin a transfer, and return its room; 0 if the decode node cannot open it."""
        if not self.greeted:
            self.decode.connect(self.prefill)
            self.greeted = True
        self.rooms += 1
        room, pages = self.rooms, sorted(self.free)[:3]
        try:
            self.decode.receiver.open(room, (self.prefill.incarnation,), pages, 0)
        except RequestError:
            self.greeted = False
            return 0
        self.free.difference_update(pages)
        self.source[room], self.target[room] = [1 + (room + each) % 15 for each in range(3)], pages
        self.prefill.sender.expect(room)
        self.run(lambda: room in self.granted or self.over(room))
        return room

    def send(self, room: int, pages: Sequence[int], last: bool) -> None:
        """Send these logical pages, and the record after the last ones, unless the room has been lost."""
        if self.prefill.sender.slots(room) is not None:
            self.prefill.sender.send_pages(room, [self.source[room][each] for each in pages], pages[0])
            if last:
                self.prefill.sender.finish(room, RECORD)

    def over(self, room: int) -> bool:
        return all(self.ends[side, room] for side in ("prefill", "decode"))

    def serve(self) -> None:
        """Send a prompt, by one more attempt for each that fails."""
        for _ in range(4):
            room = self.begin()
            if room:
                self.send(room, [0, 1], last=False)
                self.turn()
                self.send(room, [2], last=True)
                self.run(lambda room=room: self.over(room))  # type: ignore[misc]
            if room in self.arrived:
                return
            # A peer that has just failed is not tried again at once.
            self.clock.now += 12.0
        raise AssertionError("no attempt succeeds")

    def script(self) -> None:
        self.serve()
        for end in (
            lambda room: self.decode.receiver.abort(room, "the client left"),
            lambda room: self.prefill.sender.cancel(room, "cancelled", "cancelled"),
        ):
            if room := self.begin():
                self.send(room, [0, 1], last=False)
                end(room)
                self.run(lambda room=room: self.over(room))  # type: ignore[misc]
        self.serve()
        room = self.begin()
        self.prefill.sender.peer_lost(self.decode.incarnation)
        self.decode.receiver.peer_lost(self.prefill.incarnation)
        self.greeted = False
        self.serve()
        self.run(lambda: not room or self.over(room))
        self.decode.receiver.peer_lost(self.prefill.incarnation)
        self.greeted = False
        self.serve()

    def check(self) -> None:
        assert self.prefill.sender.active == self.decode.receiver.active == 0
        assert self.free == set(PAGES)
        assert set(self.ends.values()) == {1}, "a room has ended twice"


@pytest.mark.parametrize(
    ("transport", "seams"),
    [("shm", SHM), *([("nixl", NIXL), ("tcp", TCP)] if EXPLORE else [])],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_call_that_fails(
    transport: str, seams: dict[tuple[Any, str], list[Error]], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = FailingCalls()
    names = {key: calls.watch(monkeypatch, *key) for key in seams}

    def run(name: str = "", number: int = 0, error: Error = OSError) -> None:
        calls.disarm()
        transfers = Transfers(transport)
        calls.arm(name, number, fail_with(error))
        try:
            transfers.script()
            transfers.check()
        finally:
            transfers.close()

    run()
    counts, before = calls.counts.copy(), len(open_descriptors())
    for key, name in names.items():
        assert counts[name], f"{name} is not called"
        for error in seams[key]:
            for number in numbers(counts[name], FAILURES):
                run(name, number, error)
                assert calls.reached or transport == "tcp"
    assert len(open_descriptors()) == before
