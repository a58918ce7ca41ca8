"""One room goes from Hello to Delivered over every transport, with real bytes."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest

from common.errors import ConfigError
from kv_transfer.events import Arrived, Delivered, ReceiverEvent, RoomFailed, SenderEvent, SlotsGranted
from kv_transfer.handoff_record import HandoffRecord, unpack_checksums
from kv_transfer.transport.nixl.agent import load_library
from kv_transfer.transport.nixl.receiver import NixlReceiver
from kv_transfer.transport.nixl.sender import NixlSender
from kv_transfer.transport.shm.receiver import ShmReceiver
from kv_transfer.transport.shm.sender import ShmSender
from kv_transfer.transport.tcp.receiver import TcpReceiver
from kv_transfer.transport.tcp.sender import TcpSender
from tests.fakes.fake_nixl import FakeNixl
from tests.fakes.loopback import Fabric
from tests.fakes.waiting import until
from tests.unit.kv_transfer.rig import LIMITS, Clock, Decode, Prefill, same_pages, send_all


@dataclass
class Ends:
    prefill: Prefill
    decode: Decode
    sent: list[SenderEvent] = field(default_factory=list)
    got: list[ReceiverEvent] = field(default_factory=list)

    def until(self, done: Callable[[], bool]) -> None:
        """Poll both sides until `done`; only tcp and nixl need several turns."""

        def turned() -> bool:
            self.sent += self.prefill.poll()
            self.got += self.decode.poll()
            return done()

        until(turned)


def _loopback() -> Ends:
    clock = Clock()
    fabric = Fabric(clock)
    prefill = Prefill(clock, fabric.sender("p"))
    incarnation = secrets.token_hex(16)
    return Ends(prefill, Decode(clock, fabric.receiver(incarnation), incarnation=incarnation))


def _shm() -> Ends:
    clock = Clock()
    incarnation = secrets.token_hex(16)
    return Ends(Prefill(clock, ShmSender()), Decode(clock, ShmReceiver(incarnation), incarnation=incarnation))


def _tcp() -> Ends:
    clock = Clock()
    # Small limits force many small frames.
    limits = msgspec.structs.replace(LIMITS, max_frame_bytes=100, max_inflight_bytes=1000)
    return Ends(
        Prefill(clock, TcpSender(limits), limits), Decode(clock, TcpReceiver("127.0.0.1", 0, limits), limits)
    )


def _nixl(library: Any) -> Ends:
    clock = Clock()
    # Small limits force several transfers per write.
    limits = msgspec.structs.replace(LIMITS, max_frame_bytes=100, max_inflight_bytes=1000)
    sending, receiving = secrets.token_hex(16), secrets.token_hex(16)
    return Ends(
        Prefill(clock, NixlSender(sending, "lo", limits, library=library), limits, incarnation=sending),
        Decode(clock, NixlReceiver(receiving, "lo", library=library), limits, incarnation=receiving),
    )


def _nixl_real() -> Ends:
    """Make ends over the real NIXL; skip the test if it is not installed."""
    try:
        return _nixl(load_library())
    except ConfigError as error:
        pytest.skip(str(error))


@pytest.fixture(
    params=[_loopback, _shm, _tcp, lambda: _nixl(FakeNixl()), _nixl_real],
    ids=["loopback", "shm", "tcp", "nixl-fake", "nixl"],
)
def ends(request: pytest.FixtureRequest) -> Iterator[Ends]:
    made: Ends = request.param()
    yield made
    made.prefill.sender.close()
    made.decode.receiver.shutdown()


def test_pages_and_record_arrive_as_they_were(ends: Ends) -> None:
    prefill, decode = ends.prefill, ends.decode
    decode.connect(prefill)
    generation = decode.receiver.open(5, (prefill.incarnation,), [9, 3, 4], held_pages=2)
    prefill.sender.expect(5)
    ends.until(lambda: SlotsGranted(5) in ends.sent)
    granted = prefill.sender.slots(5)
    assert granted is not None
    assert (granted.held_pages, granted.num_pages, granted.generation) == (2, 3, generation)
    assert granted.incarnation == decode.incarnation
    record = HandoffRecord(
        first_token=42,
        num_tokens=10,
        cached_tokens=4,
        draft_topk_probs=(0.5, 0.25),
        draft_topk_ids=(1, 2),
        draft_hidden=b"\x01\x02",
        draft_hidden_dtype="float16",
    )
    prefill.sender.send_pages(5, [1, 2], first=2)
    prefill.sender.send_pages(5, [8], first=4)
    prefill.sender.finish(5, record)
    ends.until(lambda: Delivered(5) in ends.sent and any(isinstance(e, Arrived) for e in ends.got))
    (arrived,) = [event for event in ends.got if isinstance(event, Arrived)]
    assert msgspec.structs.replace(arrived.record, checksums=b"") == record
    assert len(unpack_checksums(arrived.record.checksums)) == 3
    assert same_pages(prefill, [1, 2, 8], decode, [9, 3, 4])
    decode.receiver.close(5)
    assert (prefill.sender.active, decode.receiver.active, decode.receiver.quarantined_pages) == (0, 0, 0)
    assert prefill.sender.poll_interval is None
    assert (prefill.sender.counters.pages_written, prefill.sender.counters.delivered) == (3, 1)
    assert decode.receiver.counters.pages_received == 3


def test_several_rooms_at_once_slots_before_and_after_their_prompt(ends: Ends) -> None:
    prefill, decode = ends.prefill, ends.decode
    decode.connect(prefill)
    pages = {1: [1, 2, 3], 2: [6, 5], 3: []}
    source = {1: [4, 5, 6], 2: [6, 7], 3: []}
    prefill.sender.expect(1)
    for room in pages:
        decode.receiver.open(room, (prefill.incarnation,), pages[room], held_pages=3)
    ends.until(lambda: SlotsGranted(1) in ends.sent)
    prefill.sender.expect(2)
    prefill.sender.expect(3)
    ends.until(lambda: SlotsGranted(3) in ends.sent and SlotsGranted(2) in ends.sent)
    for room in (2, 3, 1):
        send_all(prefill, room, source[room], held=3)
    ends.until(lambda: len([e for e in ends.got if isinstance(e, Arrived)]) == 3)
    for room in pages:
        assert same_pages(prefill, source[room], decode, pages[room])
        decode.receiver.close(room)
    assert not [event for event in ends.got if isinstance(event, RoomFailed)]
    assert decode.receiver.active == 0
