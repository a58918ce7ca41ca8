"""The ring in shared memory: order, slow readers, frames larger than the ring, damage, and other processes."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import threading
from collections.abc import Iterator

import msgspec
import pytest

from common.errors import RankFailed
from common.ipc import ring as ring_module
from common.ipc.ring import PAGE, Ring, RingReader, RingSpec, RingWriter
from tests.fakes.waiting import PATIENCE


@pytest.fixture
def ring() -> Iterator[Ring]:
    made = Ring.create(PAGE, readers=2)
    yield made
    made.close()


def pair(ring: Ring) -> tuple[RingWriter, list[RingReader]]:
    readers = [RingReader(ring, index, "plans", 0) for index in range(len(ring.spec.bells))]
    return RingWriter(ring, "plans", [1, 2]), readers


def content(number: int) -> bytes:
    return bytes((number + index) % 251 for index in range(number * 37 % 900))


def test_every_reader_gets_every_frame_in_order(ring: Ring) -> None:
    """The frames go around the ring many times, and one of them is empty."""
    writer, readers = pair(ring)
    assert [reader.take() for reader in readers] == [None, None]
    for number in range(200):
        writer.send(content(number), PATIENCE)
        assert [reader.take() for reader in readers] == [content(number)] * 2
        assert readers[0].take() is None


def test_a_slow_reader_is_not_overwritten(ring: Ring) -> None:
    writer, (fast, slow) = pair(ring)
    sent = PAGE // 432  # frames of content(11) that fit, with their headers
    for _ in range(sent):
        writer.send(content(11), PATIENCE)
        fast.take()
    with pytest.raises(RankFailed, match="rank 2 has not read [0-9]+ bytes of plans in time") as caught:
        writer.send(content(11), 0.01)
    assert caught.value.rank == 2
    assert writer.unread(0) == 0 < writer.unread(1)
    assert [slow.take() for _ in range(sent + 1)] == [content(11)] * sent + [None]
    writer.send(b"there is room again", PATIENCE)
    assert (fast.take(), slow.take()) == (b"there is room again",) * 2


def test_time_in_which_the_writer_is_stopped_does_not_count(
    ring: Ring, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node that was stopped as a whole for an hour goes on: its ranks read when they run again."""
    writer, readers = pair(ring)
    frame = bytes(900)
    for _ in range(4):
        writer.send(frame, 0.0)
    now = 0.0

    def stopped(seconds: float) -> None:
        nonlocal now
        now += 3600
        if now > 7200:
            assert [reader.take() for reader in readers] == [frame] * 2

    monkeypatch.setattr(ring_module, "monotonic", lambda: now)
    monkeypatch.setattr(ring_module, "sleep", stopped)
    writer.send(frame, 1.0)


def test_frames_may_be_larger_than_the_ring() -> None:
    ring = Ring.create(PAGE, readers=1)
    writer, (reader,) = pair(ring)
    large = os.urandom(10 * PAGE + 5)
    sending = threading.Thread(target=lambda: [writer.send(large, PATIENCE), writer.send(b"small", PATIENCE)])
    sending.start()
    found: list[bytes] = []
    while len(found) < 2:
        assert select.select([reader], [], [], PATIENCE)[0], "nothing comes"
        reader.clear()
        while (frame := reader.take()) is not None:
            found.append(frame)
    sending.join(PATIENCE)
    assert found == [large, b"small"]
    ring.close()


def test_the_descriptor_tells_of_a_send(ring: Ring) -> None:
    writer, (reader, _) = pair(ring)
    assert select.select([reader], [], [], 0)[0] == []
    writer.send(b"one", PATIENCE)
    assert select.select([reader], [], [], 0)[0] == [reader]
    reader.clear()
    reader.clear()
    assert select.select([reader], [], [], 0)[0] == []
    assert reader.take() == b"one"


def test_a_fragment_that_is_seen_too_early_is_read_again(ring: Ring, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some processors show the published bytes before the fragment."""
    writer, (reader, other) = pair(ring)
    writer.send(b"the plan", PATIENCE)
    at = bytes(ring.data).index(b"the plan")
    ring.data[at] = 0

    def arrive() -> float:
        ring.data[at] = ord("t")
        return 0.0

    monkeypatch.setattr(ring_module, "monotonic", arrive)
    assert reader.take() == b"the plan"
    ring.data[at] = 0
    times = iter(range(10**6))
    monkeypatch.setattr(ring_module, "monotonic", lambda: float(next(times)))
    with pytest.raises(RankFailed, match="fragment 0 of plans of rank 0 is damaged"):
        other.take()


CHILD = """
import sys, msgspec, select
from common.ipc.ring import Ring, RingReader, RingSpec, RingWriter
there, back = msgspec.json.decode(sys.argv[1], type=tuple[RingSpec, RingSpec])
reader, writer = RingReader(Ring(there), 0, "there", 0), RingWriter(Ring(back), "back", [0])
while True:
    while (frame := reader.take()) is None:
        select.select([reader], [], [], 60.0)
        reader.clear()
    writer.send(frame[::-1], 60.0)
    if not frame:
        break
"""


def test_another_process_reads_and_writes() -> None:
    there, back = Ring.create(2 * PAGE, 1), Ring.create(2 * PAGE, 1)
    writer, reader = RingWriter(there, "there", [1]), RingReader(back, 0, "back", 1)
    specs: tuple[RingSpec, RingSpec] = (there.spec, back.spec)
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, msgspec.json.encode(specs).decode()],
        pass_fds=(*there.descriptors, *back.descriptors),
    )
    frames = [os.urandom(size) for size in (1, 5000, 100_000)] + [b""]
    answers = []
    try:
        for frame in frames:
            writer.send(frame, PATIENCE)
            while (answer := reader.take()) is None:
                assert select.select([reader], [], [], PATIENCE)[0], "the child does not answer"
                reader.clear()
            answers.append(answer)
        assert answers == [frame[::-1] for frame in frames]
        assert child.wait(PATIENCE) == 0
    finally:
        child.kill()
        child.wait()
    there.close()
    back.close()
