"""The KV pool: planes at explicit offsets in storage from anywhere, and host backups of pages."""

from __future__ import annotations

from multiprocessing.shared_memory import SharedMemory

import pytest
import torch

from common.engine.kv_cache.pool import KvPool

LAYERS, HEADS, DIM, PAGE, PAGES = 2, 2, 8, 4, 5
PLANE = PAGES * PAGE * HEADS * DIM  # elements


def make(**changes: object) -> KvPool:
    values: dict[str, object] = {"dtype": torch.float32, "device": "cpu"}
    return KvPool(LAYERS, HEADS, DIM, PAGE, PAGES, **{**values, **changes})  # type: ignore[arg-type]


def test_planes_lie_layer_by_layer_keys_first_in_a_packed_buffer() -> None:
    pool = make()
    for index, plane in enumerate((pool.key(0), pool.value(0), pool.key(1), pool.value(1))):
        plane.fill_(index + 1)
        assert plane.shape == (PAGES, PAGE, HEADS, DIM)
    flat = pool.storage.view(torch.float32)
    assert flat.view(4, PLANE).eq(torch.tensor([1.0, 2.0, 3.0, 4.0])[:, None]).all()
    assert pool.storage.numel() == 4 * PLANE * 4
    assert pool.page_bytes == PAGE * HEADS * DIM * 4
    assert pool.bytes_per_token == 4 * HEADS * DIM * 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_explicit_offsets_in_storage_from_outside(dtype: torch.dtype) -> None:
    size = PLANE * dtype.itemsize
    offsets = [256 + index * (size + 256) for index in (3, 1, 0, 2)]  # any order, with gaps
    shared = SharedMemory(create=True, size=max(offsets) + size + 100)
    try:
        storage = torch.frombuffer(shared.buf, dtype=torch.uint8)
        storage.fill_(255)  # NaN in every plane
        pool = make(dtype=dtype, storage=storage, plane_offsets=offsets)
        pool.value(0)[2, 1, 1, 3] = 7.0
        byte = offsets[1] + pool.page_bytes * 2 + ((1 * HEADS + 1) * DIM + 3) * dtype.itemsize
        assert storage[byte : byte + dtype.itemsize].view(dtype).item() == 7.0
        for layer in range(LAYERS):
            assert not pool.key(layer)[0].any()  # page 0 is zeroed, the others are left as they were
            assert pool.key(layer)[1:].isnan().all()
        assert storage[:256].eq(255).all()
        del storage, pool
    finally:
        shared.close()
        shared.unlink()


def test_pages_come_back_from_a_host_backup_into_other_pages() -> None:
    pool = make()
    for layer in range(LAYERS):
        pool.key(layer)[1:].normal_()
        pool.value(layer)[1:].normal_()
    backup = pool.copy_pages_out([3, 1])
    assert backup.shape == (2 * LAYERS, 2, PAGE, HEADS, DIM)
    before = pool.value(1).clone()
    pool.value(1)[3] = 0  # the backup is a copy
    pool.copy_pages_in(torch.tensor([2, 4]), backup)
    assert torch.equal(pool.value(1)[2], before[3])
    assert torch.equal(pool.value(1)[4], before[1])
    assert torch.equal(pool.key(0)[2], pool.key(0)[3])
    assert torch.equal(pool.value(1)[1], before[1])


def test_a_backup_of_another_shape_is_refused() -> None:
    pool = make()
    with pytest.raises(ValueError, match="backup is"):
        pool.copy_pages_in([1], pool.copy_pages_out([1, 2]))
    with pytest.raises(ValueError, match="backup is"):
        pool.copy_pages_in([1], pool.copy_pages_out([1]).bfloat16())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"storage": torch.zeros(64, dtype=torch.uint8)}, "planes end at byte"),
        ({"storage": torch.zeros(4 * PLANE)}, "flat uint8"),
        ({"plane_offsets": [0, PLANE * 4]}, "2 plane offsets for 4 planes"),
        ({"plane_offsets": [i * PLANE * 4 + 2 for i in range(4)]}, "aligned to 4 bytes"),
        ({"plane_offsets": [i * PLANE * 2 for i in range(4)]}, "overlap"),
        ({"plane_offsets": [-(PLANE * 4), 0, PLANE * 4, PLANE * 8]}, "planes end at byte"),
        ({"device": "meta", "storage": torch.zeros(4 * 4 * PLANE, dtype=torch.uint8)}, "storage is on cpu"),
    ],
)
def test_storage_that_does_not_fit_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(**changes)


def test_a_pool_needs_a_page_beside_padding() -> None:
    with pytest.raises(ValueError, match="beside padding page 0"):
        KvPool(1, 1, 2, 4, 1, torch.float32, "cpu")


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 1, 0, 2)], ids=["even", "uneven"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_slots_move_in_all_planes_as_if_read_before_any_is_written(
    dtype: torch.dtype, order: tuple[int, ...]
) -> None:
    """The KV of accepted drafts: sources and targets overlap."""
    offsets = [256 + index * (PLANE * dtype.itemsize + 256) for index in order]
    storage = torch.zeros(max(offsets) + PLANE * dtype.itemsize, dtype=torch.uint8)
    pool = make(dtype=dtype, storage=storage, plane_offsets=offsets)
    planes = [plane(layer) for layer in range(LAYERS) for plane in (pool.key, pool.value)]
    for plane in planes:
        plane[1:].normal_()
    before = [plane.clone().view(-1, HEADS, DIM) for plane in planes]
    source, target = torch.tensor([6, 9, 10, 17]), torch.tensor([5, 6, 7, 10])
    pool.move_slots(source, target)
    for plane, then in zip(planes, before, strict=True):
        then[target] = then[source].clone()
        assert torch.equal(plane.view(-1, HEADS, DIM), then)
