"""KV pages, per-request state and draft state of retracted requests in host memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import torch

from common.engine.state.draft_row import DraftRow
from common.engine.state.pool import KvPool
from common.engine.state.relay_state import RelayState
from decode_node.step_plan import Load, Save


@dataclass(frozen=True, slots=True)
class Backup:
    """The saved data of one retracted request."""

    pages: tuple[list[torch.Tensor], ...]  # per pool, as KvPool.copy_pages_out returns them
    draft: DraftRow
    # of the target, as KvPool.copy_state_out returns it
    state: list[torch.Tensor] = field(default_factory=list)
    window: list[torch.Tensor] = field(default_factory=list)  # as StateRows.copy_row_out returns it


class Backups:
    """Backups by request key. The scheduler bounds their size (retraction.py)."""

    def __init__(self, pools: Sequence[KvPool], relay: RelayState) -> None:
        """`pools` share page ids: the target's first, then the draft's if there is one. Only targets keep state."""
        self._pools = tuple(pools)
        self._relay = relay
        self._kept: dict[int, Backup] = {}

    @property
    def nbytes(self) -> int:
        """Host memory of all backups, in bytes."""
        parts = (part for each in self._kept.values() for part in (*each.pages, each.state, each.window))
        return sum(tensor.nbytes for part in parts for tensor in part)

    def save(self, save: Save) -> None:
        """Copy to pageable host memory, with no separate limit. Waits for the device: retraction is rare."""
        pages = tuple(pool.copy_pages_out(save.pages) for pool in self._pools)
        backup = Backup(pages, self._relay.read_draft(save.row))
        if self._relay.state is not None:
            target, rows = self._pools[0], self._relay.state
            backup = replace(
                backup, state=target.copy_state_out(save.slot), window=rows.copy_row_out(save.row)
            )
        self._kept[save.key] = backup

    def load(self, load: Load) -> None:
        backup, last = self._kept[load.key], load.first + len(load.pages)
        for pool, pages in zip(self._pools, backup.pages, strict=True):
            # [planes, pages, ...]
            pool.copy_pages_in(load.pages, [planes[:, load.first : last] for planes in pages])
        self._relay.write_draft_row(load.row, backup.draft)
        if self._relay.state is not None:
            self._pools[0].copy_state_in(load.slot, backup.state)
            self._relay.state.copy_row_in(load.row, backup.window)

    def forget(self, keys: Iterable[int]) -> None:
        for key in keys:
            del self._kept[key]
