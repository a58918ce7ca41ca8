"""KV pages and draft state of retracted requests in host memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from common.engine.state.draft_row import DraftRow
from common.engine.state.pool import KvPool
from common.engine.state.relay_state import RelayState
from decode_node.step_plan import Load, Save


@dataclass(frozen=True, slots=True)
class Backup:
    """One retracted request."""

    pages: tuple[list[torch.Tensor], ...]  # per pool, as KvPool.copy_pages_out returns them
    draft: DraftRow


class Backups:
    """By key. The scheduler bounds how much is kept (retraction.py)."""

    def __init__(self, pools: Sequence[KvPool], relay: RelayState) -> None:
        """`pools` share page ids: the target's, and the draft's if there is one."""
        self._pools = tuple(pools)
        self._relay = relay
        self._kept: dict[int, Backup] = {}

    @property
    def nbytes(self) -> int:
        """Host memory that is held now."""
        kept = self._kept.values()
        return sum(planes.nbytes for backup in kept for pages in backup.pages for planes in pages)

    def save(self, save: Save) -> None:
        """Waits for the device: retraction is rare, and pageable memory has no limit of its own."""
        pages = tuple(pool.copy_pages_out(save.pages) for pool in self._pools)
        self._kept[save.key] = Backup(pages, self._relay.read_draft(save.row))

    def load(self, load: Load) -> None:
        backup, last = self._kept[load.key], load.first + len(load.pages)
        for pool, pages in zip(self._pools, backup.pages, strict=True):
            # [planes, pages, ...]
            pool.copy_pages_in(load.pages, [planes[:, load.first : last] for planes in pages])
        self._relay.write_draft_row(load.row, backup.draft)

    def forget(self, keys: Iterable[int]) -> None:
        for key in keys:
            del self._kept[key]
