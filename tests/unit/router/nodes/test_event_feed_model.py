"""A feed of KV events while batches and answers are lost, late or skipped, against what its publisher holds."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from common.kv_events.wire import SNAPSHOT, AllBlocksCleared, Batch, Event
from router.nodes import event_feed
from router.nodes.event_feed import ANSWER_SECONDS, MAX_PAUSE, EventFeed
from tests.fakes.clock import Clock
from tests.unit.router.nodes.test_event_feed import SIZE, Sink, batch, removed, stored

Numbered = tuple[int, Batch]


class Feeds(RuleBasedStateMachine):
    @initialize(
        repeated=st.sampled_from([1, 2, 8]), held=st.sampled_from([6, 50_000]), earlier=st.integers(0, 3)
    )
    def start(self, repeated: int, held: int, earlier: int) -> None:
        """`repeated`: batches that the publisher can repeat; `earlier`: those that precede the feed."""
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(event_feed, "MAX_HELD", held)
        self.clock = Clock()
        self.feed, self.sink = EventFeed(SIZE, self.clock), Sink()
        self.present: set[int] = set()  # blocks that the publisher holds
        self.number = 0  # of its next batch
        self.kept: deque[Numbered] = deque(maxlen=repeated)
        self.stream: deque[Numbered] = deque()  # published, not heard
        self.question: int | None = None  # asked, not answered
        self.answer: deque[Numbered | None] = deque()  # not heard; None: its end
        for block in range(earlier):
            self.publish([block], cleared=False)
        self.stream.clear()

    @rule(
        blocks=st.lists(st.integers(0, 9), min_size=1, max_size=3),
        cleared=st.sampled_from([False] * 6 + [True]),
    )
    def publish(self, blocks: list[int], cleared: bool) -> None:
        events: list[Event] = [AllBlocksCleared()] if cleared else []
        if cleared:
            self.present.clear()
        for block in blocks:
            events.append(removed(block) if block in self.present else stored(block))
            self.present ^= {block}
        published = self.number, batch(*events)
        self.number += 1
        self.kept.append(published)
        self.stream.append(published)

    @rule(block=st.integers(0, 9))
    def skip(self, block: int) -> None:
        """The publisher has dropped changes, or begins again after a defect."""
        self.number += 1
        self.publish([block], cleared=True)

    @rule(count=st.integers(1, 5), lost=st.sampled_from([False, False, True]))
    def hear(self, count: int, lost: bool) -> None:
        for _ in range(min(count, len(self.stream))):
            number, published = self.stream.popleft()
            if not lost:
                self.feed.heard(number, published)

    @rule(seconds=st.sampled_from([0.1, 0.6, ANSWER_SECONDS + 1, MAX_PAUSE]))
    def time_passes(self, seconds: float) -> None:
        self.clock.now += seconds

    @rule()
    def ask(self) -> None:
        """Each question has a connection of its own."""
        question = self.feed.question()
        if question is not None:
            self.question = question
            self.answer.clear()

    @rule()
    def read_question(self) -> None:
        if self.question is None:
            return
        if self.question != SNAPSHOT:
            self.answer.extend(each for each in self.kept if each[0] >= self.question)
        elif self.number:
            snapshot = batch(AllBlocksCleared(), stored(*self.present))
            self.answer.append((self.number - 1, snapshot))
        self.answer.append(None)
        self.question = None

    @rule(count=st.integers(1, 4), breaks=st.sampled_from([False] * 5 + [True]))
    def hear_answer(self, count: int, breaks: bool) -> None:
        for _ in range(min(count, len(self.answer))):
            answered = self.answer.popleft()
            if breaks:
                self.answer.clear()
                return
            if answered is None:
                self.feed.ended()
            else:
                self.feed.answered(*answered)

    @rule(count=st.integers(1, 4))
    def exchange(self, count: int) -> None:
        """A whole question and answer, or two: random single steps seldom are."""
        for _ in range(count):
            self.hear(count, lost=False)
            self.clock.now += MAX_PAUSE
            self.ask()
            self.read_question()
            self.hear_answer(len(self.answer), breaks=False)

    @rule(blocks=st.lists(st.integers(0, 9), min_size=2, max_size=6), lost=st.integers(1, 5))
    def lose(self, blocks: list[int], lost: int) -> None:
        """Publish several batches, of which the first ones are not heard."""
        self.hear(len(self.stream), lost=False)
        for block in blocks:
            self.publish([block], cleared=False)
        self.hear(lost, lost=True)
        self.hear(len(self.stream), lost=False)

    @rule(most=st.integers(1, 3))
    def deliver(self, most: int) -> None:
        self.feed.deliver(self.sink, most)

    def teardown(self) -> None:
        """Nothing is lost any more: the feed agrees with its publisher, and goes on doing so."""
        if not hasattr(self, "feed"):
            return
        for block in range(20, 40):
            self.publish([block], cleared=False)
            self.clock.now += MAX_PAUSE + ANSWER_SECONDS
            self.hear(len(self.stream), lost=False)
            self.ask()
            self.read_question()
            self.hear_answer(len(self.answer), breaks=False)
        assert self.feed.following
        while self.feed.deliver(self.sink, 2):
            pass
        assert self.feed.backlog == 0
        assert self.sink.blocks == self.present
        self.patch.undo()


Feeds.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestFeeds = Feeds.TestCase
