"""The KV pool: planes of a layout in storage from anywhere, and host backups of pages."""

from __future__ import annotations

from multiprocessing.shared_memory import SharedMemory

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from common.engine.state.pool import KvPool
from common.kv_cache.plane import Kept, Plane
from common.kv_cache.pool_layout import PoolLayout
from common.kv_cache.pool_spec import PoolSpec
from tests.fakes.pools import attention_planes

LAYERS, HEADS, DIM, PAGE, PAGES = 2, 2, 8, 4, 5


def layout(dtype: str = "float32", between: tuple[Plane, ...] = (), pages: int = PAGES) -> PoolLayout:
    """Make a layout of a target of two layers, with planes `between` them, and a draft of one."""
    target = attention_planes("target", LAYERS, HEADS, DIM, dtype)
    planes = (*target[:2], *between, *target[2:], *attention_planes("draft", 1, 1, DIM, "bfloat16"))
    return PoolLayout(fingerprint="m", spec=PoolSpec(PAGE, planes), num_pages=pages)


def make(shape: PoolLayout | None = None) -> KvPool:
    shape = shape or layout()
    return KvPool(shape, "target", torch.zeros(shape.total_bytes, dtype=torch.uint8))


def test_planes_are_at_the_offsets_of_the_layout() -> None:
    pool = make()
    planes = pool.layout.of("target")
    for index, plane in enumerate((pool.key(0), pool.value(0), pool.key(1), pool.value(1))):
        plane.fill_(index + 1)
        assert plane.shape == (PAGES, PAGE, HEADS, DIM)
        placed = planes[index]
        there = pool.storage[placed.offset : placed.offset + placed.nbytes].view(torch.float32)
        assert there.eq(index + 1.0).all()
    assert pool.page_bytes == 4 * PAGE * HEADS * DIM * 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_target_and_draft_share_storage_from_outside(dtype: torch.dtype) -> None:
    shape = layout(str(dtype).removeprefix("torch."))
    shared = SharedMemory(create=True, size=shape.total_bytes + 100)
    try:
        storage = torch.frombuffer(shared.buf, dtype=torch.uint8)
        storage.fill_(255)  # NaN in every plane
        pool, draft = KvPool(shape, "target", storage), KvPool(shape, "draft", storage)
        pool.value(0)[2, 1, 1, 3] = 7.0
        placed = shape.planes[1]
        byte = placed.offset + placed.page_bytes * 2 + ((1 * HEADS + 1) * DIM + 3) * dtype.itemsize
        assert storage[byte : byte + dtype.itemsize].view(dtype).item() == 7.0
        for layer in range(LAYERS):
            assert not pool.key(layer)[0].any()  # page 0 is zeroed, the others are unchanged
            assert pool.key(layer)[1:].isnan().all()
        assert draft.key(0).dtype is torch.bfloat16
        assert draft.value(0).shape == (PAGES, PAGE, 1, DIM)
        assert draft.value(0)[1:].isnan().all()
        del storage, pool, draft
    finally:
        shared.close()
        shared.unlink()


@pytest.mark.parametrize(
    "between", [(), (Plane("target", 2, "latent", Kept.PAGED, (6,), "bfloat16"),)], ids=["like", "unlike"]
)
@pytest.mark.parametrize("one_by_one", [False, True])
def test_pages_come_back_from_a_host_backup_into_other_pages(
    between: tuple[Plane, ...], one_by_one: bool
) -> None:
    pool = make(layout(between=between))
    for layer in range(LAYERS):
        pool.key(layer)[1:].normal_()
        pool.value(layer)[1:].normal_()
    backup = pool.copy_pages_out([3, 1], one_by_one)
    assert all(map(torch.equal, backup, pool.copy_pages_out([3, 1])))
    assert sum(each.nbytes for each in backup) == 2 * pool.page_bytes
    before = pool.value(1).clone()
    pool.value(1)[3] = 0  # the backup is a copy
    pool.copy_pages_in([2, 4], backup, one_by_one)
    assert torch.equal(pool.value(1)[2], before[3])
    assert torch.equal(pool.value(1)[4], before[1])
    assert torch.equal(pool.key(0)[2], pool.key(0)[3])
    assert torch.equal(pool.value(1)[1], before[1])


def test_a_backup_of_another_shape_is_refused() -> None:
    pool = make()
    with pytest.raises(ValueError, match="backup is"):
        pool.copy_pages_in([1], pool.copy_pages_out([1, 2]))
    with pytest.raises(ValueError, match="backup is"):
        pool.copy_pages_in([1], [each.bfloat16() for each in pool.copy_pages_out([1])])


@pytest.mark.parametrize(
    ("storage", "message"),
    [
        (torch.zeros(64, dtype=torch.uint8), "storage has 64 bytes, the pool layout needs"),
        (torch.zeros(layout().total_bytes // 4), "flat uint8"),
        (torch.zeros(layout().total_bytes + 2, dtype=torch.uint8)[2:], "aligned to 4 bytes"),
    ],
)
def test_storage_that_does_not_fit_is_refused(storage: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        KvPool(layout(), "target", storage)


def test_a_pool_needs_planes_and_a_page_beside_padding() -> None:
    with pytest.raises(ValueError, match="besides padding page 0"):
        make(layout(pages=1))
    alone = PoolLayout(
        fingerprint="m", spec=PoolSpec(4, attention_planes("target", 1, 1, 2, "float32")), num_pages=3
    )
    with pytest.raises(ValueError, match="no planes of the draft"):
        KvPool(alone, "draft", torch.zeros(alone.total_bytes, dtype=torch.uint8))


@pytest.mark.parametrize(
    "between",
    [
        (),
        (Plane("target", 2, "wide", Kept.PAGED, (HEADS, DIM), "float32"),),
        (Plane("target", 2, "latent", Kept.PAGED, (6,), "bfloat16"),),
    ],
    ids=["like", "like-with-another-name", "unlike"],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_slots_move_in_all_planes_as_if_read_before_any_is_written(
    dtype: str, between: tuple[Plane, ...]
) -> None:
    """As for the KV of accepted drafts, sources and targets overlap."""
    pool = make(layout(dtype, between))
    planes = [plane(layer) for layer in range(LAYERS) for plane in (pool.key, pool.value)]
    for plane in planes:
        plane[1:].normal_()
    before = [plane.clone().view(-1, HEADS, DIM) for plane in planes]
    source, target = torch.tensor([6, 9, 10, 17]), torch.tensor([5, 6, 7, 10])
    pool.move_slots(source, target)
    for plane, then in zip(planes, before, strict=True):
        then[target] = then[source].clone()
        assert torch.equal(plane.view(-1, HEADS, DIM), then)


def test_a_move_allocates_what_it_moves_and_not_the_pool() -> None:
    """Between the planes of a node's pool are gaps that align them."""
    pool = make(layout(between=(Plane("target", 2, "latent", Kept.PAGED, (6,), "bfloat16"),), pages=1_000))
    source, target = torch.tensor([6, 9, 10, 17]), torch.tensor([5, 6, 7, 10])
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as measured:
        pool.move_slots(source, target)
    allocated = [each.self_cpu_memory_usage for each in measured.key_averages()]
    moved = len(source) * pool.page_bytes // PAGE
    assert moved <= sum(size for size in allocated if size > 0) < 2 * moved
