"""Aborts at every station, quarantine, damaged and repeated writes and messages, deadlines, floods."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from common.errors import (
    ChecksumFailed,
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    NodeLost,
    Overloaded,
    TransferFailed,
)
from kv_transfer import messages
from kv_transfer.events import Arrived, Delivered, PagesFree, RoomFailed, SlotsGranted, TransferLost
from kv_transfer.handoff_record import HandoffRecord
from kv_transfer.limits import TransferLimits
from kv_transfer.messages import AbortAck, AbortTransfer, PagesWritten, RecordWritten, SenderFailed, Slots
from kv_transfer.transport.base import Region
from tests.fakes.loopback import Fabric, Fault
from tests.unit.kv_transfer.rig import (
    LIMITS,
    RECORD,
    Clock,
    Decode,
    Prefill,
    page_bytes,
    same_pages,
    send_all,
)


class Rig:
    """One prefill and one decode node after their handshake, over a loopback without fence (like shm)."""

    def __init__(
        self,
        plan: dict[int, Fault] | None = None,
        *,
        fencing: bool = False,
        limits: TransferLimits = LIMITS,
        sender_limits: TransferLimits | None = None,
        **kw: Any,
    ) -> None:
        self.clock = Clock()
        faults = plan or {}
        self.fabric = Fabric(self.clock, lambda n: faults.get(n, Fault()))
        incarnation = secrets.token_hex(16)
        self.prefill = Prefill(
            self.clock, self.fabric.sender(incarnation), sender_limits or limits, incarnation=incarnation
        )
        incarnation = secrets.token_hex(16)
        self.decode = Decode(
            self.clock,
            self.fabric.receiver(incarnation, fencing=fencing),
            limits,
            incarnation=incarnation,
            **kw,
        )
        self.connect()
        self.decode.pump()
        self.sender, self.receiver = self.prefill.sender, self.decode.receiver

    def connect(self, deliver: Callable[[bytes], object] | None = None) -> None:
        self.decode.connect(self.prefill, deliver)

    def begin(self, room: int = 1, pages: tuple[int, ...] = (4, 5), deadline: float | None = None) -> int:
        generation = self.receiver.open(room, (self.prefill.incarnation,), pages, 0, deadline)
        self.sender.expect(room)
        assert SlotsGranted(room) in self.prefill.poll()
        return generation

    def say(self, message: messages.ToReceiver) -> None:
        """Inject a frame as if the prefill node had sent it."""
        self.receiver.handle(self.prefill.incarnation, messages.encode(message, self.prefill.incarnation))

    def ask(self, message: messages.ToSender) -> None:
        self.sender.handle(self.decode.identity, messages.encode(message, self.decode.incarnation))

    def answers(self) -> list[messages.ToReceiver]:
        said = [messages.decode_for_receiver(frame)[1] for _, frame in self.prefill.sent]
        self.prefill.sent.clear()
        return said

    def assert_idle(self) -> None:
        assert (self.sender.active, self.receiver.active, self.receiver.quarantined_pages) == (0, 0, 0)
        assert self.receiver.rooms.holds_nothing


# ---- aborts by the decode node


def test_abort_before_any_write_is_acknowledged_at_once() -> None:
    rig = Rig()
    rig.begin()
    for _ in range(2):
        rig.receiver.abort(1, "client gone", "client_gone")
    assert (rig.receiver.counters.aborted, rig.receiver.counters.quarantined) == (1, 1)
    assert rig.receiver.quarantined_pages == 2
    assert rig.prefill.poll() == [TransferLost(1, "client_gone", "client gone")]
    assert rig.decode.poll() == [PagesFree(1, (4, 5))]
    rig.sender.send_pages(1, [1, 2], 0)  # the prefill node has not read the abort yet: ignored
    rig.sender.finish(1, RECORD)
    rig.assert_idle()


def test_abort_while_writing_waits_until_the_writes_have_landed() -> None:
    rig = Rig({0: Fault(delay=3.0)})
    generation = rig.begin()
    rig.sender.send_pages(1, [1], 0)
    rig.receiver.abort(1, "enough")
    rig.sender.send_pages(1, [2], 1)  # nothing is posted any more
    assert (rig.prefill.poll(), rig.decode.poll()) == ([], [])
    assert (rig.sender.draining, rig.receiver.quarantined_pages) == (1, 2)
    before = page_bytes(rig.decode.kv, rig.decode.layout, 4)
    rig.clock.now += 3
    assert rig.prefill.poll() == [TransferLost(1, TransferFailed.code, "enough")]
    assert page_bytes(rig.decode.kv, rig.decode.layout, 4) != before  # it landed, in quarantine
    assert rig.answers()[-1] == AbortAck(1, generation)
    assert rig.decode.poll() == [PagesFree(1, (4, 5))]
    rig.assert_idle()


def test_news_of_pages_does_not_end_a_quarantine() -> None:
    rig = Rig({1: Fault(delay=3.0)})
    rig.begin()
    rig.sender.send_pages(1, [1], 0)  # landed, and its announcement is in the inbox
    rig.sender.send_pages(1, [2], 1)  # still in transfer
    rig.receiver.abort(1, "x")
    assert rig.decode.poll() == []
    assert rig.receiver.quarantined_pages == 2
    rig.clock.now += 3
    rig.prefill.poll()
    assert rig.decode.poll() == [PagesFree(1, (4, 5))]


def test_the_window_is_shut_before_the_record_is_believed() -> None:
    rig = Rig(fencing=True)
    generation = rig.begin()
    assert generation in rig.fabric.receivers[rig.decode.incarnation].windows
    send_all(rig.prefill, 1, [1, 2])
    assert isinstance(rig.decode.poll()[0], Arrived)
    assert not rig.fabric.receivers[rig.decode.incarnation].windows


def test_abort_while_the_record_is_on_the_way_and_after_it_arrived() -> None:
    rig = Rig({1: Fault(delay=1.0)})
    rig.begin()
    send_all(rig.prefill, 1, [1, 2])
    rig.decode.pump()
    rig.receiver.abort(1, "late")
    rig.clock.now += 1
    assert rig.prefill.poll() == [TransferLost(1, TransferFailed.code, "late")]
    assert rig.decode.poll() == [PagesFree(1, (4, 5))]
    rig.begin(2)
    send_all(rig.prefill, 2, [1, 2])
    rig.decode.pump()
    rig.receiver.abort(2, "before the node looked")  # Arrived is withdrawn
    assert rig.decode.poll() == [PagesFree(2, (4, 5))]
    rig.begin(3)
    send_all(rig.prefill, 3, [1, 2])
    assert isinstance(rig.decode.poll()[0], Arrived)
    rig.receiver.abort(3, "after the node looked")
    assert rig.decode.poll() == [PagesFree(3, (4, 5))]
    rig.prefill.poll()
    rig.assert_idle()


def test_a_record_that_lands_before_the_abort_is_read_ends_the_quarantine() -> None:
    rig = Rig()
    rig.begin()
    send_all(rig.prefill, 1, [1, 2])  # RecordWritten waits in the inbox
    rig.receiver.abort(1, "crossing")
    assert rig.prefill.poll() == [Delivered(1)]
    assert rig.decode.poll() == [PagesFree(1, (4, 5))]
    rig.assert_idle()


def test_an_unanswered_abort_is_repeated_and_no_timeout_frees_the_pages() -> None:
    rig = Rig()
    heard: list[bytes] = []
    deaf: list[bool] = []
    rig.connect(lambda frame: heard.append(frame) if deaf else rig.sender.handle(rig.decode.identity, frame))
    rig.decode.pump()
    rig.begin()
    deaf.append(True)
    rig.receiver.abort(1, "x")
    for _ in range(1000):
        rig.clock.now += 5
        assert rig.decode.poll() == []
    assert rig.receiver.quarantined_pages == 2
    assert len(heard) == 1001
    assert rig.receiver.counters.abort_retries == 1000
    rig.sender.handle(rig.decode.identity, heard[-1])
    assert rig.decode.poll() == [PagesFree(1, (4, 5))]
    # a repetition is acknowledged again but otherwise ignored
    rig.sender.handle(rig.decode.identity, heard[0])
    assert rig.decode.poll() == []


def test_a_poisoned_room_never_acks_until_its_process_is_dead() -> None:
    rig = Rig({0: Fault(damage="stick")})
    rig.begin()
    rig.sender.send_pages(1, [1, 2], 0)
    rig.receiver.abort(1, "x")
    rig.clock.now += 10_000
    assert (rig.prefill.poll(), rig.decode.poll(), rig.sender.draining) == ([], [], 1)
    rig.receiver.peer_lost(rig.prefill.incarnation)
    assert rig.decode.poll() == []  # lost does not mean dead
    assert rig.receiver.quarantined_pages == 2
    rig.fabric.kill(rig.prefill.incarnation)
    assert rig.decode.poll() == [PagesFree(1, (4, 5))]
    rig.fabric.unstick()
    rig.fabric.advance()
    assert page_bytes(rig.decode.kv, rig.decode.layout, 4) == bytes(rig.decode.layout.page_bytes)


def test_a_prefill_node_that_has_ended_posts_nothing_more() -> None:
    """Its sender still exists in this process; the fabric of the test answers for the one that has ended."""
    rig = Rig()
    rig.begin()
    before = page_bytes(rig.decode.kv, rig.decode.layout, 4)
    landed: list[Region] = []
    rig.fabric.observers.append(lambda _receiver, region, *_: landed.append(region))
    rig.fabric.kill(rig.prefill.incarnation)
    send_all(rig.prefill, 1, [1, 2])
    rig.prefill.poll()
    rig.fabric.advance()
    assert landed == []
    assert page_bytes(rig.decode.kv, rig.decode.layout, 4) == before


def test_late_writes_cannot_hit_pages_that_another_room_got() -> None:
    """With a fence the pages are free at once, and a write that lands later is rejected."""
    rig = Rig({0: Fault(delay=5.0)}, fencing=True)
    rig.begin(1)
    rig.sender.send_pages(1, [1, 2], 0)
    rig.receiver.abort(1, "x")
    assert rig.decode.poll() == [PagesFree(1, (4, 5))]
    rig.begin(2)  # the same pages
    rig.clock.now += 5
    rig.prefill.poll()
    assert page_bytes(rig.decode.kv, rig.decode.layout, 4) == bytes(rig.decode.layout.page_bytes)
    send_all(rig.prefill, 2, [8, 9])
    assert isinstance(rig.decode.poll()[0], Arrived)
    assert same_pages(rig.prefill, [8, 9], rig.decode, [4, 5])


def test_pages_in_the_hands_of_a_room_cannot_be_given_again() -> None:
    rig = Rig({0: Fault(damage="stick")})
    rig.begin(1)
    rig.sender.send_pages(1, [1], 0)
    rig.receiver.abort(1, "x")
    with pytest.raises(InternalError, match="belongs to another room"):
        rig.receiver.open(2, (rig.prefill.incarnation,), [5], 0)
    with pytest.raises(InternalError, match="outside of the pool"):
        rig.receiver.open(2, (rig.prefill.incarnation,), [99], 0)
    with pytest.raises(InternalError, match="listed twice"):
        rig.receiver.open(2, (rig.prefill.incarnation,), [1, 1], 0)


def test_an_abort_that_overtakes_the_prompt_and_one_without_slots() -> None:
    rig = Rig()
    rig.receiver.open(1, (rig.prefill.incarnation,), [1], 0)
    rig.receiver.abort(1, "gone", "client_gone")
    assert rig.decode.poll() == [PagesFree(1, (1,))]
    rig.sender.expect(1)
    assert rig.prefill.poll() == [TransferLost(1, "client_gone", "gone")]
    rig.sender.expect(2)
    rig.ask(AbortTransfer(2, 50, "c", "slots were lost"))
    assert rig.prefill.poll() == [TransferLost(2, "c", "slots were lost")]
    rig.answers()
    rig.ask(Slots(2, 50, (1,), 0, 0))  # they arrive after all
    assert rig.answers() == [AbortAck(2, 50)]
    rig.ask(AbortTransfer(3, 7, "c", "never heard of"))
    assert rig.answers() == [AbortAck(3, 7)]


def test_an_abort_of_another_generation_does_not_touch_the_room() -> None:
    rig = Rig()
    generation = rig.begin()
    rig.answers()
    rig.ask(AbortTransfer(1, generation + 1, "c", "r"))
    assert rig.answers() == [AbortAck(1, generation + 1)]
    send_all(rig.prefill, 1, [1, 2])
    assert isinstance(rig.decode.poll()[0], Arrived)


# ---- ends by the prefill node


def test_cancel_before_and_after_the_slots_came() -> None:
    rig = Rig({0: Fault(delay=1.0)})
    rig.begin(1)
    rig.sender.send_pages(1, [1], 0)
    rig.sender.cancel(1, "finished", "the first token was the last")
    rig.sender.cancel(1, "other", "the first cause stays")
    assert (rig.prefill.poll(), rig.decode.poll()) == ([], [])
    rig.clock.now += 1
    assert rig.prefill.poll() == [TransferLost(1, "finished", "the first token was the last")]
    assert rig.decode.poll() == [
        RoomFailed(1, "finished", "the first token was the last"),
        PagesFree(1, (4, 5)),
    ]
    rig.sender.expect(2)
    rig.sender.cancel(2, "finished", "eos")
    assert rig.prefill.poll() == [TransferLost(2, "finished", "eos")]
    rig.receiver.open(2, (rig.prefill.incarnation,), [4], 0)
    assert rig.decode.poll() == [RoomFailed(2, "finished", "eos"), PagesFree(2, (4,))]
    rig.assert_idle()


@pytest.mark.parametrize(
    ("fault", "counter"),
    [
        (Fault(damage="drop"), "checksum_failures"),
        (Fault(damage="truncate"), "checksum_failures"),
        (Fault(damage="corrupt"), "checksum_failures"),
    ],
)
def test_damaged_pages_never_arrive(fault: Fault, counter: str) -> None:
    rig = Rig({0: fault})
    rig.begin()
    send_all(rig.prefill, 1, [1, 2])
    failed, free = rig.decode.poll()
    assert isinstance(failed, RoomFailed)
    assert failed.code == ChecksumFailed.code
    assert "differs from what was sent" in failed.reason
    assert free == PagesFree(1, (4, 5))
    assert getattr(rig.receiver.counters, counter) == 1
    rig.prefill.poll()
    rig.assert_idle()


@pytest.mark.parametrize(("damage", "cause"), [("drop", "magic"), ("truncate", "crc"), ("corrupt", "magic")])
def test_damaged_records_never_arrive(damage: str, cause: str) -> None:
    rig = Rig({1: Fault(damage=damage)})  # type: ignore[arg-type]
    rig.begin()
    send_all(rig.prefill, 1, [1, 2])
    failed, free = rig.decode.poll()
    assert isinstance(failed, RoomFailed)
    assert failed.code == TransferFailed.code
    assert free == PagesFree(1, (4, 5))
    assert rig.receiver.counters.record_failures == {cause: 1}
    assert rig.receiver.counters.checksum_failures == 0


def test_duplicated_writes_are_harmless_and_failed_ones_end_the_room() -> None:
    rig = Rig({0: Fault(damage="duplicate"), 1: Fault(damage="duplicate"), 2: Fault(damage="fail")})
    rig.begin(1)
    send_all(rig.prefill, 1, [1, 2])
    assert isinstance(rig.decode.poll()[0], Arrived)
    rig.receiver.close(1)
    rig.prefill.poll()
    rig.begin(2)
    send_all(rig.prefill, 2, [1, 2])
    (lost,) = rig.prefill.poll()
    assert isinstance(lost, TransferLost)
    assert lost.code == TransferFailed.code
    failed, free = rig.decode.poll()
    assert isinstance(failed, RoomFailed)
    assert (failed.room, free) == (2, PagesFree(2, (4, 5)))
    rig.assert_idle()


def test_without_checksums_damage_passes_and_both_sides_must_agree() -> None:
    rig = Rig({0: Fault(damage="corrupt")}, limits=msgspec.structs.replace(LIMITS, verify_checksums=False))
    rig.begin()
    send_all(rig.prefill, 1, [1, 2])
    assert isinstance(rig.decode.poll()[0], Arrived)
    strict = Rig(sender_limits=msgspec.structs.replace(LIMITS, verify_checksums=False))
    strict.begin()
    send_all(strict.prefill, 1, [1, 2])
    (failed, _) = strict.decode.poll()
    assert isinstance(failed, RoomFailed)
    assert "same verify_checksums" in failed.reason
    assert strict.receiver.counters.record_failures == {"pages": 1}


def test_a_record_too_large_for_its_slot_fails_the_room() -> None:
    rig = Rig()
    rig.begin()
    rig.sender.send_pages(1, [1, 2], 0)
    rig.sender.finish(
        1, HandoffRecord(first_token=1, num_tokens=1, draft_hidden=bytes(2000), draft_hidden_dtype="float16")
    )
    (lost,) = rig.prefill.poll()
    assert isinstance(lost, TransferLost)
    assert lost.code == InternalError.code
    assert "raise record_bytes" in lost.reason


def test_the_record_is_not_written_before_every_page_has_landed() -> None:
    rig = Rig({0: Fault(delay=2.0), 1: Fault(delay=4.0)})
    rig.begin()
    send_all(rig.prefill, 1, [1, 2], chunk=1)
    for _ in range(4):
        assert rig.prefill.poll() == []
        assert rig.fabric.writes == 2
        rig.clock.now += 1
    assert rig.prefill.poll() == [Delivered(1)]
    assert rig.fabric.writes == 3
    periodic = messages.Welcome | messages.Working
    said = [type(message) for message in rig.answers() if not isinstance(message, periodic)]
    assert said == [PagesWritten, PagesWritten, RecordWritten]


def test_a_record_slot_used_again_does_not_show_the_former_record() -> None:
    rig = Rig({3: Fault(damage="drop")}, record_slots=1)
    rig.begin(1)
    send_all(rig.prefill, 1, [1, 2])
    assert isinstance(rig.decode.poll()[0], Arrived)
    rig.receiver.close(1)
    rig.prefill.poll()
    rig.begin(1)  # even for the same room
    send_all(rig.prefill, 1, [1, 2])
    assert isinstance(rig.decode.poll()[0], RoomFailed)
    assert rig.receiver.counters.record_failures == {"generation": 1}


# ---- repeated, late and foreign messages


def test_repeated_announcements_change_nothing() -> None:
    rig = Rig()
    generation = rig.begin()
    rig.sender.send_pages(1, [1, 2], 0)
    rig.decode.pump()
    rig.say(PagesWritten(1, generation, 0, 2))
    rig.say(PagesWritten(1, generation, 5, 2**31))
    rig.sender.finish(1, RECORD)
    (arrived,) = rig.decode.poll()
    rig.say(RecordWritten(1, generation, 100))
    rig.say(PagesWritten(1, generation, 0, 2))
    rig.say(SenderFailed(1, generation, "c", "r"))
    assert rig.decode.poll() == []
    assert isinstance(arrived, Arrived)
    assert rig.receiver.counters.duplicates == 5
    rig.receiver.close(1)
    rig.say(RecordWritten(1, generation, 100))
    assert rig.receiver.counters.unknown_room == 1
    rig.begin(1)  # the room again: announcements of the former generation are stale
    rig.say(RecordWritten(1, generation, 100))
    rig.say(SenderFailed(1, generation, "c", "r"))
    assert rig.receiver.counters.stale_generation == 2
    assert rig.decode.poll() == []


def test_an_announcement_by_another_peer_is_ignored() -> None:
    rig = Rig()
    generation = rig.begin()
    other = secrets.token_hex(16)
    rig.receiver.connect(other, lambda frame: None)
    for message in (
        SenderFailed(1, generation, "c", "r"),
        AbortAck(1, generation),
        RecordWritten(1, generation, 1),
    ):
        rig.receiver.handle(other, messages.encode(message, other))
    rig.receiver.handle(
        rig.prefill.incarnation, messages.encode(SenderFailed(1, generation, "c", "r"), other)
    )
    assert (rig.receiver.counters.unknown_room, rig.receiver.counters.stale_incarnation) == (2, 1)
    assert rig.decode.poll() == []
    rig.receiver.handle(secrets.token_hex(16), b"from nobody")
    rig.receiver.handle(rig.prefill.incarnation, b"noise")
    rig.sender.handle(b"anybody", b"noise")
    assert (rig.receiver.counters.malformed, rig.sender.counters.malformed) == (1, 1)


def test_slots_are_checked_and_granted_once() -> None:
    rig = Rig()
    rig.answers()
    for pages, slot, says in (
        ((99,), 0, "outside of the pool"),
        ((1, 1), 0, "named twice"),
        ((1,), 4, "record slot 4"),
    ):
        rig.ask(Slots(1, 1, pages, slot, 0))
        (answer,) = rig.answers()
        assert isinstance(answer, SenderFailed)
        assert says in answer.reason
    assert rig.sender.counters.invalid_slots == 3
    rig.sender.expect(2)
    rig.ask(Slots(2, 5, (1,), 0, 0))
    rig.ask(Slots(2, 5, (1,), 0, 0))  # a repetition
    assert rig.answers() == []
    rig.ask(Slots(2, 6, (2,), 1, 0))  # another grant
    (answer,) = rig.answers()
    assert isinstance(answer, SenderFailed)
    assert (answer.generation, rig.sender.counters.duplicate_slots) == (6, 2)
    granted = rig.sender.slots(2)
    assert granted is not None
    assert granted.generation == 5
    rig.sender.expect(3, decodes=(secrets.token_hex(16),))
    rig.ask(Slots(3, 7, (3,), 2, 0))
    (answer,) = rig.answers()
    assert isinstance(answer, SenderFailed)
    assert "another decode node" in answer.reason


def test_misuse_by_the_own_node_raises_an_error() -> None:
    rig = Rig(record_slots=1)
    rig.begin()
    with pytest.raises(InvalidRequest, match="active already"):
        rig.sender.expect(1)
    with pytest.raises(InvalidRequest, match="active already"):
        rig.receiver.open(1, (rig.prefill.incarnation,), [1], 0)
    with pytest.raises(Overloaded, match="record slots"):
        rig.receiver.open(2, (rig.prefill.incarnation,), [1], 0)
    with pytest.raises(InternalError, match="0 is next"):
        rig.sender.send_pages(1, [1], 1)
    with pytest.raises(InternalError, match="slots are for 2"):
        rig.sender.send_pages(1, [1, 2, 3], 0)
    with pytest.raises(InternalError, match="finished after page 0"):
        rig.sender.finish(1, RECORD)
    with pytest.raises(InternalError, match="not expected"):
        rig.sender.send_pages(9, [1], 0)
    with pytest.raises(InternalError, match="abort it instead"):
        rig.receiver.close(1)
    rig.sender.expect(5)
    with pytest.raises(InternalError, match="wait for SlotsGranted"):
        rig.sender.send_pages(5, [1], 0)
    rig.sender.cancel(77, "c", "unknown rooms are ignored")
    rig.receiver.abort(77, "unknown rooms are ignored")
    rig.receiver.close(77)


# ---- time

SLOTS_WAIT = LIMITS.slots_timeout


def test_a_wait_ends_at_its_alarm_although_the_difference_is_rounded_down() -> None:
    """Else `poll` would look at the room again and again, for ever."""
    rig = Rig()
    rig.clock.now = start = next(
        time for time in (1000.1 + n / 10 for n in range(1000)) if time + SLOTS_WAIT - time < SLOTS_WAIT
    )
    rig.sender.expect(7)
    rig.clock.now = start + SLOTS_WAIT
    (lost,) = rig.prefill.poll()
    assert isinstance(lost, TransferLost)
    assert "granted no slots" in lost.reason


def test_deadlines_by_progress_and_by_the_request() -> None:
    rig = Rig()
    rig.sender.expect(7)
    rig.clock.now += LIMITS.slots_timeout
    (lost,) = rig.prefill.poll()
    assert isinstance(lost, TransferLost)
    assert "granted no slots within 60 s" in lost.reason
    assert rig.sender.counters.ungranted == 1

    rig.begin(1)
    rig.clock.now += LIMITS.first_page_timeout - 1
    assert rig.decode.poll() == []
    rig.sender.send_pages(1, [1], 0)
    rig.decode.pump()
    rig.clock.now += LIMITS.stall_timeout - 1
    assert rig.decode.poll() == []
    rig.sender.send_pages(1, [2], 1)
    rig.decode.pump()
    rig.clock.now += LIMITS.stall_timeout
    (failed,) = rig.decode.poll()
    assert isinstance(failed, RoomFailed)
    assert "no progress for 10 s" in failed.reason
    assert rig.decode.poll() == [PagesFree(1, (4, 5))]  # the abort was acknowledged

    rig.begin(2)
    rig.clock.now += LIMITS.first_page_timeout
    (failed,) = rig.decode.poll()
    assert isinstance(failed, RoomFailed)
    assert "no page came" in failed.reason
    rig.decode.poll()

    rig.begin(3, deadline=rig.clock.now + 2)
    rig.clock.now += 2
    (lost,) = [e for e in rig.prefill.poll() if e.room == 3]
    assert isinstance(lost, TransferLost)
    assert lost.code == DeadlineExceeded.code
    assert [type(e) for e in rig.decode.poll()] == [RoomFailed, PagesFree]
    rig.begin(4, deadline=rig.clock.now + 2)
    rig.sender.send_pages(4, [1], 0)
    rig.clock.now += 2
    failed, *_ = rig.decode.poll()
    assert isinstance(failed, RoomFailed)
    assert rig.receiver.counters.timeouts == {"stall": 1, "first_page": 1, "deadline": 1}
    rig.prefill.poll()
    rig.decode.poll()
    rig.assert_idle()


def test_a_stalled_write_is_given_up_but_not_settled() -> None:
    rig = Rig({0: Fault(damage="stick")})
    rig.begin()
    rig.sender.send_pages(1, [1], 0)
    rig.prefill.poll()
    rig.clock.now += LIMITS.stall_timeout
    assert rig.prefill.poll() == []
    assert (rig.sender.counters.stalled, rig.sender.draining) == (1, 1)
    assert rig.sender.poll_interval is not None
    assert all(not isinstance(said, SenderFailed) for said in rig.answers())
    rig.sender.peer_lost(rig.decode.incarnation)  # releasing the memory settles it
    (lost,) = rig.prefill.poll()
    assert isinstance(lost, TransferLost)
    assert "no byte reached" in lost.reason


def test_a_queued_write_is_not_stalled_while_bytes_move() -> None:
    rig = Rig({0: Fault(delay=8.0), 1: Fault(delay=16.0)})
    rig.begin(1, (1,))
    rig.begin(2, (2,))
    rig.sender.send_pages(1, [1], 0)
    rig.sender.send_pages(2, [2], 0)
    for _ in range(16):
        assert rig.prefill.poll() == []
        rig.clock.now += 1
    rig.prefill.poll()
    assert rig.sender.counters.stalled == 0
    assert rig.sender.counters.pages_written == 2


def test_the_death_of_a_prefill_node_fails_its_rooms_at_once() -> None:
    rig = Rig({0: Fault(delay=9.0)})
    rig.begin()
    rig.sender.send_pages(1, [1, 2], 0)
    rig.fabric.kill(rig.prefill.incarnation)
    failed, free = rig.decode.poll()
    assert isinstance(failed, RoomFailed)
    assert (failed.code, free) == (NodeLost.code, PagesFree(1, (4, 5)))
    rig.decode.poll()
    assert not rig.receiver.links


def test_a_prompt_that_is_worked_on_is_waited_for_and_a_forgotten_one_is_not() -> None:
    """A wait has no limit while the other side keeps naming the room; it ends seconds after the last message."""
    rig = Rig()
    rig.begin(1)
    for _ in range(20):
        rig.clock.now += LIMITS.first_page_timeout - 1
        assert rig.prefill.poll() == []
        assert rig.decode.poll() == []
    del rig.sender.rooms[1]  # a bug: nobody will ever write these pages
    rig.prefill.poll()
    rig.clock.now += LIMITS.first_page_timeout
    assert isinstance(rig.decode.poll()[0], RoomFailed)


def test_a_prefill_node_announces_that_it_will_be_busy() -> None:
    """Long work is announced before it begins: meanwhile the loop is silent, but no room is lost."""
    rig = Rig()
    rig.begin(1)
    rig.clock.now += 1
    rig.sender.heartbeats.announce(5 * LIMITS.first_page_timeout)
    rig.decode.pump()
    rig.clock.now += 5 * LIMITS.first_page_timeout - 1
    assert rig.decode.poll() == []
    rig.receiver.open(2, (rig.prefill.incarnation,), [7], 0)
    rig.clock.now += LIMITS.first_page_timeout
    assert rig.decode.poll() == []
    rig.clock.now += 1
    assert {type(event) for event in rig.decode.poll()} >= {RoomFailed}


def test_long_work_is_announced_for_rooms_that_are_new_or_come_meanwhile() -> None:
    """A prompt is computed at once, often before its slots arrive, so no message has named its room yet."""
    rig = Rig()
    rig.begin(1)
    rig.sender.heartbeats.announce(5 * LIMITS.first_page_timeout)
    rig.decode.pump()
    rig.receiver.open(2, (rig.prefill.incarnation,), [7], 0)
    rig.clock.now += 5 * LIMITS.first_page_timeout - 1
    assert rig.decode.poll() == []


def test_pages_that_land_do_not_shorten_the_announced_time() -> None:
    """A prefill node announces work once if later launches fit into that time; pages of each chunk land meanwhile."""
    rig = Rig()
    rig.begin(1)
    rig.sender.heartbeats.announce(5 * LIMITS.stall_timeout)
    rig.decode.pump()
    rig.sender.send_pages(1, [1], 0)
    rig.decode.pump()
    rig.clock.now += 5 * LIMITS.stall_timeout
    assert rig.decode.poll() == []
    rig.clock.now += LIMITS.stall_timeout
    (failed, *_) = rig.decode.poll()
    assert isinstance(failed, RoomFailed)
    assert "no progress" in failed.reason


def test_work_that_ends_early_delays_no_deadline() -> None:
    """The first launch of a node is announced with a minute or more, and may take a tenth of a second."""
    rig = Rig()
    rig.begin(1)
    rig.clock.now += 1
    rig.sender.heartbeats.announce(5 * LIMITS.first_page_timeout)
    rig.clock.now += 1
    rig.sender.heartbeats.announce(0.0)
    rig.prefill.poll()
    rig.decode.pump()
    del rig.sender.rooms[1]  # a bug: nobody will ever write these pages
    rig.clock.now += LIMITS.first_page_timeout
    assert isinstance(rig.decode.poll()[0], RoomFailed)


def test_a_prompt_is_named_however_often_its_decode_node_announces_work() -> None:
    rig = Rig()
    rig.receiver.open(1, (rig.prefill.incarnation,), [4, 5], 0)
    rig.sender.expect(1, decodes=(rig.decode.incarnation,))
    for _ in range(8):
        rig.clock.now += LIMITS.first_page_timeout / 4
        rig.receiver.heartbeats.announce(LIMITS.first_page_timeout)
        rig.receiver.heartbeats.send_due([(rig.prefill.incarnation, 9)])
        rig.prefill.poll()
        assert rig.decode.poll() == []


def two_that_wait_for_slots() -> Rig:
    """Return a rig whose prompts 1 and 2 wait for their decode node, which is known by another request."""
    rig = Rig()
    rig.begin(9)
    rig.decode.pump()
    for room in (1, 2):
        rig.sender.expect(room, decodes=(rig.decode.incarnation,))
    return rig


def lost_rooms(rig: Rig) -> list[int]:
    return [event.room for event in rig.prefill.poll() if isinstance(event, TransferLost)]


def test_requests_that_wait_for_pages_over_there_are_not_lost() -> None:
    rig = two_that_wait_for_slots()
    for _ in range(20):
        rig.clock.now += LIMITS.slots_timeout - 1
        rig.receiver.heartbeats.send_due([(rig.prefill.incarnation, 1)])
        assert lost_rooms(rig) in ([], [2])
    assert list(rig.sender.rooms) == [9, 1]
    rig.clock.now += LIMITS.slots_timeout
    assert lost_rooms(rig) == [1]


def test_work_of_a_decode_node_that_ends_early_delays_no_deadline() -> None:
    rig = two_that_wait_for_slots()
    rig.receiver.heartbeats.announce(5 * LIMITS.slots_timeout)
    rig.prefill.poll()
    rig.clock.now += LIMITS.slots_timeout
    assert lost_rooms(rig) == []
    rig.receiver.heartbeats.announce(0.0)
    for lost in ([], [], [2]):
        rig.receiver.heartbeats.send_due([(rig.prefill.incarnation, 1)])
        assert lost_rooms(rig) == lost
        rig.clock.now += LIMITS.slots_timeout - 1
    rig.clock.now += 1
    assert lost_rooms(rig) == [1]


def test_a_full_socket_is_counted_and_the_room_ends_by_its_deadline() -> None:
    rig = Rig()
    rig.begin()
    rig.prefill.decodes.clear()
    send_all(rig.prefill, 1, [1, 2])
    assert rig.prefill.poll() == [Delivered(1)]
    assert rig.sender.counters.unsent == 2
    rig.prefill.decodes[rig.decode.identity] = rig.decode
    rig.clock.now += LIMITS.first_page_timeout
    assert isinstance(rig.decode.poll()[0], RoomFailed)
    assert rig.decode.poll() == [PagesFree(1, (4, 5))]


# ---- floods


def test_a_flood_of_unknown_rooms_is_bounded_and_answered() -> None:
    rig = Rig(limits=msgspec.structs.replace(LIMITS, early_slots=64, early_slots_per_peer=32))
    rig.receiver.open(9, (rig.prefill.incarnation,), [1], 0)
    for room in range(100_000, 110_000):
        rig.ask(Slots(room, room, (), 1, 0))
        rig.ask(AbortTransfer(room + 10**6, 1, "c", "r"))
    assert len(rig.sender.early) == 32
    assert len(rig.sender.aborted) == 64
    assert rig.sender.active == 0
    assert sum(isinstance(m, SenderFailed) for m in rig.answers()) == 10_000 - 31
    rig.sender.expect(9)  # slots from before the flood still exist
    assert SlotsGranted(9) in rig.prefill.poll()
    rig.clock.now += LIMITS.early_ttl
    rig.prefill.poll()
    assert (len(rig.sender.early), len(rig.sender.aborted)) == (0, 0)
    assert sum(isinstance(m, SenderFailed) for m in rig.answers()) == 31


def test_early_slots_cannot_hold_more_pages_than_the_pool_of_their_node() -> None:
    rig = Rig()
    for room in range(10):
        rig.ask(Slots(room, room + 1, tuple(range(6)), 1, 0))
    assert len(rig.sender.early) == 2  # 12 of 16 pages
    rig.sender.expect(0)
    rig.ask(Slots(20, 20, tuple(range(6)), 1, 0))
    assert len(rig.sender.early) == 2


def test_a_hundred_thousand_unknown_rooms_at_default_limits() -> None:
    rig = Rig()
    frame = bytearray(messages.encode(Slots(2**62, 1, (), 1, 0), rig.decode.incarnation))
    at = bytes(frame).index((2**62).to_bytes(8, "big"))
    for room in range(100_000):
        frame[at : at + 8] = (2**62 + room).to_bytes(8, "big")
        rig.sender.handle(rig.decode.identity, bytes(frame))
        rig.prefill.sent.clear()
    rig.decode.inbox.clear()
    assert len(rig.sender.early) == LIMITS.early_slots_per_peer
    assert rig.sender.counters.early_evicted == 100_000 - LIMITS.early_slots_per_peer


def test_ended_rooms_are_remembered_for_a_bounded_time() -> None:
    rig = Rig(limits=msgspec.structs.replace(LIMITS, early_slots=16))
    for room in range(1000):
        rig.sender.expect(room)
        rig.sender.cancel(room, "finished", "eos")
    assert len(rig.sender.ended) == 16
    rig.prefill.poll()
    rig.clock.now += LIMITS.early_ttl
    rig.prefill.poll()
    assert len(rig.sender.ended) == 0


def test_another_decode_node_cannot_abort_a_room_whose_generation_it_guesses() -> None:
    """Generations count from one on every node, so two nodes often have the same."""
    rig = Rig({0: Fault(delay=3.0)})
    generation = rig.begin()
    incarnation = secrets.token_hex(16)
    other = Decode(rig.clock, rig.fabric.receiver(incarnation), incarnation=incarnation, node="decode-1")
    other.connect(rig.prefill)
    other.pump()
    rig.sender.send_pages(1, [1, 2], 0)
    frame = messages.encode(AbortTransfer(1, generation, "x", "y"), other.incarnation)
    rig.sender.handle(other.identity, frame)
    assert (rig.prefill.poll(), rig.sender.draining) == ([], 0)
    rig.sender.finish(1, RECORD)
    rig.clock.now += 3
    assert rig.prefill.poll() == [Delivered(1)]
    assert isinstance(rig.decode.poll()[0], Arrived)


def test_a_pause_between_chunks_is_no_stall() -> None:
    """Only time in which bytes wait counts: the forward of the next chunk may take long."""
    rig = Rig({1: Fault(delay=LIMITS.stall_timeout / 2)})
    rig.begin()
    rig.sender.send_pages(1, [1], 0)
    assert rig.prefill.poll() == []
    rig.clock.now += 2 * LIMITS.stall_timeout
    assert rig.prefill.poll() == []
    rig.sender.send_pages(1, [2], 1)
    assert rig.prefill.poll() == []
    rig.clock.now += LIMITS.stall_timeout / 2
    rig.sender.finish(1, RECORD)
    assert rig.prefill.poll() == [Delivered(1)]
    counters, size = rig.sender.counters, rig.decode.layout.page_bytes
    record = sum(each.length for each in rig.answers() if isinstance(each, RecordWritten))
    assert (counters.pages_written, counters.delivered, counters.stalled) == (2, 1, 0)
    assert counters.bytes_written == 2 * size + record
