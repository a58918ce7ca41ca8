"""The heartbeats of a node with several ranks, as rank 0 sends them."""

from __future__ import annotations

from collections.abc import Callable

from kv_transfer.heartbeats import MIN_ANNOUNCED_SECONDS
from kv_transfer.ranks.channel import AnnounceWork


class GroupHeartbeats:
    """Announces work to the peers of all ranks. Everything else is told by each rank to its own peers."""

    def __init__(
        self, announce: Callable[[float], None], command_ranks: Callable[[AnnounceWork], None]
    ) -> None:
        """`announce` reaches the peers of rank 0, `command_ranks` the other ranks."""
        self._announce = announce
        self._ranks_know = 0.0  # seconds of work that the other ranks were told last
        self._command_ranks = command_ranks

    def announce(self, seconds: float) -> None:
        self._announce(seconds)
        # Less than this counts as nothing.
        known = seconds if seconds >= MIN_ANNOUNCED_SECONDS else 0.0
        if known or self._ranks_know:
            self._command_ranks(AnnounceWork(known))
        self._ranks_know = known
