"""Pinned memory is unpinned once, and never while a copy may still read or write it."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from msgspec import structs

from common.errors import InternalError
from common.kv_cache.host_layout import HostLayout
from common.kv_cache.host_plan import HostCopy, Store
from common.node import host_bytes
from common.node.host_bytes import HostBytes
from common.node.host_store import HostStore
from decode_node.build import BuiltDecodeNode
from decode_node.rank import ReceivingService
from kv_transfer.transport.cuda.pool_copies import MovedPool
from prefill_node.build import BuiltPrefillNode
from prefill_node.rank import SendingService
from tests.fakes.late_host import LateLoads, LateStores, late_lanes
from tests.fakes.pools import plain_pool

GPU, CPU = torch.device("cuda", 0), torch.device("cpu")


@dataclass
class Runtime:
    """The two calls of the CUDA runtime."""

    status: int = 0
    pinned: set[int] = field(default_factory=set)

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        if not self.status:
            self.pinned.add(address)
        return self.status

    def cudaHostUnregister(self, address: int) -> int:
        self.pinned.remove(address)
        return self.status


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """What was not unpinned."""
    kept = list[torch.Tensor]()
    monkeypatch.setattr(host_bytes, "in_use", kept)
    monkeypatch.setattr(host_bytes, "END_SECONDS", 0.02)
    return kept


def after(asks: int) -> Callable[[], bool]:
    """Return copies that have ended when that is asked often enough."""
    left = iter([False] * asks)
    return lambda: next(left, True)


@pytest.mark.parametrize("explicit", [True, False])
def test_the_end_waits_for_copies_of_every_lane(explicit: bool, kept: list[torch.Tensor]) -> None:
    runtime = Runtime()
    memory = HostBytes(4096, GPU, runtime)
    assert runtime.pinned == {memory.tensor.data_ptr()}
    asked = list[str]()

    def ended(lane: str, copies: Callable[[], bool]) -> bool:
        assert runtime.pinned, "it was unpinned while copies were in flight"
        asked.append(lane)
        return copies()

    for lane in ("out", "back"):
        memory.starting(lane)
        copies = after(2)
        memory.started(lane, lambda lane=lane, copies=copies: ended(lane, copies))  # type: ignore[misc]
    if explicit:
        memory.close()
        memory.close()
    del memory
    gc.collect()
    assert {lane: asked.count(lane) >= 3 for lane in ("out", "back")} == {"out": True, "back": True}
    assert not runtime.pinned
    assert not kept


def lost(memory: HostBytes) -> None:
    memory.started("out", lambda: False)


def half_started(memory: HostBytes) -> None:
    memory.started("back", lambda: True)
    memory.starting("back")


def failed(memory: HostBytes) -> None:
    def ask() -> bool:
        raise RuntimeError("an illegal memory access")

    memory.started("back", ask)


@pytest.mark.parametrize(
    ("copies", "reason"),
    [
        (lost, "copies have not ended within"),
        (half_started, "copies have not ended within"),
        (failed, "the device has failed: an illegal memory access"),
    ],
)
def test_memory_that_may_be_in_use_stays_pinned_and_that_is_said(
    copies: Callable[[HostBytes], None],
    reason: str,
    kept: list[torch.Tensor],
    caplog: pytest.LogCaptureFixture,
) -> None:
    runtime = Runtime()
    memory = HostBytes(4096, GPU, runtime)
    copies(memory)
    memory.close()
    assert [each.data_ptr() for each in kept] == [memory.tensor.data_ptr()]
    assert runtime.pinned == {memory.tensor.data_ptr()}
    (record,) = caplog.records
    assert reason in record.fields["reason"]  # type: ignore[attr-defined]


def test_what_cannot_be_pinned_is_refused_and_not_unpinned(kept: list[torch.Tensor]) -> None:
    with pytest.raises(InternalError, match=r"could not pin 4096 bytes .*ulimit -l"):
        HostBytes(4096, GPU, Runtime(status=2))
    gc.collect()
    assert not kept


def store_of(memory: HostBytes, lanes: Any, layout: HostLayout, pool: Any) -> HostStore:
    device = pool.layout, pool.storage
    return HostStore(layout, memory, device, None, lanes, MovedPool(*device))


@pytest.mark.parametrize("direction", ["out", "back"])
def test_the_end_of_a_store_waits_for_its_copies(direction: str, kept: list[torch.Tensor]) -> None:
    pool = plain_pool(2, 1, 8, 4, 8, torch.float32, CPU)
    layout, lanes, runtime = (
        HostLayout(structs.replace(pool.layout, num_pages=8), 2),
        late_lanes(asks=5),
        Runtime(),
    )
    assert isinstance(lanes.out, LateStores)
    assert isinstance(lanes.back, LateLoads)
    memory = HostBytes(layout.planes.total_bytes, GPU, runtime)
    store = store_of(memory, lanes, layout, pool)
    copy = HostCopy(pages=(1, 2), host_pages=(2, 3))
    if direction == "out":
        store.store([Store(key=1, copy=copy)])
        assert lanes.out.unfinished
    else:
        store.load([copy])
        assert lanes.back.pending
    store.close()
    assert not lanes.out.unfinished
    assert not lanes.back.pending
    assert not runtime.pinned
    assert not kept


@pytest.mark.parametrize("direction", ["out", "back"])
def test_copies_whose_start_failed_keep_the_memory(direction: str, kept: list[torch.Tensor]) -> None:
    """Some of them may have been launched."""
    pool = plain_pool(2, 1, 8, 4, 8, torch.float32, CPU)
    layout, runtime = HostLayout(structs.replace(pool.layout, num_pages=8), 2), Runtime()

    def fail(copies: object) -> Any:
        raise RuntimeError("cudaErrorLaunchFailure")

    lanes = late_lanes()
    lanes.out.start = lanes.back.load = fail  # type: ignore[method-assign, assignment]
    store = store_of(HostBytes(layout.planes.total_bytes, GPU, runtime), lanes, layout, pool)
    copy = HostCopy(pages=(1, 2), host_pages=(2, 3))
    start = {"out": lambda: store.store([Store(key=1, copy=copy)]), "back": lambda: store.load([copy])}
    with pytest.raises(RuntimeError, match="LaunchFailure"):
        start[direction]()
    store.close()
    assert runtime.pinned
    assert len(kept) == 1


class Closed:
    """Anything that a node closes; `order` gets the names of what was called."""

    def __init__(self, name: str, order: list[str]) -> None:
        self.name, self.order = name, order

    def __getattr__(self, name: str) -> Closed:
        return Closed(f"{self.name}.{name}", self.order)

    def __call__(self) -> None:
        self.order.append(self.name)


@pytest.mark.parametrize(
    ("ending", "parts", "host", "memory"),
    [
        (
            BuiltDecodeNode,
            "node routers peers receiver end observation ranks watched host",
            "store.",
            "end.close",
        ),
        (
            BuiltPrefillNode,
            "node routers end sockets images observation ranks watched host",
            "",
            "end.sender.close",
        ),
        (ReceivingService, "rank peers poller end host", "store.", "end.close"),
        (SendingService, "rank sending end sockets host", "", "rank.close"),
    ],
)
def test_nodes_and_ranks_wait_for_copies_before_their_pools_go(
    ending: Any, parts: str, host: str, memory: str
) -> None:
    order = list[str]()
    ending(*(Closed(part, order) for part in parts.split())).close()
    assert order.count(f"host.{host}close") == 1
    assert order.index(f"host.{host}close") < order.index(memory)
