"""Cached prefixes go to pinned host memory and back on streams of their own; a layer waits for its own copies only."""

from __future__ import annotations

import pytest
import torch
from msgspec import structs

from common.kv_cache.host_layout import HostLayout
from common.kv_cache.host_plan import INTACT, Damage, HostCopy, Store
from common.node.host_bytes import HostBytes
from common.node.host_lane import host_lane
from common.node.host_store import HostStore, Lanes
from kv_transfer.transport.cuda.batch_copy import BatchCopy
from kv_transfer.transport.cuda.pool_copies import MovedPool
from prefill_node.arriving_layers import ArrivingLayers
from tests.fakes.pools import plain_pool
from tests.fakes.waiting import until

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
LAYERS = 4
PAGES = (*range(1, 21), *range(60, 80))
HOST = tuple(range(8, 48))
TARGET = tuple(range(80, 40, -1))
BUSY = 4_000_000_000  # cycles, some seconds


def test_bytes_come_back_while_the_device_computes() -> None:
    device = torch.device("cuda", 0)
    pool = plain_pool(LAYERS, 2, 64, 16, 100, torch.bfloat16, device)
    layout = HostLayout(structs.replace(pool.layout, num_pages=56), 8)
    memory = HostBytes(layout.planes.total_bytes, device)
    assert memory.tensor.is_pinned()
    arriving, index = ArrivingLayers(), torch.tensor(TARGET, device=device)
    lanes = Lanes(host_lane(device), host_lane(device))
    device_pool = pool.layout, pool.storage
    store = HostStore(layout, memory, device_pool, arriving.expect, lanes, MovedPool(*device_pool))
    written = torch.arange(100, device=device, dtype=torch.bfloat16)[:, None, None, None]
    # The first use of a kernel loads it, which waits for the device, as does pinning memory.
    pool.key(0)[index]
    store.store([Store(key=0, copy=HostCopy(pages=PAGES, host_pages=HOST))])
    until(lambda: not store.unfinished())
    store.load([HostCopy(pages=TARGET, host_pages=HOST)])
    arriving.whole()
    for layer in range(LAYERS):
        pool.key(layer)[:] = written + layer
        pool.value(layer)[:] = -written - layer
    torch.cuda.synchronize()

    torch.cuda._sleep(BUSY)
    pool.key(0)[1] = 77
    store.store([Store(key=1, copy=HostCopy(pages=PAGES, host_pages=HOST))])
    assert set(store.unfinished()) == {1}, "the host waited for the work before"
    torch.cuda._sleep(BUSY)
    after = torch.cuda.Event()
    after.record()
    until(lambda: not store.unfinished())
    assert not after.query(), "the copy waited for the work after it"

    comparison = store.load([HostCopy(pages=TARGET, host_pages=HOST)])
    assert not after.query(), "the host waited to load"
    for layer in range(LAYERS):
        arriving.layer(layer)
    arriving.whole()
    found = [(pool.key(layer)[index], pool.value(layer)[index]) for layer in range(LAYERS)]
    assert not after.query(), "the host waited for the copies"
    comparison.follow()
    torch.cuda.synchronize()
    assert comparison.read() == INTACT
    for layer, (key, value) in enumerate(found):
        expected = written[list(PAGES)] + layer
        if layer == 0:
            expected[0] = 77
        assert (key == expected).all()
        assert (value == -written[list(PAGES)] - layer).all()


def test_a_load_runs_beside_work_that_was_launched_before_it() -> None:
    device = torch.device("cuda", 0)
    pool = plain_pool(LAYERS, 2, 64, 16, 100, torch.bfloat16, device)
    layout = HostLayout(structs.replace(pool.layout, num_pages=56), 8)
    memory = HostBytes(layout.planes.total_bytes, device)
    lane = host_lane(device)
    device_pool = pool.layout, pool.storage
    lanes = Lanes(host_lane(device), lane)
    store = HostStore(layout, memory, device_pool, ArrivingLayers().expect, lanes, MovedPool(*device_pool))
    # The first load waits for the device: it loads kernels and pins memory.
    store.load([HostCopy(pages=TARGET, host_pages=HOST)])
    torch.cuda.synchronize()
    memory.tensor.fill_(3)
    torch.cuda._sleep(BUSY)
    busy = torch.cuda.Event()
    busy.record()
    comparison = store.load([HostCopy(pages=TARGET, host_pages=HOST)])
    done = torch.cuda.Event()
    stages = lane.load([lambda: done.record()])
    until(done.query)
    assert not busy.query(), "the copies waited for work that does not touch their pages"
    until(comparison.ready)
    assert not busy.query(), "so did the checksums"
    stages[0].follow()
    torch.cuda.synchronize()
    assert (pool.key(2)[list(TARGET)].view(torch.uint8) == 3).all()


@pytest.mark.parametrize("batched", [True, False])
def test_scattered_pages_are_copied_and_compared(
    batched: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With one call for many copies and with one for each; the GPU's checksums are those of the CPU's reference."""
    if not batched:
        monkeypatch.setattr(BatchCopy, "start", lambda *arguments: False)
    device, generator = torch.device("cuda", 0), torch.Generator().manual_seed(3)
    pool = plain_pool(LAYERS, 2, 64, 16, 100, torch.bfloat16, device)
    pool.storage.copy_(torch.randint(256, pool.storage.shape, dtype=torch.uint8, generator=generator))
    device_pool = pool.layout, pool.storage
    layout = HostLayout(structs.replace(pool.layout, num_pages=56), 8)
    memory = HostBytes(layout.planes.total_bytes, device)
    lanes, moved = Lanes(host_lane(device), host_lane(device)), MovedPool(*device_pool)
    assert not caplog.records, "batches do not work on this machine"
    store = HostStore(layout, memory, device_pool, ArrivingLayers().expect, lanes, moved)
    pages = (torch.randperm(99, generator=generator)[:40] + 1).tolist()
    targets = (torch.randperm(99, generator=generator)[:40] + 1).tolist()
    expected, found = MovedPool(pool.layout, pool.storage.cpu()).sums(pages, ()), moved.sums(pages, ())
    expected.add_pages()
    found.add_pages()
    sums = found.on_host()
    torch.cuda.synchronize()
    assert sums.tolist() == expected.on_host().tolist()

    store.store([Store(key=1, copy=HostCopy(pages=tuple(pages), host_pages=HOST))])
    until(lambda: not store.unfinished())
    # Bytes, since random ones hold values that are not equal to themselves (NaN).
    keys = [pool.key(layer)[pages].view(torch.uint8) for layer in range(LAYERS)]
    load = HostCopy(pages=tuple(targets), host_pages=HOST)
    for damage in (INTACT, Damage(pages=(HOST[7],))):
        if damage is not INTACT:
            placed = layout.planes.placed[3]
            memory.tensor[placed.offset + HOST[7] * placed.page_bytes + 9] ^= 1
        comparison = store.load([load])
        comparison.follow()
        torch.cuda.synchronize()
        assert comparison.read() == damage
        if damage is INTACT:
            for layer, stored in enumerate(keys):
                assert torch.equal(pool.key(layer)[targets].view(torch.uint8), stored)
