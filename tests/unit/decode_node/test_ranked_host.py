"""Copies to and from the host memory of a decode node with several ranks have ended when all ranks have ended them."""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from contextlib import closing
from dataclasses import dataclass, field

import pytest

from common.kv_cache.host_plan import INTACT, Comparison, Damage, HostCopy, HostFetch, Store
from common.node.ranks.board import Board
from common.node.ranks.ended_copies import SHOWN
from decode_node.host_fetches import HostFetches, HostMoves
from decode_node.ranked_host import FetchedByAll, RankFetches
from decode_node.step_plan import Moves

PAGES = (8, 9, 10)


@dataclass
class LateComparison:
    """A comparison that the test ends."""

    done: bool = False
    damage: Damage = INTACT

    def follow(self) -> None:
        raise AssertionError("no step waits for a fetch")

    def ready(self) -> bool:
        return self.done

    def read(self) -> Damage:
        assert self.done
        return self.damage


@dataclass
class LateMemory:
    """The host memory of one rank, whose copies the test ends."""

    stores: list[int] = field(default_factory=list)  # keys of those that have not ended
    loads: list[LateComparison] = field(default_factory=list)

    def store(self, stores: Sequence[Store]) -> None:
        self.stores += [each.key for each in stores]

    def load(self, loads: Sequence[HostCopy]) -> Comparison:
        self.loads.append(LateComparison())
        return self.loads[-1]

    def unfinished(self) -> Collection[int]:
        return list(self.stores)

    def close(self) -> None:
        pass


class RankedHost:
    """Rank 0 and two others."""

    def __init__(self, board: Board) -> None:
        self.memories = [LateMemory() for _ in range(3)]
        first, *others = [HostFetches(each) for each in self.memories]
        self.first = FetchedByAll(first, board, 3)
        self.others = [
            RankFetches(own, lambda told, value, rank=rank: board.write(rank, told, value))  # type: ignore[misc]
            for rank, own in enumerate(others, start=1)
        ]

    def apply(self, stores: Sequence[int] = (), fetches: Sequence[int] = ()) -> None:
        copy = HostCopy(pages=(1, 2, 3), host_pages=PAGES)
        moves = Moves(
            stores=tuple(Store(key=key, copy=copy) for key in stores),
            fetches=tuple(HostFetch(key=key, copy=copy) for key in fetches),
        )
        ranks: tuple[HostMoves, ...] = (self.first, *self.others)
        for each in ranks:
            each.apply(moves)

    def turn(self) -> list[bool]:
        return [each.turn() for each in self.others]


def test_a_store_ends_when_all_ranks_have_ended_it() -> None:
    with closing(Board.create()) as board:
        ranks = RankedHost(board)
        ranks.apply(stores=[3, 5])
        for memory in (ranks.memories[2], ranks.memories[0], ranks.memories[1]):
            assert ranks.turn()[0]
            assert set(ranks.first.unfinished()) == {3, 5}
            memory.stores.remove(3)
        assert ranks.turn() == [True, True]
        assert set(ranks.first.unfinished()) == {5}
        for memory in ranks.memories:
            memory.stores.clear()
        assert ranks.turn() == [False, False]
        assert not ranks.first.unfinished()


@pytest.mark.parametrize("damaged", [0, 1, 2])
def test_a_fetch_is_intact_only_if_it_is_so_on_all_ranks(damaged: int) -> None:
    with closing(Board.create()) as board:
        ranks = RankedHost(board)
        ranks.apply(fetches=[1])
        ranks.memories[damaged].loads[0].damage = Damage(pages=(9,))
        for memory in ranks.memories[::-1]:
            ranks.turn()
            assert not ranks.first.fetched()
            memory.loads[0].done = True
        ranks.turn()
        found = ranks.first.fetched()
        assert found == {1: Damage(pages=(9,)) if damaged == 0 else Damage(pages=PAGES)}
        assert not ranks.first.fetched(), "each once"
        assert ranks.turn() == [False, False]


def test_copies_may_end_in_any_order_on_each_rank() -> None:
    """More fetches than a rank shows verdicts for, some of them damaged on some rank."""
    rng = random.Random(4)
    with closing(Board.create()) as board:
        ranks = RankedHost(board)
        expected, found, key = dict[int, bool](), dict[int, bool](), 0
        while key < 3 * SHOWN or len(found) < len(expected):
            if key < 3 * SHOWN and len(expected) - len(found) < SHOWN // 2:
                key += 1
                ranks.apply(fetches=[key])
                expected[key] = rng.random() < 0.2
                if expected[key]:
                    rng.choice(ranks.memories).loads[-1].damage = Damage(pages=(9,))
            for memory in ranks.memories:
                copying = [each for each in memory.loads if not each.done]
                if copying and rng.random() < 0.7:
                    rng.choice(copying).done = True
            for other in rng.sample(ranks.others, k=rng.randint(0, 2)):
                other.turn()
            found |= {each: any(damage) for each, damage in ranks.first.fetched().items()}
        assert found == expected


def test_nothing_is_kept_of_copies_that_have_ended() -> None:
    with closing(Board.create()) as board:
        ranks = RankedHost(board)
        for key in range(100):
            ranks.apply(stores=[key])
            for memory in ranks.memories:
                memory.stores.clear()
            ranks.turn()
            assert not ranks.first.unfinished()
        assert not ranks.first.copies.busy
