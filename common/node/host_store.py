"""Host memory for cached prefixes: bytes, copies to and from the device's pool, and checksums.

Checksums are computed on the device, of the pages that a store reads and of those that a load has written. So they
cover the copies and the time in between, and cost what the device takes to read its own memory once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cached_property, partial
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor

from common.errors import InternalError
from common.kv_cache.host_layout import HostLayout
from common.kv_cache.host_plan import NOTHING_LOADED, Comparison, Damage, HostCopy, Store
from common.kv_cache.plane import Kept
from common.kv_cache.pool_layout import PlacedPlane, PoolLayout
from common.node.host_bytes import HostBytes
from common.node.host_lane import HostLane, LoadLane, Stage
from common.node.overlap import Completion

STORE_SECONDS = 60.0  # after which a copy to host memory that has not ended counts as a fault of the device

Numbers = npt.NDArray[np.int64]


class Lanes(NamedTuple):
    """The streams of copies: from the device, and to it."""

    out: HostLane
    back: LoadLane


class Sums(Protocol):
    """The checksums of some pages and state slots, which add up plane by plane on the current stream."""

    def add_pages(self) -> None: ...

    def add_states(self, planes: Iterable[int], /) -> None:
        """Add those of these planes that are kept per request, counted as in the layout."""
        ...

    def on_host(self) -> Tensor:
        """Return [pages + slots] int64, readable once the current stream has reached this point."""
        ...


class PoolCopies(Protocol):
    """Copies bytes, and sums up pages and slots of one pool, on the current stream."""

    def copy(self, targets: Numbers, sources: Numbers, sizes: Numbers, /) -> None:
        """Start to copy `sizes` bytes between addresses, in any order."""
        ...

    def sums(self, pages: Sequence[int], slots: Sequence[int], /) -> Sums: ...


class _StoreCopy(NamedTuple):
    """A store that has not ended."""

    completion: Completion
    started: float
    copy: HostCopy


# Takes the stages of a load: by layer of the target, then of all copies, then of the checksums.
Expect = Callable[[Mapping[int, Stage], Stage, Stage], None]


class HostStore:
    """Implements `RankStore`. Planes are laid out as in the device's pool (host_layout.py)."""

    def __init__(
        self,
        layout: HostLayout,
        memory: HostBytes,
        device: tuple[PoolLayout, Tensor],
        expect: Expect | None,
        lanes: Lanes,
        copies: PoolCopies,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Keep pages of one pool.

        Args:
            memory: layout.planes.total_bytes of them.
            device: layout and storage of the pool.
            expect: lets the work that needs a load wait for it, layer by layer. What writes to loaded pages waits for
                the checksums. None: nothing is launched that needs a load before its comparison is `ready`.
        """
        pool, storage = device
        self.memory = memory.tensor
        self.bytes = memory
        self._expect = expect
        self._lanes = lanes
        self._copies = copies
        self._clock = clock
        self._planes = [
            _CopiedPlane(number, ours, storage.data_ptr() + ours.offset, self.memory.data_ptr() + host.offset)
            for number, (ours, host) in enumerate(zip(pool.placed, layout.planes.placed, strict=True))
        ]
        self._copying: dict[int, _StoreCopy] = {}
        self._summed: dict[int, Tensor] = {}  # key of a store -> its checksums, on their way
        self._page_sums = np.zeros(layout.planes.num_pages, dtype=np.int64)
        self._slot_sums = np.zeros(max(layout.planes.num_slots, 1), dtype=np.int64)

    def store(self, stores: Sequence[Store]) -> None:
        """Start to copy to host memory, after all work launched so far."""
        for each in stores:
            self.bytes.starting("out")
            _, completion = self._lanes.out.start(partial(self._store, each))
            self.bytes.started("out", completion.ready)
            self._copying[each.key] = _StoreCopy(completion, self._clock(), each.copy)

    def load(self, loads: Sequence[HostCopy]) -> Comparison:
        if not loads:
            return NOTHING_LOADED
        copy = _joined(loads)
        loading = _Loading(self, self._copies, copy)
        layers = {} if self._expect is None else self._layers
        draft = [each for each in self._planes if each.ours.plane.owner == "draft"]
        parts = [*layers.values(), *([draft] if draft else ())] if layers else [self._planes]
        self.bytes.starting("back")
        stages = self._lanes.back.load([*(partial(loading.part, part) for part in parts), loading.end])
        self.bytes.started("back", stages[-1].ready)
        if self._expect is not None:
            self._expect(dict(zip(layers, stages)), stages[-2], stages[-1])
        loading.stage = stages[-1]
        return loading

    @cached_property
    def _layers(self) -> dict[int, list[_CopiedPlane]]:
        """The planes of the target, by layer."""
        layers: dict[int, list[_CopiedPlane]] = {}
        for each in self._planes:
            if each.ours.plane.owner == "target":
                layers.setdefault(each.ours.plane.layer, []).append(each)
        return layers

    def unfinished(self) -> Collection[int]:
        """Return the keys of stores whose copies have not ended. Does not wait.

        Raises InternalError if a copy takes longer than STORE_SECONDS: its pages would never be free again.
        """
        for key, each in list(self._copying.items()):
            if each.completion.ready():
                self._remember(each.copy, self._summed.pop(key))
                del self._copying[key]
        now = self._clock()
        for each in self._copying.values():
            if now - each.started > STORE_SECONDS:
                raise InternalError(
                    f"KV pages have not been copied to host memory within {STORE_SECONDS:.0f} s: the device does not "
                    "make progress; restart this node"
                )
        return self._copying.keys()

    def close(self) -> None:
        """Wait for copies in flight and unpin the memory, see `HostBytes.close`. No copy may be started after."""
        self.bytes.close()

    def move(self, planes: Iterable[_CopiedPlane], pages: _Runs, slots: _Runs, to_device: bool) -> None:
        """Copy runs of all these planes at once: each copy of its own would take microseconds to launch."""
        moves = [each.spans(pages if each.paged else slots, to_device) for each in planes]
        targets, sources, sizes = (np.concatenate(each) for each in zip(*moves, strict=True))
        if len(sizes):
            self._copies.copy(targets, sources, sizes)

    def damage(self, copy: HostCopy, sums: Tensor) -> Damage:
        """Compare checksums of what was loaded with those of what was stored."""
        found, count = sums.numpy(), len(copy.pages)
        pages, slots = (
            np.asarray(copy.host_pages, dtype=np.int64),
            np.asarray(_slots(copy)[0], dtype=np.int64),
        )
        wrong = pages[self._page_sums[pages] != found[:count]]
        return Damage(tuple(wrong.tolist()), tuple(slots[self._slot_sums[slots] != found[count:]].tolist()))

    def _store(self, store: Store) -> None:
        copy = store.copy
        sums = self._copies.sums(copy.pages, _slots(copy)[1])
        sums.add_pages()
        sums.add_states(range(len(self._planes)))
        self._summed[store.key] = sums.on_host()
        self.move(self._planes, _runs(copy.pages, copy.host_pages), _runs(*_slots(copy)[::-1]), False)

    def _remember(self, copy: HostCopy, sums: Tensor) -> None:
        found, count = sums.numpy(), len(copy.pages)
        self._page_sums[list(copy.host_pages)] = found[:count]
        self._slot_sums[_slots(copy)[0]] = found[count:]


class _Loading:
    """Implements `Comparison`. Its parts run in the order of the stages, on the lane of loads.

    The state of a layer is summed up before the layer changes it, and pages at the end, so as not to delay the copies.
    """

    def __init__(self, store: HostStore, copies: PoolCopies, copy: HostCopy) -> None:
        self._store = store
        self._copies = copies
        self._copy = copy
        self._pages, self._slots = _runs(copy.host_pages, copy.pages), _runs(*_slots(copy))
        self._sums: Sums | None = None
        self._found: Tensor | None = None
        self.stage: Stage | None = None

    def part(self, planes: Sequence[_CopiedPlane]) -> None:
        if self._sums is None:
            self._sums = self._copies.sums(self._copy.pages, _slots(self._copy)[1])
        self._store.move(planes, self._pages, self._slots, True)
        self._sums.add_states(each.number for each in planes)

    def end(self) -> None:
        assert self._sums is not None
        self._sums.add_pages()
        self._found = self._sums.on_host()

    def follow(self) -> None:
        assert self.stage is not None, "the load has not started"
        self.stage.follow()

    def ready(self) -> bool:
        assert self.stage is not None, "the load has not started"
        return self.stage.ready()

    def read(self) -> Damage:
        assert self._found is not None, "nothing followed the load"
        return self._store.damage(self._copy, self._found)


class _Runs(NamedTuple):
    """Consecutive items of the source that go to consecutive items of the target."""

    sources: Numbers
    targets: Numbers
    items: Numbers


class _CopiedPlane(NamedTuple):
    """A plane of the pool, and where it begins on the device and on the host."""

    number: int  # in the layout
    ours: PlacedPlane
    device: int
    host: int

    @property
    def paged(self) -> bool:
        return self.ours.plane.kept is Kept.PAGED

    def spans(self, runs: _Runs, to_device: bool) -> tuple[Numbers, Numbers, Numbers]:
        """Return addresses of targets and of sources, and bytes."""
        target, source = (self.device, self.host) if to_device else (self.host, self.device)
        size = self.ours.page_bytes
        return target + runs.targets * size, source + runs.sources * size, runs.items * size


def _joined(loads: Sequence[HostCopy]) -> HostCopy:
    if len(loads) == 1:
        return loads[0]
    return HostCopy(
        pages=tuple(page for each in loads for page in each.pages),
        host_pages=tuple(page for each in loads for page in each.host_pages),
        states=tuple(state for each in loads for state in each.states),
    )


def _slots(copy: HostCopy) -> tuple[list[int], list[int]]:
    """Return the slots of the host and those of the device."""
    return [host for _, host in copy.states], [ours for ours, _ in copy.states]


def _runs(sources: Sequence[int], targets: Sequence[int]) -> _Runs:
    """Return the copies sources[i] -> targets[i] as few runs."""
    source, target = np.asarray(sources, dtype=np.int64), np.asarray(targets, dtype=np.int64)
    begins = np.ones(len(source), dtype=bool)
    begins[1:] = (np.diff(source) != 1) | (np.diff(target) != 1)
    first = np.flatnonzero(begins)
    return _Runs(source[first], target[first], np.diff(first, append=len(source)))
