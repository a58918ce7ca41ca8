"""Follows the KV events of one node: puts batches in order, and asks for missing ones. It has no socket of its own.

A feed begins with a request for a snapshot, which holds everything up to the number of the latest batch; events that
arrive meanwhile wait. After a gap in the numbers, the missing batches are requested. If the node cannot repeat them,
the feed begins again with a snapshot. Publishers without snapshots answer that request with nothing; then the batches
that they can repeat without a gap have to suffice.

(start) ─> snapshot asked ─> following ──gap──> repetition asked ──complete──> following
               └──nothing──> repetition from 0 asked ─> following  └──incomplete──> snapshot asked
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from common.kv_events.wire import SNAPSHOT, AllBlocksCleared, Batch, BlockStored, Event, hash_of

ANSWER_SECONDS = 5.0  # after which a question counts as unanswered
MIN_PAUSE, MAX_PAUSE = 0.5, 30.0  # seconds between two questions
# Blocks, and events and batches without any, that are heard while an answer is awaited; of more, all are missing that
# precede the latest batch.
MAX_HELD = 50_000


class EventSink(Protocol):
    """Takes the events of one node."""

    def stored(self, medium: str | None, blocks: Sequence[int]) -> None: ...
    def removed(self, medium: str | None, blocks: Sequence[int]) -> None: ...
    def cleared(self) -> None: ...


class EventFeed:
    """The state of one incarnation's events."""

    def __init__(self, block_tokens: int, clock: Callable[[], float]) -> None:
        """`block_tokens`: events about blocks of another size are ignored."""
        self._block_tokens = block_tokens
        self._clock = clock
        self._expected: int | None = None  # number of the next batch; None: nothing is known
        self._wanted: int | None = SNAPSHOT  # what to ask for
        self._asked: int | None = None  # question whose answer is awaited
        self._asked_at = 0.0
        self._answers = 0
        self._not_before = 0.0
        self._pause = MIN_PAUSE
        self._takes_gaps = False  # the answer is all that there is, whatever is missing in it
        self._held: list[tuple[int, Batch]] = []
        self._held_size = 0
        self._events: deque[Event] = deque()
        self.backlog = 0  # blocks that no sink has been given
        self._gaps = 0

    @property
    def following(self) -> bool:
        """Return whether everything that was heard is complete and in order."""
        return self._expected is not None and self._wanted is None and self._asked is None

    def heard(self, number: int, batch: Batch) -> None:
        """Take a published batch."""
        if not self.following:
            self._hold(number, batch)
        elif number == self._expected:
            self._take(number, batch)
            self._pause = MIN_PAUSE
        elif self._expected is not None and number > self._expected:
            self._gaps += 1
            self._hold(number, batch)
            self._wanted = self._expected

    def question(self) -> int | None:
        """Return what to ask the node now, each question once; None: nothing. Earlier answers no longer count."""
        now = self._clock()
        if self._asked is not None and now - self._asked_at > ANSWER_SECONDS:
            self._later(SNAPSHOT)
        if self._wanted is None or now < self._not_before:
            return None
        self._asked, self._wanted = self._wanted, None
        self._asked_at, self._answers = now, 0
        self._not_before = now + self._pause
        return self._asked

    def answered(self, number: int, batch: Batch) -> None:
        """Take a batch of the answer to the latest question."""
        self._asked_at = self._clock()
        expected = self._expected or 0
        if self._asked == SNAPSHOT:
            self._forget()
            self._take(number, batch)
            self._answers += 1
        elif self._asked is not None and (number == expected or (self._takes_gaps and number > expected)):
            self._take(number, batch)

    def ended(self) -> None:
        """Note the end of the answer to the latest question."""
        if self._asked == SNAPSHOT and not self._answers:
            self._forget()
            self._expected, self._asked, self._wanted, self._takes_gaps = 0, None, 0, True
            self._not_before = 0.0
            return
        self._asked = None
        takes_gaps, self._takes_gaps = self._takes_gaps, False
        held, self._held, self._held_size = self._held, [], 0
        for number, batch in held:
            expected = self._expected or 0
            if number == expected or (takes_gaps and number > expected):
                self._take(number, batch)
            elif number > expected:
                self._hold(number, batch)
        if self._held:
            self._later(SNAPSHOT)

    def take_gaps(self) -> int:
        """Return how many gaps there were since the last call."""
        gaps, self._gaps = self._gaps, 0
        return gaps

    def deliver(self, sink: EventSink, most: int) -> int:
        """Deliver up to `most` blocks to `sink`, in order; return how many there were."""
        delivered = 0
        while self._events and delivered < most:
            event = self._events.popleft()
            if isinstance(event, AllBlocksCleared):
                sink.cleared()
                delivered += 1
                continue
            blocks = [hash_of(each) for each in event.block_hashes[: most - delivered]]
            if isinstance(event, BlockStored):
                sink.stored(event.medium, blocks)
            else:
                sink.removed(event.medium, blocks)
            delivered += len(blocks)
            self.backlog -= len(blocks)
            if len(blocks) < len(event.block_hashes):
                rest = event.block_hashes[len(blocks) :]
                self._events.appendleft(msgspec.structs.replace(event, block_hashes=rest))
        return delivered

    def _hold(self, number: int, batch: Batch) -> None:
        size = 1 + sum(_size(event) for event in batch.events)
        if self._held_size + size > MAX_HELD:
            # The latest one stays: its number says that others are missing.
            self._held, self._held_size = [], 0
        self._held.append((number, batch))
        self._held_size += size

    def _take(self, number: int, batch: Batch) -> None:
        if number != self._expected:
            # A batch that is missing for good may have removed what is known so far.
            self._forget()
        self._expected = number + 1
        for event in batch.events:
            if isinstance(event, AllBlocksCleared):
                self._forget()
            elif event.block_hashes and (
                not isinstance(event, BlockStored) or event.block_size == self._block_tokens
            ):
                self._events.append(event)
                self.backlog += len(event.block_hashes)

    def _forget(self) -> None:
        """Empty the sink, before which nothing has to be delivered any more."""
        self._events.clear()
        self._events.append(AllBlocksCleared())
        self.backlog = 0

    def _later(self, question: int) -> None:
        """Ask after a pause, which becomes longer each time until batches follow each other again."""
        self._asked, self._wanted = None, question
        self._takes_gaps = False
        self._pause = min(2 * self._pause, MAX_PAUSE)
        self._not_before = max(self._not_before, self._clock() + self._pause)


def _size(event: Event) -> int:
    return 1 if isinstance(event, AllBlocksCleared) else max(len(event.block_hashes), 1)
