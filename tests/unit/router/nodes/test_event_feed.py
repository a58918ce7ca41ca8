"""Batches of KV events in any order, with gaps: a sink hears what a publisher said, or begins anew."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from random import Random

import pytest

from common.kv_events.wire import GPU, SNAPSHOT, AllBlocksCleared, Batch, BlockRemoved, BlockStored, Event
from router.nodes import event_feed
from router.nodes.event_feed import ANSWER_SECONDS, MAX_PAUSE, MIN_PAUSE, EventFeed
from tests.fakes.clock import Clock

SIZE = 64


def stored(*blocks: int, size: int = SIZE) -> BlockStored:
    return BlockStored(blocks, None, (), size, None, GPU, None)


def removed(*blocks: int) -> BlockRemoved:
    return BlockRemoved(blocks, GPU)


def batch(*events: Event) -> Batch:
    return Batch(0.0, events, 0)


class Sink:
    """The blocks that a feed has told of."""

    def __init__(self) -> None:
        self.blocks: set[int] = set()

    def stored(self, medium: str | None, blocks: Sequence[int]) -> None:
        assert medium == GPU
        self.blocks.update(blocks)

    def removed(self, medium: str | None, blocks: Sequence[int]) -> None:
        self.blocks.difference_update(blocks)

    def cleared(self) -> None:
        self.blocks.clear()


class Following:
    """A feed, and what it tells."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.feed = EventFeed(SIZE, self.clock)
        self._sink = Sink()

    @property
    def known(self) -> set[int]:
        while self.feed.deliver(self._sink, 2):
            pass
        assert self.feed.backlog == 0
        return self._sink.blocks

    def begun(self, number: int, *blocks: int) -> Following:
        """Answer the first question."""
        assert self.feed.question() == SNAPSHOT
        self.feed.answered(number, batch(AllBlocksCleared(), stored(*blocks)))
        self.feed.ended()
        return self


def test_a_feed_begins_with_a_snapshot_and_goes_on_with_what_follows_it() -> None:
    each = Following()
    assert not each.feed.following
    assert each.feed.question() == SNAPSHOT
    assert each.feed.question() is None
    for number in (5, 6, 7):
        each.feed.heard(number, batch(stored(number)))
    each.feed.answered(6, batch(AllBlocksCleared(), stored(1, 2, 6)))
    each.feed.ended()
    assert each.feed.following
    assert each.known == {1, 2, 6, 7}, "what the snapshot has is not taken again"
    each.feed.heard(8, batch(removed(1), stored(8)))
    each.feed.heard(8, batch(stored(99)))
    assert each.known == {2, 6, 7, 8}


def test_a_publisher_that_has_said_nothing_or_has_no_snapshots_repeats_what_it_can() -> None:
    each = Following()
    assert each.feed.question() == SNAPSHOT
    each.feed.heard(9, batch(stored(9)))
    each.feed.ended()
    assert each.feed.question() == 0
    for number in (3, 4, 7):
        each.feed.answered(number, batch(stored(number)))
    each.feed.ended()
    assert each.feed.following
    assert each.known == {9}, "what precedes a batch that is gone for good may have been removed in it"


def test_what_a_publisher_without_snapshots_repeats_without_a_gap_is_kept() -> None:
    each = Following()
    assert each.feed.question() == SNAPSHOT
    each.feed.heard(7, batch(stored(7)))
    each.feed.ended()
    assert each.feed.question() == 0
    for number in (2, 4, 5, 6):
        each.feed.answered(number, batch(stored(number)))
    each.feed.ended()
    assert each.feed.following
    assert each.known == {4, 5, 6, 7}


def test_missing_batches_are_asked_for() -> None:
    each = Following().begun(4, 1)
    each.feed.heard(7, batch(removed(1)))
    assert not each.feed.following
    assert each.feed.question() is None, "questions have pauses between them"
    each.clock.now += MIN_PAUSE
    assert each.feed.question() == 5
    each.feed.heard(8, batch(stored(8)))
    for number in (5, 6, 7):
        each.feed.answered(number, batch(stored(number) if number < 7 else removed(1)))
    each.feed.ended()
    assert each.feed.following
    assert each.known == {5, 6, 8}
    assert (each.feed.take_gaps(), each.feed.take_gaps()) == (1, 0)


@pytest.mark.parametrize("repeated", [(), (6, 7), (5, 7)])
def test_what_cannot_be_repeated_is_followed_by_a_snapshot(repeated: tuple[int, ...]) -> None:
    each = Following().begun(4, 1)
    each.feed.heard(8, batch(stored(8)))
    each.clock.now += MIN_PAUSE
    assert each.feed.question() == 5
    for number in repeated:
        each.feed.answered(number, batch(stored(number)))
    each.feed.ended()
    assert not each.feed.following
    each.clock.now += 2 * MIN_PAUSE
    assert each.feed.question() == SNAPSHOT
    each.feed.answered(7, batch(AllBlocksCleared(), stored(50)))
    each.feed.ended()
    assert each.feed.following
    assert each.known == {50, 8}


def test_a_question_without_an_answer_is_asked_again_after_longer_and_longer_pauses() -> None:
    each, times = Following(), list[float]()
    while len(times) < 12:
        if each.feed.question() is not None:
            times.append(each.clock.now)
        each.clock.now += 0.1
    pauses = [round(after - before) for before, after in pairwise(times)]
    assert pauses[0] <= ANSWER_SECONDS + 2
    assert pauses == sorted(pauses)
    assert pauses[-1] == pytest.approx(ANSWER_SECONDS + MAX_PAUSE, abs=1)


def test_a_slow_answer_counts_as_long_as_it_goes_on() -> None:
    each = Following()
    each.feed.question()
    each.feed.ended()
    assert each.feed.question() == 0
    for number in range(4):
        each.clock.now += ANSWER_SECONDS - 1
        each.feed.answered(number, batch(stored(number)))
        assert each.feed.question() is None
    each.feed.ended()
    assert each.known == {0, 1, 2, 3}


def test_an_answer_to_no_question_is_ignored() -> None:
    each = Following().begun(4, 1)
    each.feed.answered(5, batch(stored(5)))
    assert each.known == {1}


def test_blocks_of_another_size_are_ignored() -> None:
    each = Following().begun(0, 1)
    each.feed.heard(1, batch(stored(5, size=16), stored(6)))
    assert each.known == {1, 6}


def test_clearing_makes_earlier_events_pointless() -> None:
    each = Following().begun(0, *range(100))
    each.feed.heard(1, batch(AllBlocksCleared(), stored(7)))
    assert each.feed.backlog == 1
    assert each.known == {7}


def test_what_is_held_while_an_answer_is_awaited_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_feed, "MAX_HELD", 10)
    each = Following()
    assert each.feed.question() == SNAPSHOT
    for number in range(5, 9):
        each.feed.heard(number, batch(stored(*range(3 * number, 3 * number + 3))))
    each.feed.answered(4, batch(AllBlocksCleared()))
    each.feed.ended()
    assert each.known == {24, 25, 26} or not each.feed.following
    each.clock.now += 2 * MIN_PAUSE
    assert each.feed.question() == SNAPSHOT, "some of it is missing"


def test_batches_dropped_at_the_bound_are_missed_although_no_later_one_is_heard(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(event_feed, "MAX_HELD", 10)
    each = Following()
    assert each.feed.question() == SNAPSHOT
    for number in (5, 6, 7):
        each.feed.heard(number, batch(stored(*range(3 * number, 3 * number + 3))))
    each.feed.answered(4, batch(AllBlocksCleared()))
    each.feed.ended()
    assert not each.feed.following


def test_events_without_blocks_are_bounded_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_feed, "MAX_HELD", 10)
    each = Following()
    assert each.feed.question() == SNAPSHOT
    each.feed.heard(1, batch(*[removed()] * 5))
    each.feed.heard(2, batch(*[removed()] * 5))
    each.feed.answered(0, batch(AllBlocksCleared()))
    each.feed.ended()
    each.feed.heard(3, batch(stored(3)))
    assert not each.feed.following, "a batch was held beyond the bound"


def test_however_much_is_lost_a_feed_agrees_with_its_publisher_in_the_end() -> None:
    rng = Random(1)
    for _ in range(50):
        each, said, present = Following(), list[Batch](), set[int]()
        kept = rng.randrange(1, 10)
        for number in range(40):
            block = rng.randrange(20)
            event: Event = removed(block) if block in present else stored(block)
            present ^= {block}
            said.append(batch(event))
            if rng.random() < 0.7:
                each.feed.heard(number, said[-1])
            each.clock.now += rng.random()
            answer(each, said, present, kept)
        present.add(99)
        said.append(batch(stored(99)))
        each.feed.heard(40, said[-1])
        for _ in range(20):
            each.clock.now += MAX_PAUSE
            answer(each, said, present, kept)
        assert each.feed.following
        assert each.known == present


def test_no_block_stays_that_a_publisher_without_snapshots_has_removed_unheard() -> None:
    """Also if some of what it repeats is lost: then fewer blocks are known than there are, but no others."""
    rng, known = Random(2), 0
    for _ in range(200):
        each, said, present = Following(), list[Batch](), set[int]()
        for number in range(30):
            block = rng.randrange(10)
            event: Event = removed(block) if block in present else stored(block)
            present ^= {block}
            said.append(batch(event))
            if rng.random() < 0.8:
                each.feed.heard(number, said[-1])
            each.clock.now += MAX_PAUSE
            if (start := each.feed.question()) is not None:
                for repeated in range(start, len(said)):
                    if rng.random() < 0.9:
                        each.feed.answered(repeated, said[repeated])
                each.feed.ended()
        present.add(99)
        said.append(batch(stored(99)))
        each.feed.heard(30, said[-1])
        if each.feed.following:
            assert each.known <= present
            known += len(each.known)
    assert known > 200, "some are known"


def answer(each: Following, said: list[Batch], present: set[int], kept: int) -> None:
    """Answer as a publisher that repeats the last `kept` batches."""
    start = each.feed.question()
    if start is None:
        return
    if start == SNAPSHOT:
        each.feed.answered(len(said) - 1, batch(AllBlocksCleared(), stored(*present)))
    else:
        for number in range(max(start, len(said) - kept), len(said)):
            each.feed.answered(number, said[number])
    each.feed.ended()
