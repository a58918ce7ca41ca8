"""Tests the page kernel: its reference on the CPU, and the kernel itself in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from common.kv_cache.pool_layout import PoolLayout
from kv_transfer.transport.cuda import pages as cuda_pages
from kv_transfer.transport.cuda.pages import MIX, POSITION, PagedMemory, move_pages, page_list
from kv_transfer.transport.page_digest import as_digests
from tests.fakes.pools import layers_layout
from tests.unit.kv_transfer.rig import noise, page_bytes

CPU = torch.device("cpu")
MIXED = [(2, 4), (2, 4), (1, 12), (5, 4)]  # (KV heads, head_dim): page sizes differ between layers


def memory(layout: PoolLayout, seed: int = 0) -> torch.Tensor:
    return torch.frombuffer(noise(layout.total_bytes, seed), dtype=torch.uint8)


def by_hand(data: bytes, word: int, first: int = 0) -> int:
    """Compute the docstring's definition in Python integers, for words that are numbered from `first` on."""
    mask, total = (1 << 64) - 1, 0
    for i in range(len(data) // word):
        value = int.from_bytes(data[i * word : (i + 1) * word], "little", signed=word > 1)
        mixed = (value & mask) ^ ((first + i) * POSITION & mask)
        mixed = (mixed ^ (mixed >> 32)) * MIX & mask
        total += mixed ^ (mixed >> 32)
    return total & mask


def sums_of(
    layout: PoolLayout, pool: torch.Tensor, pages: list[int], planes: range | None = None
) -> list[int]:
    sums = torch.zeros(len(pages), dtype=torch.int64)
    chosen = range(len(layout.planes)) if planes is None else planes
    move_pages(PagedMemory(layout, pool, CPU), None, page_list(pages, device=CPU), sums, chosen, 8)
    return as_digests(sums.tolist())


@pytest.mark.parametrize(
    ("dtype", "page_size", "layers", "word"),
    [
        ("float32", 2, MIXED, 8),
        ("bfloat16", 1, [(1, 2), (1, 6)], 4),
        ("bfloat16", 1, [(1, 3)], 2),
        ("uint8", 1, [(1, 3), (2, 5)], 1),
    ],
)
def test_pages_and_checksums_of_any_shape(
    dtype: str, page_size: int, layers: list[tuple[int, int]], word: int
) -> None:
    src = layers_layout("m", dtype, page_size, 7, layers)
    dst = layers_layout("m", dtype, page_size, 11, layers)
    a, b = memory(src, 1), memory(dst, 2)
    before = b.clone()
    source, target = PagedMemory(src, a, CPU), PagedMemory(dst, b, CPU)
    assert source.word_bytes == word
    taken, given = [3, 1, 6], [10, 2, 5]
    sums = torch.zeros(3, dtype=torch.int64)
    move_pages(source, target, page_list(taken, given, device=CPU), sums, range(len(src.planes)), 4)
    for x, y in zip(taken, given, strict=True):
        assert page_bytes(b.numpy().data, dst, y) == page_bytes(a.numpy().data, src, x)
    for page in set(range(11)) - set(given):
        assert page_bytes(b.numpy().data, dst, page) == page_bytes(before.numpy().data, dst, page)
    expected = [by_hand(page_bytes(a.numpy().data, src, page), word) for page in taken]
    assert as_digests(sums.tolist()) == expected
    assert sums_of(dst, b, given) == expected  # the position of a page does not matter


def test_planes_sent_one_after_another_add_up() -> None:
    layout = layers_layout("m", "float32", 2, 5, MIXED)
    a, b = memory(layout, 1), torch.zeros(layout.total_bytes, dtype=torch.uint8)
    source, target = PagedMemory(layout, a, CPU), PagedMemory(layout, b, CPU)
    assert [group.planes for group in source.groups] == [range(4), range(4, 6), range(6, 8)]
    sums = torch.zeros(2, dtype=torch.int64)
    pages = page_list([1, 4], [4, 2], device=CPU)
    for planes in (range(3), range(3, 5), range(5, 8)):
        move_pages(source, target, pages, sums, planes, 4)
    assert page_bytes(b.numpy().data, layout, 2) == page_bytes(a.numpy().data, layout, 4)
    assert as_digests(sums.tolist()) == sums_of(layout, a, [1, 4])


def test_a_checksum_sees_one_bit_and_words_that_change_places() -> None:
    layout = layers_layout("m", "float32", 2, 3, [(2, 4)])
    pool = memory(layout, 5)
    plane = layout.planes[1]
    at = plane.offset + plane.page_bytes
    (good,) = sums_of(layout, pool, [1])
    seen = {good}
    for bit in range(plane.page_bytes * 8):
        pool[at + bit // 8] ^= 1 << (bit % 8)
        seen.add(sums_of(layout, pool, [1])[0])
        pool[at + bit // 8] ^= 1 << (bit % 8)
    assert len(seen) == 1 + plane.page_bytes * 8
    words = pool.view(torch.int64)
    words[at // 8], words[at // 8 + 1] = words[at // 8 + 1].clone(), words[at // 8].clone()
    assert sums_of(layout, pool, [1]) != [good]
    assert sums_of(layout, torch.zeros_like(pool), [1]) != [0]


@pytest.mark.skipif(torch.cuda.is_available(), reason="compiled kernels are tested in tests/gpu")
@pytest.mark.parametrize(
    ("dtype", "size", "layers"),
    [
        ("float32", 2, [(2, 4), (2, 4), (1, 12)]),
        ("uint8", 1, [(1, 3)]),
        ("bfloat16", 16, [(2, 64)]),
    ],
)
def test_the_kernel_equals_its_reference(
    dtype: str, size: int, layers: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    src, dst = layers_layout("m", dtype, size, 6, layers), layers_layout("m", dtype, size, 9, layers)
    a, every, found = memory(src, 1), range(len(src.planes)), []
    pages = page_list([5, 1, 2, 4], [8, 3, 1, 2], device=CPU)
    for launch in (cuda_pages.move_pages_reference, cuda_pages.move_pages_kernel):
        monkeypatch.setattr(cuda_pages, "move_pages_reference", launch)
        b = torch.zeros(dst.total_bytes, dtype=torch.uint8)
        sums, only = torch.zeros(2, 4, dtype=torch.int64)
        move_pages(PagedMemory(src, a, CPU), PagedMemory(dst, b, CPU), pages, sums, every, 3)
        move_pages(PagedMemory(src, a, CPU), None, pages, only, every, 2)
        assert torch.equal(sums, only)
        found.append((b, sums))
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])
