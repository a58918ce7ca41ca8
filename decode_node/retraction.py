"""Decides which data of a request is saved when it leaves the batch for lack of pages, so that none is recomputed.

The copies themselves are moves of a plan (step_plan.py); host memory for them is bounded here. On nodes that keep
cached prefixes in host memory, pages are kept there (host_tier.py), and only the rest of a row is saved on its own.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from typing import NamedTuple

from common.engine.forward.rotary_places import RotaryPlaces
from common.kv_cache.page_space import PageLease, PageSpace
from decode_node.batch_rows import BatchRows
from decode_node.held_pages import HeldPages
from decode_node.host_tier import NO_TIER, DecodeTier
from decode_node.request import BackupSize, DecodeRequest
from decode_node.step_plan import Join, Load, Save


class _Leaving(NamedTuple):
    """The pages and the row that a retracted request holds until it is saved under `key`."""

    key: int
    lease: PageLease
    row: int
    held: HeldPages | None


class Retraction:
    """Bounded host memory for retracted requests. Not thread-safe: the node's main loop owns it."""

    def __init__(
        self,
        space: PageSpace,
        rows: BatchRows,
        rotary: RotaryPlaces,
        max_bytes: int,
        size_of: Callable[[int], int],
        tier: DecodeTier = NO_TIER,
    ) -> None:
        """`size_of` returns the host memory of a backup of this many pages, in bytes; `tier` may hold pages instead."""
        self._space = space
        self._rows = rows
        self._rotary = rotary
        self._max_bytes = max_bytes
        self._size_of = size_of
        self._tier = tier
        self._used = 0
        self._leaving: list[_Leaving] = []  # saved by the next plan
        self._saving: dict[int, list[_Leaving]] = {}  # generation of an unread plan -> saved by it
        self._copying: list[_Leaving] = []  # their plans are read, their saves may not have ended
        self._unsaved: Container[int] = ()  # keys of saves that had not ended at the latest `settle`

    @property
    def used_bytes(self) -> int:
        """Host memory of all backups, including planned ones, in bytes."""
        return self._used

    @property
    def frees_pages(self) -> bool:
        """True if pages of retracted requests become free once they are saved."""
        return bool(self._leaving or self._saving or self._copying)

    def save(self, request: DecodeRequest) -> bool:
        """Save and free the pages and the row of a request without steps in flight. False: its KV was dropped."""
        assert request.in_flight == 0
        assert request.lease is not None
        pages = request.lease.pages[: self._space.pages_for(request.seq_len)]
        backup = self._backup(request, pages)
        # At resume the prefix cache still has the pages unless other requests needed them.
        request.lease.commit(self._space.keys(request.computed()))
        request.retract = False
        if backup is None:
            self.release(request)
            return False
        request.backup = backup
        self._used += backup.nbytes
        own = () if backup.held else tuple(pages)
        self._rows.save(Save(request.room, request.row, own, request.lease.slot))
        self._leaving.append(_Leaving(request.room, request.lease, request.row, backup.held))
        request.lease, request.row = None, 0
        return True

    def _backup(self, request: DecodeRequest, pages: Sequence[int]) -> BackupSize | None:
        """Set memory aside for a request; None if there is too little."""
        size = self._size_of(0 if self._tier.keeps_retracted else len(pages))
        most = self._max_bytes - self._used - size
        if most < 0:
            return None
        if not self._tier.keeps_retracted:
            return BackupSize(len(pages), size)
        held = self._tier.store_retracted(request, pages, most)
        return None if held is None else BackupSize(len(pages), size + held.nbytes, held)

    def planned(self, generation: int) -> None:
        """Record that the moves so far are part of this plan."""
        if self._leaving:
            self._saving[generation], self._leaving = self._leaving, []

    def read(self, generation: int) -> None:
        """Note that a plan has been read: `settle` frees the pages and rows that it saves."""
        self._copying += self._saving.pop(generation, ())

    def settle(self, unsaved: Container[int]) -> None:
        """Free the pages and rows of read plans whose saves have ended; `unsaved` are the keys of the others."""
        self._unsaved, copying, self._copying = unsaved, self._copying, []
        for each in copying:
            if each.key in unsaved or (each.held is not None and each.held.storing):
                self._copying.append(each)
            else:
                each.lease.release()
                self._rows.give(each.row)

    def restore(self, request: DecodeRequest) -> bool:
        """Give a request pages and a row with its saved KV.

        Return False if there are not enough pages yet, or something is still being copied: the step would wait for it.
        """
        backup = request.backup
        assert backup is not None
        if request.room in self._unsaved or (backup.held is not None and backup.held.storing):
            return False
        if request.lease is None and not self._lease(request, backup):
            return False
        if request.fetching:
            return False
        lease = request.lease
        assert lease is not None
        self.occupy(request)
        # Pages that are held elsewhere have been fetched.
        first = last = 0
        if backup.held is None:
            first, last = lease.cached_pages, backup.num_pages
        self._rows.load(Load(request.room, request.row, first, tuple(lease.pages[first:last]), lease.slot))
        self.drop(request)
        return True

    def _lease(self, request: DecodeRequest, backup: BackupSize) -> bool:
        """Lease pages for a request that resumes, and fetch what is held. Return False if that cannot begin yet."""
        if backup.held is not None and not self._tier.can_fetch:
            return False
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
        if backup.held is not None:
            self._tier.fetch_retracted(request, backup.held)
        return True

    def occupy(self, request: DecodeRequest) -> None:
        """Give a request that has pages a row with the inputs of its next step."""
        assert request.lease is not None
        request.row = self._rows.take()
        self._rows.append(request.row, 0, request.lease.pages)
        text = [*request.prompt, *request.output]
        assert request.seq_len == len(text) - 1, "the host knows all that was drawn"
        self._rows.join(
            Join(
                row=request.row,
                text=text,
                outputs=request.emitted + len(request.output),
                sampling=request.sampling,
                rope_delta=self._rotary.delta(request.images),
                slot=request.lease.slot,
                draft=request.draft,
            )
        )

    def release(self, request: DecodeRequest) -> None:
        """Release pages and row."""
        if request.lease is not None:
            request.lease.release()
            request.lease = None
        if request.row:
            self._rows.give(request.row)
            request.row = 0

    def drop(self, request: DecodeRequest) -> None:
        """Drop the backup, after the plan that may load it has done so."""
        if request.backup is not None:
            if request.backup.held is not None:
                self._tier.free_retracted(request.backup.held)
            self._used -= request.backup.nbytes
            request.backup = None
            self._rows.forget(request.room)
