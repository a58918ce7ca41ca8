"""Moves the KV of a request out of the pool and back, so that others can go on and nothing is computed twice."""

from __future__ import annotations

from collections.abc import Sequence

from common.engine.kv_cache.pool import KvPool
from common.engine.kv_cache.relay_state import RelayState
from common.engine.kv_cache.request_table import RequestTable
from common.engine.rotary_places import RotaryPlaces
from common.kv_cache.page_space import PageSpace
from decode_node.request import Backup, DecodeRequest


class Retraction:
    """Bounded host memory for retracted requests. Not thread-safe: the node's main loop owns it."""

    def __init__(
        self,
        pools: Sequence[KvPool],
        space: PageSpace,
        table: RequestTable,
        relay: RelayState,
        rotary: RotaryPlaces,
        max_bytes: int,
    ) -> None:
        """`pools` share page ids: the target's, and the draft's if there is one."""
        self._pools = tuple(pools)
        self._space = space
        self._table = table
        self._relay = relay
        self._rotary = rotary
        self._max_bytes = max_bytes
        self._used = 0

    @property
    def used_bytes(self) -> int:
        """Host memory that backups hold now."""
        return self._used

    def save(self, request: DecodeRequest) -> bool:
        """Free the request's pages and row; nothing of it may be in flight. False: no room, its KV is dropped."""
        assert request.in_flight == 0
        assert request.lease is not None
        pages = request.lease.pages[: self._space.pages_for(request.seq_len)]
        size = len(pages) * sum(pool.page_bytes for pool in self._pools)
        kept = self._used + size <= self._max_bytes
        if kept:
            request.backup = Backup(tuple(pool.copy_pages_out(pages) for pool in self._pools), len(pages))
            request.draft = self._relay.read_draft(request.row)
            self._used += request.backup.nbytes
        request.lease.commit(
            self._space.keys(request.computed())
        )  # still there at resume, if nobody needed the pages
        self.release(request)
        request.retract = False
        return kept

    def restore(self, request: DecodeRequest) -> bool:
        """Give the request pages and a row again, with the KV that it had. False: not enough pages yet."""
        assert request.backup is not None
        keys = self._space.keys(request.computed())
        lease = self._space.lease(
            keys,
            self._space.pages_for(request.seq_len + 1),
            max_cached_tokens=len(keys),
            salt=request.salt,
        )
        if lease is None:
            return False
        request.lease = lease
        first, count = lease.cached_pages, request.backup.num_pages
        for pool, pages in zip(self._pools, request.backup.pages, strict=True):
            # [planes, pages, ...]
            pool.copy_pages_in(lease.pages[first:count], [planes[:, first:count] for planes in pages])
        self.occupy(request)
        self.drop(request)
        return True

    def occupy(self, request: DecodeRequest) -> None:
        """Give a request with pages its row, filled with what the next step needs."""
        assert request.lease is not None
        request.row = self._table.take_row()
        self._table.append(request.row, 0, request.lease.pages)
        text = request.prompt + request.output
        assert request.seq_len == len(text) - 1, "the host knows all that was drawn"
        outputs = request.emitted + len(request.output)
        delta = self._rotary.delta(request.images)
        self._relay.write_row(request.row, text, outputs, request.sampling, request.draft, delta)

    def release(self, request: DecodeRequest) -> None:
        """Give back pages and row."""
        if request.lease is not None:
            request.lease.release()
            request.lease = None
        if request.row:
            self._table.give_row(request.row)
            request.row = 0

    def drop(self, request: DecodeRequest) -> None:
        """Forget the backup."""
        if request.backup is not None:
            self._used -= request.backup.nbytes
            request.backup = None
