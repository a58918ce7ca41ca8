"""Cached prefixes go to pinned host memory and back on streams of their own; a layer waits for its own copies only."""

from __future__ import annotations

import pytest
import torch
from msgspec import structs

from common.kv_cache.host_layout import HostLayout
from common.node.host_lane import host_lane
from prefill_node.arriving_layers import ArrivingLayers
from prefill_node.host_plan import HostCopy, Store
from prefill_node.host_store import HostStore, Lanes, host_bytes
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
    memory = host_bytes(layout.planes.total_bytes, device)
    assert memory.is_pinned()
    arriving, index = ArrivingLayers(), torch.tensor(TARGET, device=device)
    lanes = Lanes(host_lane(device), host_lane(device))
    store = HostStore(layout, memory, (pool.layout, pool.storage), arriving, lanes)
    written = torch.arange(100, device=device, dtype=torch.bfloat16)[:, None, None, None]
    for layer in range(LAYERS):
        pool.key(layer)[:] = written + layer
        pool.value(layer)[:] = -written - layer
    pool.key(0)[index]  # the first use of a kernel loads it, which waits for the device
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
    sums = store.check([1, 2, 5], [])
    until(sums.ready)
    assert len(set(sums.read()[0].values())) == 3

    store.load([HostCopy(pages=TARGET, host_pages=HOST)])
    assert not after.query(), "the host waited to load"
    for layer in range(LAYERS):
        arriving.layer(layer)
    arriving.whole()
    found = [(pool.key(layer)[index], pool.value(layer)[index]) for layer in range(LAYERS)]
    assert not after.query(), "the host waited for the copies"
    torch.cuda.synchronize()
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
    memory = host_bytes(layout.planes.total_bytes, device)
    lane = host_lane(device)
    store = HostStore(
        layout, memory, (pool.layout, pool.storage), ArrivingLayers(), Lanes(host_lane(device), lane)
    )
    memory.fill_(3)
    torch.cuda._sleep(BUSY)
    busy = torch.cuda.Event()
    busy.record()
    store.load([HostCopy(pages=TARGET, host_pages=HOST)])
    done = torch.cuda.Event()
    stages = lane.load([lambda: done.record()])
    until(done.query)
    assert not busy.query(), "the copies waited for work that does not touch their pages"
    stages[0].follow()
    torch.cuda.synchronize()
    assert (pool.key(2)[list(TARGET)].view(torch.uint8) == 3).all()
