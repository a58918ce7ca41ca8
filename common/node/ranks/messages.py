"""The messages between rank 0 and another rank of its node while they start. Plans go through a ring."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from common.engine.collectives.endpoints import GroupEndpoint
from common.ipc.ring import RingSpec

MAX_BYTES = 1 << 28  # limit for one message, against a damaged length


class RankRings(msgspec.Struct, frozen=True):
    """The rings of one rank, as its process inherits them."""

    plans: RingSpec  # rank 0 to all others
    commands: RingSpec  # rank 0 to the transfer services of all others
    events: RingSpec  # this rank's transfer service to rank 0


class Begin(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The first message of rank 0: everything that a rank has to know."""

    node: str  # the node's name
    rank: int
    rings: RankRings
    board: int  # descriptor of the Board
    collectives: GroupEndpoint
    log_level: str
    start_hang_timeout: float  # seconds without progress after which the rank ends while it starts; 0: never
    work: bytes  # decoded by the role's entry module

    @property
    def descriptors(self) -> Sequence[int]:
        """All descriptors that the process of the rank inherits with this message."""
        rings = (self.rings.plans, self.rings.commands, self.rings.events)
        return (self.board, *self.collectives.descriptors, *(fd for ring in rings for fd in ring.descriptors))


class Gathered(msgspec.Struct, frozen=True, tag=True):
    """The contents that all ranks gave in one exchange, in the order of the ranks."""

    contents: tuple[bytes, ...]


class Loading(msgspec.Struct, frozen=True, tag=True):
    """Progress of a rank that loads its share of the model, in bytes."""

    done: int
    total: int


class Given(msgspec.Struct, frozen=True, tag=True):
    """The content that a rank gives in one exchange."""

    content: bytes


class StartFailed(msgspec.Struct, frozen=True, tag=True):
    """The reason why a rank cannot start."""

    kind: Literal["config", "model", "hang", "defect"]
    path: str  # key of the cluster file, for "config"
    problem: str


FromRank = Loading | Given | StartFailed
ToRank = Begin | Gathered
