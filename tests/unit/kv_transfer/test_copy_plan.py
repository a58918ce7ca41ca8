"""Runs and copies against straightforward references, and unequal tensor-parallel sizes with real bytes."""

from __future__ import annotations

import itertools

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_transfer.copy_plan import Copy, copies, runs, senders, sole_pair, whole_rows
from kv_transfer.layout import KvLayout

Pages = st.lists(st.integers(0, 30), max_size=40)


@given(st.data(), Pages)
def test_runs_cover_every_pair_once_and_are_maximal(data: st.DataObject, src: list[int]) -> None:
    dst = data.draw(st.lists(st.integers(0, 30), min_size=len(src), max_size=len(src)))
    found = runs(src, dst)
    assert [(r.src + i, r.dst + i) for r in found for i in range(r.pages)] == list(zip(src, dst))
    for a, b in itertools.pairwise(found):
        assert (a.src + a.pages, a.dst + a.pages) != (b.src, b.dst)


def test_runs_refuse_unequal_lengths() -> None:
    with pytest.raises(ValueError):
        runs([1, 2], [1])


def test_one_copy_per_run_and_plane() -> None:
    src = KvLayout.build("m", "float32", 2, 8, [(2, 4)])
    dst = KvLayout.build("m", "float32", 2, 100, [(2, 4)])
    k, v = dst.planes
    page = src.planes[0].page_bytes
    assert copies(src, dst, runs([1, 2, 5], [7, 8, 9])) == [
        Copy(page, k.offset + 7 * page, 2 * page),
        Copy(5 * page, k.offset + 9 * page, page),
        Copy(src.planes[1].offset + page, v.offset + 7 * page, 2 * page),
        Copy(src.planes[1].offset + 5 * page, v.offset + 9 * page, page),
    ]


def _view(memory: npt.NDArray[np.uint8], shape: KvLayout, index: int) -> npt.NDArray[np.float32]:
    plane = shape.planes[index]
    flat = memory[plane.offset : plane.offset + shape.plane_bytes(plane)]
    return flat.view(np.float32).reshape(shape.shape(plane))


@pytest.mark.parametrize(
    ("src_tp", "dst_tp"), [(1, 1), (1, 2), (2, 1), (1, 4), (4, 1), (2, 4), (4, 2), (4, 4)]
)
@pytest.mark.parametrize("heads", [1, 2, 8])
def test_unequal_tensor_parallel_sizes_move_every_head_once(src_tp: int, dst_tp: int, heads: int) -> None:
    layers, dim, tokens = [(heads, 3), (heads, 3)], 3, 2
    src_pages, dst_pages = [3, 4, 1], [0, 1, 5]
    rng = np.random.default_rng(0)
    whole = [rng.random((6, tokens, heads, dim), dtype=np.float32) for _ in range(4)]  # the unsplit planes
    sources = []
    for rank in range(src_tp):
        shape = KvLayout.build("m", "float32", tokens, 6, layers, rank, src_tp)
        memory = np.zeros(shape.total_bytes, np.uint8)
        for i, plane in enumerate(shape.planes):
            _view(memory, shape, i)[:] = whole[i][:, :, list(shape.heads(plane))]
        sources.append((shape, memory))
    for rank in range(dst_tp):
        shape = KvLayout.build("m", "float32", tokens, 7, layers, rank, dst_tp)
        memory = np.zeros(shape.total_bytes, np.uint8)
        written = np.zeros(shape.total_bytes, np.uint8)
        for sender, head_range in senders(heads, src_tp, rank, dst_tp):
            src_shape, src_memory = sources[sender]
            assert set(head_range) <= set(src_shape.heads(src_shape.planes[0]))
            for copy in copies(src_shape, shape, runs(src_pages, dst_pages)):
                memory[copy.dst : copy.dst + copy.length] = src_memory[copy.src : copy.src + copy.length]
                written[copy.dst : copy.dst + copy.length] += 1
        expected = np.zeros_like(memory)
        for i, plane in enumerate(shape.planes):
            part = whole[i][:, :, list(shape.heads(plane))]
            _view(expected, shape, i)[dst_pages] = part[src_pages]
        np.testing.assert_array_equal(memory, expected)
        assert written.max() == 1, "a head was sent by two ranks"


def test_equal_sizes_pair_ranks_by_number_even_when_heads_are_replicated() -> None:
    for tp in (1, 2, 4, 8):
        for rank in range(tp):
            assert [who for who, _ in senders(2, tp, rank, tp)] == [rank]
    whole = KvLayout.build("m", "float32", 2, 6, [(8, 4)])
    half = KvLayout.build("m", "float32", 2, 6, [(8, 4)], 1, 2)
    assert whole_rows(whole, whole)
    assert not whole_rows(whole, half)
    assert sole_pair(half, half)
    assert not sole_pair(whole, half)


def test_replicated_heads_are_spread_over_their_holders() -> None:
    # one head, four prefill ranks hold it, four of eight decode ranks each ask another one
    assert [senders(1, 4, rank, 8)[0][0] for rank in range(8)] == [0, 1, 2, 3, 0, 1, 2, 3]
