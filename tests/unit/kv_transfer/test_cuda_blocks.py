"""Tests the kernel that moves parts of pages and states: its reference by hand, and itself in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kv_transfer.copy_plan import copies, runs, single_rows, state_copies
from kv_transfer.pair_plan import RowsPair, StridedRows, pair_plan
from kv_transfer.transport.cuda import blocks
from kv_transfer.transport.cuda.blocks import (
    PartGroup,
    compile_checksums,
    compile_moves,
    move_group_kernel,
    move_group_reference,
    move_parts,
    part_groups,
    words,
)
from kv_transfer.transport.cuda.pages import page_list
from kv_transfer.transport.page_digest import as_digests
from tests.fakes.part_pools import SIZES, layout_of, noisy_pool, pairs
from tests.unit.kv_transfer.test_cuda_pages import by_hand

CPU = torch.device("cpu")


def item_bytes(memory: torch.Tensor, rows_of: tuple[StridedRows, ...], item: int) -> list[bytes]:
    """Return the bytes of each block of an item, row after row."""
    found = []
    for offset, size, length, rows, stride in rows_of:
        starts = [offset + item * size + row * stride for row in range(rows)]
        found.append(b"".join(bytes(memory[at : at + length].tolist()) for at in starts))
    return found


def sum_by_hand(blocks: list[bytes]) -> int:
    """Sum up the words of each block, numbered over all blocks."""
    total = first = 0
    for data in blocks:
        word = next(each for each in (8, 4, 2, 1) if len(data) % each == 0)
        total += by_hand(data, word, first)
        first += len(data) // word
    return total % (1 << 64)


@pytest.mark.parametrize(("src_size", "dst_size"), SIZES)
def test_parts_and_checksums_of_any_pair(src_size: int, dst_size: int) -> None:
    for plan in pairs(src_size, dst_size):
        a, b = noisy_pool(plan.src.layout, 1), noisy_pool(plan.dst.layout, 2)
        expected = b.clone()
        pages, slots = ([3, 1, 6], [8, 2, 5]), ([2], [3])
        wanted = [*copies(plan, runs(*pages)), *state_copies(plan, 2, 3)]
        for copy in single_rows(wanted):
            expected[copy.dst : copy.dst + copy.length] = a[copy.src : copy.src + copy.length]
        parts = [part for plane in plan.planes for part in plane]
        page_sums, slot_sums = torch.zeros(3, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
        move_parts(a, b, parts, page_list(*pages, device=CPU), page_sums, 8)
        move_parts(a, b, plan.state, page_list(*slots, device=CPU), slot_sums, 8)
        assert torch.equal(b, expected)
        assert as_digests(page_sums.tolist()) == [
            sum_by_hand(item_bytes(a, plan.src.pages, page)) for page in pages[0]
        ]
        assert as_digests(slot_sums.tolist()) == [sum_by_hand(item_bytes(a, plan.src.state, 2))]


def test_sums_of_planes_sent_one_after_another_add_up() -> None:
    (plan,) = pairs(1, 1)
    pool, index = noisy_pool(plan.src.layout, 3), page_list([1, 4], device=CPU)
    whole, parts = torch.zeros(2, dtype=torch.int64), [part for plane in plan.planes for part in plane]
    move_parts(pool, None, parts, index, whole, 8)
    apart = torch.zeros(2, dtype=torch.int64)
    for first, last in ((0, 3), (3, 5), (5, len(parts))):
        before = words([part.src for part in parts[:first]])
        move_parts(pool, None, parts[first:last], index, apart, 8, before)
    assert torch.equal(whole, apart)
    assert whole.count_nonzero() == 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="compiled kernels are tested in tests/gpu")
def test_the_kernel_equals_its_reference() -> None:
    """The first and the last pair of ranks: others differ from them in offsets only."""
    pytest.importorskip("triton")
    seen = set()
    for sizes in SIZES:
        plans = [*pairs(*sizes)]
        for plan in (plans[0], plans[-1])[: len(plans)]:
            source, size = noisy_pool(plan.src.layout, 1), plan.dst.layout.total_bytes
            paged = [part for plane in plan.planes for part in plane]
            for parts, items in ((paged, ([5, 1, 2], [8, 3, 1])), (plan.state, ([2], [3]))):
                index = page_list(*items, device=CPU)
                for group in part_groups(tuple(parts), CPU):
                    if group.word_bytes == group.sum_bytes:
                        seen.add((group.word_bytes, group.unit, group.rows > 1))
                        expect_equal(source, size, group, index)
    assert {word for word, _, _ in seen} >= {8, 4, 2}
    assert {rows for _, _, rows in seen} == {True, False}


def expect_equal(source: torch.Tensor, size: int, group: PartGroup, index: torch.Tensor) -> None:
    """Expect that the kernel and its reference write the same bytes and checksums, together and apart."""
    found = []
    for launch in (move_group_reference, move_group_kernel):
        moved = torch.zeros(size, dtype=torch.uint8)
        sums, only = torch.zeros(2, index.shape[1], dtype=torch.int64)
        launch(source, moved, group, index, sums, 3, 5)
        launch(source, None, group, index, only, 2, 5)
        assert torch.equal(sums, only)
        found.append((moved.clone(), sums))
        launch(source, moved.zero_(), group, index, None, 7, 0)
        assert torch.equal(moved, found[0][0])
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])
    assert found[0][1].count_nonzero()


def test_the_tables_of_all_layers_and_ranks_are_kept() -> None:
    """The copy of a table to the device waits for it, so the lists of a large model must not displace each other."""
    memory, items = torch.zeros(1 << 12, dtype=torch.uint8), torch.tensor([[0]], dtype=torch.int32)
    blocks = [StridedRows(8 * number, 1 << 11, 8, 1, 8) for number in range(200)]
    lists = [[RowsPair(block, block), RowsPair(other, other)] for block in blocks[:25] for other in blocks]
    sums = torch.zeros(1, dtype=torch.int64)
    part_groups.cache_clear()
    for parts in lists * 2:
        part_groups(tuple(parts), memory.device)
    move_parts(memory, None, lists[0], items, sums, 8)
    assert (part_groups.cache_info().misses, part_groups.cache_info().hits) == (len(lists), len(lists) + 1)


def test_no_peer_needs_a_kernel_that_was_not_compiled_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first prompt for a node of other ranks waited 0.14 s for a compiler."""
    seen: set[tuple[object, ...]] = set()

    def launch(
        src: Tensor, dst: Tensor | None, group: PartGroup, items: Tensor, sums: Tensor | None, *_: int
    ) -> None:
        shape = group.rows, group.row_words, group.unit, group.word_bytes, group.sum_bytes
        seen.add((*shape, dst is None, sums is None))

    monkeypatch.setattr(blocks, "move_group_reference", launch)
    for size in (1, 2, 4):
        for own in (layout_of(8, 4, rank, size) for rank in range(size)):
            memory = noisy_pool(own, 1)
            seen.clear()
            compile_moves(memory, own)
            compile_checksums(memory, own)
            compiled = seen.copy()
            one, sums = page_list([1], [1], device=CPU), torch.zeros(1, dtype=torch.int64)
            for others in (1, 2, 4, 8):
                for other in (layout_of(11, 5, rank, others) for rank in range(others)):
                    sent, received = pair_plan(own, other), pair_plan(other, own)
                    pages = [part for plane in sent.planes for part in plane]
                    for parts in (*((pages,) if not sent.whole else ()), sent.state):
                        for dst, each in ((memory, sums), (memory, None), (None, sums)):
                            move_parts(memory, dst, parts, one, each, 8)
                    for side in (sent.src, received.dst):
                        for rows in (*((side.pages,) if not side.whole else ()), side.state):
                            move_parts(memory, None, [RowsPair(each, each) for each in rows], one, sums, 8)
            assert seen == compiled
            assert compiled
