"""KV pages, per-request state and draft state of retracted requests in host memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, TypeVar

import torch

from common.engine.state.pool import KvPool
from common.engine.state.relay_state import RelayState
from common.errors import InternalError
from common.node.host_lane import HostLane
from common.node.overlap import Completion
from common.observability.logs import Log
from decode_node.step_plan import Load, Save

Copied = TypeVar("Copied")

SAVE_SECONDS = 60.0  # after which a save that has not ended counts as a fault of the device


@dataclass(frozen=True, slots=True)
class Backup:
    """The saved data of one retracted request. It may be read once its save has ended."""

    pages: tuple[list[torch.Tensor], ...]  # per pool, as KvPool.copy_pages_out returns them
    draft: list[torch.Tensor]  # as RelayState.draft_copies returns it
    # of the target, as KvPool.state_copies returns it
    state: list[torch.Tensor] = field(default_factory=list)
    window: list[torch.Tensor] = field(default_factory=list)  # as StateRows.row_copies returns it

    def tensors(self) -> Iterator[torch.Tensor]:
        """Yield everything that was saved."""
        for part in (*self.pages, self.draft, self.state, self.window):
            yield from part


def allocated(nbytes: int, pinned: bool) -> int:
    """Return the memory that a tensor takes: torch rounds blocks of pinned memory up to powers of two."""
    return 1 << (nbytes - 1).bit_length() if pinned and nbytes else nbytes


class _Copying(NamedTuple):
    """A save that has not ended."""

    completion: Completion
    started: float


class Backups:
    """Backups by request key. The scheduler bounds their size (retraction.py).

    A save does not wait for the device. What it reads must not be reused before `unsaved` no longer names its key.
    """

    def __init__(
        self,
        pools: Sequence[KvPool],
        relay: RelayState,
        lane: HostLane,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`pools` share page ids: the target's first, then the draft's if there is one. Only targets keep state."""
        self._pools = tuple(pools)
        self._relay = relay
        self._pinned = self._pools[0].device.type == "cuda"
        self._lane = lane
        self._clock = clock
        self._log = Log("backups")
        self._kept: dict[int, Backup] = {}
        self._copying: dict[int, _Copying] = {}  # also of backups that were forgotten meanwhile

    @property
    def nbytes(self) -> int:
        """Host memory of all backups, in bytes."""
        tensors = (tensor for each in self._kept.values() for tensor in each.tensors())
        return sum(allocated(tensor.nbytes, self._pinned) for tensor in tensors)

    def size_of(self, num_pages: int) -> int:
        """Return the host memory that a backup of this many pages takes, in bytes."""
        parts = [num_pages * each for pool in self._pools for each in pool.page_copies]
        parts += self._relay.draft_copies.nbytes
        if self._relay.state is not None:
            parts += [*self._pools[0].state_copies.nbytes, *self._relay.state.row_copies.nbytes]
        return sum(allocated(each, self._pinned) for each in parts)

    def save(self, save: Save) -> None:
        """Start to copy to host memory, which is pinned on a GPU if possible, with no separate limit."""
        self._kept[save.key], completion = self._lane.start(lambda: self._copy(save))
        self._copying[save.key] = _Copying(completion, self._clock())

    def unsaved(self) -> Collection[int]:
        """Return the keys whose save has not ended. Does not wait.

        Raises InternalError if a save takes longer than SAVE_SECONDS: its pages would never be free again.
        """
        self._copying = {key: each for key, each in self._copying.items() if not each.completion.ready()}
        now = self._clock()
        for key, each in self._copying.items():
            if now - each.started > SAVE_SECONDS:
                raise InternalError(
                    f"the KV pages of request {key} have not been copied to host memory within {SAVE_SECONDS:.0f} s: "
                    "the device does not make progress; restart this decode node"
                )
        return frozenset(self._copying)

    def load(self, load: Load) -> None:
        """Copy a backup to the device, after its save has ended there."""
        if load.key in self._copying:
            self._lane.follow()
        backup, last = self._kept[load.key], load.first + len(load.pages)
        for pool, pages in zip(self._pools, backup.pages, strict=True):
            # [planes, pages, ...]
            wanted = [planes[:, load.first : last] for planes in pages]
            self._with_less_memory(partial(pool.copy_pages_in, load.pages, wanted))
        self._relay.draft_copies.copy_in(load.row, backup.draft)
        if self._relay.state is not None:
            self._pools[0].state_copies.copy_in(load.slot, backup.state)
            self._relay.state.row_copies.copy_in(load.row, backup.window)

    def forget(self, keys: Iterable[int]) -> None:
        """Drop backups. A save in progress goes on, and `unsaved` still names it."""
        for key in keys:
            del self._kept[key]

    def _with_less_memory(self, copy: Callable[..., Copied]) -> Copied:
        """Copy pages at once or, if the device has no memory to gather them, one by one."""
        try:
            return copy()
        except torch.OutOfMemoryError as error:
            reason = str(error).partition("\n")[0]
            self._log.warning(
                "too little device memory to copy the KV pages of a retracted request at once: copying them one by one",
                reason=reason,
            )
            return copy(one_by_one=True)

    def _copy(self, save: Save) -> Backup:
        pages = tuple(
            self._with_less_memory(partial(pool.copy_pages_out, save.pages)) for pool in self._pools
        )
        draft = self._relay.draft_copies.copy_out(save.row)
        if self._relay.state is None:
            return Backup(pages, draft)
        state = self._pools[0].state_copies.copy_out(save.slot)
        return Backup(pages, draft, state, self._relay.state.row_copies.copy_out(save.row))
