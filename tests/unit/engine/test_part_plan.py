"""Parts of attention follow from the requests' lengths: long requests have more of them, and all have a place."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from common.engine.attention import step_attention
from common.engine.forward.batch import ForwardBatch, ForwardMode
from common.engine.ops.decode_attention import decode_triton
from common.engine.ops.key_parts import Division
from common.engine.ops.part_plan import FIELDS, GRANULE, MAX_SPARE, places_in, places_of, plan_parts
from common.engine.ops.step_plans import plan_decode, plan_verify
from common.engine.ops.triton_kernel import cdiv, tl
from common.engine.ops.verify_attention import verify_reference, verify_triton
from tests.fakes.covering import every_value
from tests.fakes.tiny_model import CONFIG, tiny_model
from tests.unit.engine.paged_driver import Driver
from tests.unit.engine.scattered_cache import BAD_PAGE, Cache

pytestmark = [
    pytest.mark.skipif(tl is None, reason="Triton is not installed"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="compiled kernels are tested in tests/gpu"),
]


def parts_of(plan: torch.Tensor, requests: int) -> tuple[list[list[int]], list[int]]:
    """Return the fields of each place, and the places of the requests' first parts."""
    places = places_in(plan, requests)
    return plan[: places * FIELDS].view(places, FIELDS).tolist(), plan[places * FIELDS :].tolist()


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.one_of(st.integers(0, 40), st.integers(0, 9000)), min_size=2, max_size=9),
    splits=st.integers(1, 6),
    spare=st.integers(0, 8),
    least=st.sampled_from([16, 64, 128]),
    kept_out=st.sampled_from([0, 3]),
    window=st.sampled_from([None, 0, 100]),
)
def test_every_key_is_in_one_part(
    lengths: list[int], splits: int, spare: int, least: int, kept_out: int, window: int | None
) -> None:
    requests = len(lengths)
    places = requests * splits + min(spare, requests - 1)
    plan = plan_parts(torch.tensor(lengths, dtype=torch.int32), splits, places, least, kept_out, window)
    assert places_in(plan, requests) == places
    fields, firsts = parts_of(plan, requests)
    keys = [max(length - kept_out, 0) for length in lengths]
    keys = keys if window is None else [min(each, window) for each in keys]
    size = fields[0][3] * GRANULE
    counts = [max(cdiv(each, size), 1) for each in keys]
    assert firsts == [sum(counts[:row]) for row in range(requests + 1)]
    used = [[row, part, lengths[row], fields[0][3]] for row in range(requests) for part in range(counts[row])]
    assert fields[: len(used)] == used
    assert len(used) <= places
    assert all(each == [0, 1, 0, 1] for each in fields[len(used) :]), "parts without keys"
    # No smaller part would do: it would be smaller than those of an equal division, or too many would be needed.
    granules = sum(cdiv(each, GRANULE) for each in keys)
    equal = max(cdiv(granules, requests * splits) * GRANULE, least)
    smaller = size - GRANULE
    assert size >= equal
    assert size == equal or sum(max(cdiv(each, smaller), 1) for each in keys) > places


def test_the_keys_of_all_requests_may_be_too_many_for_32_bits() -> None:
    """Requests may share the pages of a long prefix."""
    requests, longest = 512, 10_000_000
    places = places_of(requests, 1, longest, 128)
    plan = plan_parts(torch.full((requests,), longest, dtype=torch.int32), 1, places, 128)
    fields, firsts = parts_of(plan, requests)
    assert firsts == list(range(requests + 1))
    assert fields[0][3] == cdiv(longest, GRANULE)


def test_requests_of_one_length_have_equally_many_parts() -> None:
    """As many as `splits` says, whatever spare places there are."""
    for requests, splits in ((2, 16), (16, 4), (64, 1)):
        places = places_of(requests, splits, 8192, 64)
        assert places == requests * splits + min(requests - 1, MAX_SPARE)
        plan = plan_parts(torch.full((requests,), 1024, dtype=torch.int32), splits, places, 64)
        assert parts_of(plan, requests)[1] == [row * splits for row in range(requests + 1)]


def test_no_more_places_than_parts_that_keys_can_have() -> None:
    assert places_of(8, 3, 100, 64) == 16
    assert places_of(8, 1, 64, 64) == 8


def test_one_long_request_among_short_ones_is_divided() -> None:
    """Its parts are about as long as the keys that each program would have if all were shared equally."""
    lengths = [1000] * 15 + [50_000]
    places = places_of(16, 3, 65_536, 128)
    plan = plan_parts(torch.tensor(lengths, dtype=torch.int32), 3, places, 128)
    fields, firsts = parts_of(plan, 16)
    assert firsts[16] - firsts[15] > 30, "parts of the long one"
    assert fields[0][3] * GRANULE == math.ceil(65_000 / 48 / GRANULE) * GRANULE


def test_one_request_needs_no_plan() -> None:
    query, plane = torch.zeros(1, 4, 16), torch.zeros(4, 16, 2, 16)
    length, tree = torch.tensor([40], dtype=torch.int32), torch.ones(1, 1, 1, dtype=torch.bool)
    assert plan_decode(query, plane, length, 64, None) is None
    assert plan_verify(query, plane, length, tree, 64, None) is None


LENGTHS = [1, 350, 64, 9, 100, 30]


@pytest.mark.parametrize(("splits", "window"), every_value((1, 2, 30), (None, 70, 200)))
def test_decode_steps_of_unequal_requests(splits: int, window: int | None) -> None:
    """With 30 parts of 2 rows a kernel adds them up, else the last program."""
    heads, kv_heads, dim = 4, 2, 16
    cache = Cache(LENGTHS, 16, kv_heads, dim, torch.float32)
    lengths, query = torch.tensor(LENGTHS, dtype=torch.int32), torch.randn(len(LENGTHS), heads, dim)
    key, value = cache.planes
    given = query, key, value, cache.page_table, lengths, 1024, window, dim**-0.5
    plan = plan_decode(query, key, lengths, 1024, window, Division(splits, 16, 2))
    assert plan is not None
    firsts = parts_of(plan, len(LENGTHS))[1]
    assert firsts[2] - firsts[1] > firsts[1] - firsts[0], "the long request has more parts"
    found = decode_triton(*given, plan=plan, division=Division(splits, 16, 2))
    for row in range(len(LENGTHS)):
        expected = cache.expected(row, query[row : row + 1], window)
        torch.testing.assert_close(found[row : row + 1].double(), expected, atol=3e-6, rtol=3e-6)


@pytest.mark.parametrize(("splits", "window"), every_value((1, 3, 30), (70, None)))
def test_trees_of_unequal_requests(splits: int, window: int | None) -> None:
    heads, kv_heads, dim, new = 4, 2, 16, 3
    lengths = torch.tensor([max(each, new) for each in LENGTHS], dtype=torch.int32)
    cache = Cache(lengths.tolist(), 16, kv_heads, dim, torch.float32)
    tree = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 1]], dtype=torch.bool)
    trees = tree.repeat(len(LENGTHS), 1, 1)
    query, (key, value) = torch.randn(new * len(LENGTHS), heads, dim), cache.planes
    given = query, key, value, cache.page_table, lengths, trees, 1024, window, dim**-0.5
    plan = plan_verify(query, key, lengths, trees, 1024, window, Division(splits, 16, 2))
    found = verify_triton(*given, plan=plan, division=Division(splits, 16, 2))
    torch.testing.assert_close(found, verify_reference(*given), atol=3e-6, rtol=3e-6)


def test_lengths_of_other_requests_are_refused() -> None:
    """A plan of more requests than attend would have other places than their kernel reads."""
    cache = Cache([20, 40, 30], 16, 2, 16, torch.float32)
    lengths, trees = torch.tensor(cache.lengths, dtype=torch.int32), torch.ones(2, 1, 1, dtype=torch.bool)
    key, value = cache.planes
    given = torch.randn(2, 4, 16), key, value, cache.page_table, lengths
    with pytest.raises(AssertionError, match="3 lengths for 2 requests"):
        decode_triton(*given, 64, None, 0.25)
    with pytest.raises(AssertionError, match="3 lengths for 2 requests"):
        verify_triton(*given, trees, 64, None, 0.25)


def test_empty_rows_of_a_graph_stay_zero() -> None:
    """A batch has fewer requests than its graph; empty rows have length 0."""
    cache = Cache([500, 40], 16, 2, 16, torch.float32)
    lengths = torch.tensor([500, 40, 0, 0], dtype=torch.int32)
    table = torch.cat([cache.page_table, torch.full_like(cache.page_table, BAD_PAGE)])
    query, (key, value) = torch.randn(4, 4, 16), cache.planes
    for splits in (1, 3, 30):
        given = query, key, value, table, lengths, 1024, None, 0.25
        found = decode_triton(*given, division=Division(splits, 16, 2))
        assert not found[2:].any()
        for row in range(2):
            expected = cache.expected(row, query[row : row + 1], None)
            torch.testing.assert_close(found[row : row + 1].double(), expected, atol=3e-6, rtol=3e-6)


def test_layers_with_one_window_share_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """And each forward makes its own, since lengths differ."""
    planned: list[int | None] = []

    def plan(batch: ForwardBatch, query: torch.Tensor, keys: torch.Tensor, window: int | None) -> None:
        planned.append(window)

    monkeypatch.setattr(step_attention, "plan_pages", plan)
    windows = (None, 6) * 2
    model = tiny_model(config=replace(CONFIG, num_layers=4, sliding_windows=windows))
    driver = Driver(model, [torch.arange(20)] * 2, page_size=4)
    driver.run([0, 1], [8, 3])
    for forwards in (1, 2):
        planned.clear()
        driver.run([0, 1], [1, 1], ForwardMode.DECODE)
        assert planned == [None, 6], f"decode step {forwards}"
