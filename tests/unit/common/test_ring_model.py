"""Frames of any size through a ring of one page, whose readers take them when they like, against a queue for each."""

from __future__ import annotations

from collections import deque

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from common.errors import RankFailed
from common.ipc.ring import HEADER_BYTES, PAGE, Ring, RingReader, RingWriter

MANY_FRAGMENTS = st.integers(PAGE // 4, PAGE - 200)  # bytes of a frame that the empty ring holds


class Readers(RuleBasedStateMachine):
    @initialize(readers=st.integers(1, 3))
    def start(self, readers: int) -> None:
        self.ring = Ring.create(PAGE, readers)
        self.writer = RingWriter(self.ring, "the frames", range(1, readers + 1))
        self.readers = [RingReader(self.ring, index, "the frames", 0) for index in range(readers)]
        self.sent: list[deque[bytes]] = [deque() for _ in range(readers)]
        self.frames = 0

    def frame(self, size: int) -> bytes:
        self.frames += 1
        return bytes([self.frames % 251]) * size

    @rule(sizes=st.lists(st.one_of(st.integers(0, 40), st.integers(500, 900)), min_size=1, max_size=8))
    def send(self, sizes: list[int]) -> None:
        """A slow reader makes the writer wait, and then fail: it does not lose anything."""
        for size in sizes:
            frame, unread = self.frame(size), max(map(self.writer.unread, range(len(self.readers))))
            try:
                self.writer.send(frame, timeout=0.0)
            except RankFailed:
                assert unread + size + 2 * HEADER_BYTES > PAGE
                return
            for queue in self.sent:
                queue.append(frame)

    @rule(size=MANY_FRAGMENTS)
    def send_fragments(self, size: int) -> None:
        for index in range(len(self.readers)):
            self.take(index, len(self.sent[index]), woken=True)
        frame = self.frame(size)
        self.writer.send(frame, timeout=0.0)
        for queue in self.sent:
            queue.append(frame)

    @rule(index=st.integers(0, 2), count=st.integers(1, 5), woken=st.booleans())
    def take(self, index: int, count: int, woken: bool) -> None:
        index %= len(self.readers)
        if woken:
            self.readers[index].clear()
        for _ in range(count):
            expected = self.sent[index].popleft() if self.sent[index] else None
            assert self.readers[index].take() == expected

    def teardown(self) -> None:
        if not hasattr(self, "ring"):
            return
        for index in range(len(self.readers)):
            self.take(index, len(self.sent[index]) + 1, woken=True)
            assert self.writer.unread(index) == 0
        self.ring.close()


Readers.TestCase.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
TestReaders = Readers.TestCase
