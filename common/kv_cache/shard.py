"""The share of a model that one rank of a node holds: heads and vocabulary entries. No torch."""

from __future__ import annotations

from typing import Final

import msgspec

from common.errors import ModelError
from common.kv_cache.plane import HeadGroup, Plane

RANKS: Final = (1, 2, 4, 8)  # how many a node may have


def head_range(heads: int, rank: int, ranks: int) -> range:
    """Return the heads of one rank: an even share, or one replicated head if ranks outnumber heads."""
    start = rank * heads // ranks
    return range(start, start + max(1, heads // ranks))


class Shard(msgspec.Struct, frozen=True):
    """One rank of `size`. Everything that is divided among ranks is divided here, weights and planes alike."""

    rank: int = 0
    size: int = 1

    def heads(self, group: HeadGroup, what: str) -> range:
        """Return this rank's heads: an even share, or one head that several ranks hold if there are more ranks.

        Raises ModelError, which says `what` is divided, if neither is possible.
        """
        if group.heads % self.size and self.size % group.heads:
            fitting = [size for size in RANKS if not group.heads % size or not size % group.heads]
            raise ModelError(
                f"{what}: {group.heads} heads cannot be divided among {self.size} ranks; {_remedy(fitting)}"
            )
        return head_range(group.heads, self.rank, self.size)

    def addends(self, group: HeadGroup, what: str) -> range:
        """Return the heads whose outputs this rank adds to a sum over all ranks, so that each is added once.

        A group of one head is not divided, and not summed: every rank has it.
        Raises ModelError if the heads are not divided evenly.
        """
        if group.heads > 1 and group.heads % self.size:
            fitting = [size for size in RANKS if not group.heads % size]
            raise ModelError(
                f"{what}: {group.heads} heads cannot be divided evenly among {self.size} ranks; {_remedy(fitting)}"
            )
        return head_range(group.heads, self.rank, self.size)

    def tokens(self, vocab_size: int) -> range:
        """Return the entries of a vocabulary that this rank holds; shares differ by one at most."""
        return range(self.rank * vocab_size // self.size, (self.rank + 1) * vocab_size // self.size)

    def width(self, groups: tuple[HeadGroup, ...], what: str) -> int:
        """Return the number of values that this rank holds of an axis of these groups."""
        return sum(len(self.heads(group, what)) * group.width for group in groups)

    def entry(self, plane: Plane) -> tuple[int, ...]:
        """Return the shape of one entry of a plane on this rank."""
        entry = list(plane.entry)
        if plane.groups:
            entry[plane.axis] = self.width(plane.groups, plane.where)
        return tuple(entry)


WHOLE: Final = Shard()  # a model that is not divided


def _remedy(fitting: list[int]) -> str:
    """Return what to do, given the numbers of ranks that would fit; 1 always does."""
    return f"use {' or '.join(map(str, fitting))} rank{'s' if fitting[-1] > 1 else ''}"
