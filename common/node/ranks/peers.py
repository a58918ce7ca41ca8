"""The place of a process among the ranks of its node while it starts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from common.engine.layers.ranks import Ranks
from common.observability.startup import Progressing


class RankPeers(Progressing, Protocol):
    """The other ranks, with which this one loads a model and agrees on what it serves."""

    @property
    def ranks(self) -> Ranks:
        """The group that joins what the ranks have computed in a layer."""
        ...

    def exchange(self, own: bytes, /) -> Sequence[bytes]:
        """Give `own`, and return what all ranks give, in their order. Every rank calls it as often as the others."""
        ...
