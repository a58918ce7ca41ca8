"""Decides how many states of cached prefixes a node saves, if its model keeps a state per request."""

from __future__ import annotations

import msgspec

from common.kv_cache.pool_spec import PoolSpec

LEAST = 32  # slots that a growing budget has with any pool
# Bytes of pages in the pool for each byte of further slots.
PAGES_PER_STATE = 3
MAX_SLOTS = 65_536


class SnapshotBudget(msgspec.Struct, frozen=True):
    """A number of slots that is fixed, or that grows with the pool: a larger pool holds more prefixes to continue."""

    fixed: int = 0
    grows: bool = False

    def slots(self, pages: int, whole: PoolSpec) -> int:
        """Return the number of slots next to a pool of so many pages.

        Args:
            whole: of all ranks of the node, which must have equally many.
        """
        if not whole.state_bytes:
            return 0
        more = pages * whole.page_bytes // (PAGES_PER_STATE * whole.state_bytes) if self.grows else 0
        return min(self.fixed + more, MAX_SLOTS)

    def page_cost(self, whole: PoolSpec, held: PoolSpec) -> int:
        """Return the bytes that one more page takes of a rank, which keeps `held`: its own and those of the slots."""
        if not (self.grows and whole.state_bytes):
            return held.page_bytes
        return held.page_bytes + -(
            -held.state_bytes * whole.page_bytes // (PAGES_PER_STATE * whole.state_bytes)
        )


NO_SNAPSHOTS = SnapshotBudget()
GROWING = SnapshotBudget(LEAST, grows=True)
