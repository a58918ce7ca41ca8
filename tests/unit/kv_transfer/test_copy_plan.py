"""Runs and copies against straightforward references."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_transfer.copy_plan import Copy, copies, runs
from kv_transfer.pair_plan import pair_plan
from tests.fakes.pools import layers_layout

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
    src = layers_layout("m", "float32", 2, 8, [(2, 4)])
    dst = layers_layout("m", "float32", 2, 100, [(2, 4)])
    k, v = dst.planes
    page = src.planes[0].page_bytes
    assert pair_plan(src, dst).whole
    assert copies(pair_plan(src, dst), runs([1, 2, 5], [7, 8, 9])) == [
        Copy(page, k.offset + 7 * page, 2 * page),
        Copy(5 * page, k.offset + 9 * page, page),
        Copy(src.planes[1].offset + page, v.offset + 7 * page, 2 * page),
        Copy(src.planes[1].offset + 5 * page, v.offset + 9 * page, page),
    ]
