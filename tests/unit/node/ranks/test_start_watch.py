"""Ranks that start: how long they may be without a sign of life, and that loading is no reason to end."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from common.errors import RankFailed
from common.node.ranks.board import Board, BoardField
from common.node.ranks.start_watch import StartWatch

STEP = 0.1


class Rig:
    """A board, and a watch whose clock moves only with `after`."""

    def __init__(self) -> None:
        self.board = Board.create()
        self._now = 0.0
        self.watch = StartWatch([41, 42], self.board, lambda: self._now)

    def after(self, seconds: float) -> None:
        """Let time pass in which rank 0 looks as often as it does when it waits."""
        for _ in range(round(seconds / STEP)):
            self.look_after(STEP)

    def look_after(self, seconds: float) -> None:
        self._now += seconds
        self.watch.check()

    def beat(self, *ranks: int) -> None:
        for rank in ranks:
            self.board.write(rank, BoardField.BEAT, self.board.read(rank, BoardField.BEAT) + 1)


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig()
    yield made
    made.board.close()


def test_the_first_beat_of_every_rank_is_awaited_for_five_minutes(rig: Rig) -> None:
    rig.beat(1)
    for _ in range(2):
        rig.after(100.0)
        rig.beat(1)
    rig.after(98.0)
    problem = re.escape(
        "rank 2 (process 42) has shown no sign of life in 300 s: let it continue if it is stopped"
    )
    with pytest.raises(RankFailed, match=problem) as caught:
        rig.after(3.0)
    assert caught.value.rank == 2


def test_a_start_that_may_be_slow_may_be_slow_to_import(rig: Rig) -> None:
    rig.watch.begin(400.0)
    rig.after(399.0)
    with pytest.raises(RankFailed, match="rank 1 .* has shown no sign of life in 400 s"):
        rig.after(2.0)
    rig.watch.begin(0.0)
    rig.after(500.0)


def test_a_rank_that_has_begun_may_be_without_a_beat_for_two_minutes(rig: Rig) -> None:
    rig.after(250.0)
    rig.beat(1, 2)
    rig.after(119.0)
    rig.beat(2)
    with pytest.raises(RankFailed, match="rank 1 does not run: it is stopped") as caught:
        rig.after(2.0)
    assert caught.value.rank == 1


def test_loading_takes_as_long_as_it_takes_while_ranks_beat(rig: Rig) -> None:
    for _ in range(60):
        rig.beat(1, 2)
        rig.after(60.0)


def test_time_in_which_rank_0_does_not_look_does_not_count(rig: Rig) -> None:
    for _ in range(100):
        rig.look_after(600.0)
