"""Host memory for cached prefixes: bytes, copies to and from the device's pool, and checksums."""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from common.errors import InternalError
from common.kv_cache.host_layout import HostLayout
from common.kv_cache.plane import Kept
from common.kv_cache.pool_layout import PlacedPlane, PoolLayout
from common.node.host_lane import HostLane, LoadLane
from common.node.overlap import Completion
from kv_transfer.pair_plan import StridedRows
from kv_transfer.transport.page_digest import block_digests
from prefill_node.arriving_layers import ArrivingLayers
from prefill_node.host_plan import Checksums, HostCopy, Store, Sums

STORE_SECONDS = 60.0  # after which a copy to host memory that has not ended counts as a fault of the device
THREADS = max(min((os.cpu_count() or 1) // 2, 8), 1)  # that compute checksums


class Lanes(NamedTuple):
    """The streams of copies: from the device, and to it."""

    out: HostLane
    back: LoadLane


class _StoreCopy(NamedTuple):
    """A store that has not ended."""

    completion: Completion
    started: float


class HostStore:
    """Implements `HostMemory` and `HostCopies`. Planes are laid out as in the device's pool (host_layout.py)."""

    def __init__(
        self,
        layout: HostLayout,
        memory: Tensor,
        device: tuple[PoolLayout, Tensor],
        arriving: ArrivingLayers,
        lanes: Lanes,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`memory`: [layout.planes.total_bytes] uint8, pinned if the device is a GPU; `device`: layout and storage."""
        pool, storage = device
        self.memory = memory
        self._arriving = arriving
        self._lanes = lanes
        self._clock = clock
        self._planes = [
            _CopiedPlane(ours, storage[ours.offset :], host, memory[host.offset :])
            for ours, host in zip(pool.placed, layout.planes.placed, strict=True)
        ]
        bytes_of = memoryview(memory.numpy().data)
        size = layout.block_pages
        paged = [_rows(each, size) for each in layout.planes.placed if each.plane.kept is Kept.PAGED]
        kept = [_rows(each, 1) for each in layout.planes.placed if each.plane.kept is Kept.PER_REQUEST]
        self._block_sums = partial(block_digests, bytes_of, paged)
        self._slot_sums = partial(block_digests, bytes_of, kept)
        self._copying: dict[int, _StoreCopy] = {}
        self._threads = ThreadPoolExecutor(THREADS, "host-checksums")

    def store(self, stores: Sequence[Store]) -> None:
        """Start to copy to host memory, after all work launched so far."""
        for each in stores:
            _, completion = self._lanes.out.start(partial(self._store, each.copy))
            self._copying[each.key] = _StoreCopy(completion, self._clock())

    def load(self, loads: Sequence[HostCopy]) -> None:
        if not loads:
            return
        runs = [(_runs(each.host_pages, each.pages), _runs(*_slots(each))) for each in loads]
        layers: dict[int, list[_CopiedPlane]] = {}
        draft: list[_CopiedPlane] = []
        for plane in self._planes:
            target = plane.ours.plane.owner == "target"
            (layers.setdefault(plane.ours.plane.layer, []) if target else draft).append(plane)
        parts = [*layers.values(), *([draft] if draft else ())]
        stages = self._lanes.back.load([partial(_load, part, runs) for part in parts])
        self._arriving.expect(dict(zip(layers, stages)), stages[-1])

    def unfinished(self) -> Collection[int]:
        """Return the keys of stores whose copies have not ended. Does not wait.

        Raises InternalError if a copy takes longer than STORE_SECONDS: its pages would never be free again.
        """
        self._copying = {key: each for key, each in self._copying.items() if not each.completion.ready()}
        now = self._clock()
        for each in self._copying.values():
            if now - each.started > STORE_SECONDS:
                raise InternalError(
                    f"KV pages have not been copied to host memory within {STORE_SECONDS:.0f} s: the device does not "
                    "make progress; restart this prefill node"
                )
        return self._copying.keys()

    def check(self, blocks: Sequence[int], slots: Sequence[int]) -> Checksums:
        shares = [blocks[first::THREADS] for first in range(min(THREADS, len(blocks)))]
        return _Sums(
            [(share, self._threads.submit(_summed, self._block_sums, share)) for share in shares],
            [(slots, self._threads.submit(_summed, self._slot_sums, slots))],
        )

    def _store(self, copy: HostCopy) -> None:
        pages, slots = _runs(copy.pages, copy.host_pages), _runs(*_slots(copy)[::-1])
        for plane in self._planes:
            plane.store(pages if plane.paged else slots)


class _ItemRun(NamedTuple):
    """Consecutive items of the source that go to consecutive items of the target."""

    source: int
    target: int
    items: int


class _CopiedPlane(NamedTuple):
    """A plane on the device and on the host; the tensors begin where the plane does."""

    ours: PlacedPlane
    device: Tensor
    theirs: PlacedPlane
    host: Tensor

    @property
    def paged(self) -> bool:
        return self.ours.plane.kept is Kept.PAGED

    def store(self, runs: Iterable[_ItemRun]) -> None:
        _copy(self.device, self.host, self.ours.page_bytes, runs)

    def load(self, runs: Iterable[_ItemRun]) -> None:
        _copy(self.host, self.device, self.ours.page_bytes, runs)


def _copy(source: Tensor, target: Tensor, size: int, runs: Iterable[_ItemRun]) -> None:
    for run in runs:
        nbytes = run.items * size
        to, start = run.target * size, run.source * size
        target[to : to + nbytes].copy_(source[start : start + nbytes], non_blocking=True)


def _load(planes: Sequence[_CopiedPlane], loads: Sequence[tuple[list[_ItemRun], list[_ItemRun]]]) -> None:
    for plane in planes:
        for pages, slots in loads:
            plane.load(pages if plane.paged else slots)


def _slots(copy: HostCopy) -> tuple[list[int], list[int]]:
    """Return the slots of the host and those of the device."""
    return [host for _, host in copy.states], [ours for ours, _ in copy.states]


def _runs(sources: Sequence[int], targets: Sequence[int]) -> list[_ItemRun]:
    """Return the copies sources[i] -> targets[i] as few runs."""
    return list(_joined(zip(sources, targets, strict=True)))


def _joined(pairs: Iterable[tuple[int, int]]) -> Iterator[_ItemRun]:
    run: _ItemRun | None = None
    for source, target in pairs:
        if run is not None and (source - run.source, target - run.target) == (run.items, run.items):
            run = run._replace(items=run.items + 1)
            continue
        if run is not None:
            yield run
        run = _ItemRun(source, target, 1)
    if run is not None:
        yield run


def _rows(placed: PlacedPlane, items: int) -> StridedRows:
    """Describe units of so many items of a plane of host memory."""
    size = items * placed.page_bytes
    return StridedRows(placed.offset, size, size, 1, size)


def _summed(sums_of: Callable[[Sequence[int]], list[int]], items: Sequence[int]) -> list[int]:
    found: list[int] = []
    for item in items:
        found += sums_of([item])
        time.sleep(0)  # parts of less than 100 KB are hashed with the interpreter lock, which others wait for
    return found


Part = tuple[Sequence[int], "Future[list[int]]"]


class _Sums:
    """Implements `Checksums`."""

    def __init__(self, blocks: Sequence[Part], slots: Sequence[Part]) -> None:
        self._blocks = blocks
        self._slots = slots

    def ready(self) -> bool:
        return all(future.done() for _, future in (*self._blocks, *self._slots))

    def read(self) -> tuple[Sums, Sums]:
        return _merged(self._blocks), _merged(self._slots)


def _merged(parts: Sequence[Part]) -> Sums:
    return {
        item: digest for items, future in parts for item, digest in zip(items, future.result(), strict=True)
    }


def host_bytes(nbytes: int, device: torch.device) -> Tensor:
    """Return [nbytes] uint8 of host memory, pinned for copies of a GPU. Raises InternalError if it cannot be pinned.

    It is not allocated by torch's cache of pinned memory, which would round up to a power of two.
    """
    memory = torch.zeros(nbytes, dtype=torch.uint8)
    if device.type == "cuda":
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        status = runtime.cudaHostRegister(memory.data_ptr(), nbytes, 0)
        if int(status):
            raise InternalError(
                f"CUDA could not pin {nbytes} bytes of host memory for cached prefixes (error {int(status)}); write a "
                "lower prefill.host_mib, or raise the limit of locked memory (ulimit -l)"
            )
        # Memory that is freed while it is pinned cannot be pinned again, and who gets its address next fails.
        weakref.finalize(memory, runtime.cudaHostUnregister, memory.data_ptr()).atexit = False
    return memory
