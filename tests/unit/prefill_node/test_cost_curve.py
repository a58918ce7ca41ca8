"""The cost curve: interpolated from measurements, learnt from forwards, and the sizes that follow from it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.engine.graphs.ladders import prefill_token_buckets
from prefill_node.cost_curve import CONTEXT_RANGE, CostCurve

SIZES = prefill_token_buckets(8192)
H200 = {64: 5.3, 512: 13.4, 1024: 25.0, 2048: 49.6, 8192: 221.0}


def test_a_forward_takes_as_long_as_the_size_that_holds_it() -> None:
    curve = CostCurve((8, 16, 64), {8: 1.0, 64: 8.0})
    assert [curve.ms(tokens) for tokens in (1, 8, 9, 16, 17, 64)] == [1.0, 1.0, 2.0, 2.0, 8.0, 8.0]
    assert CostCurve((8, 128), {16: 2.0, 64: 8.0}).ms(8) == 2.0
    assert CostCurve((8, 128), {16: 2.0, 64: 8.0}).ms(128) == 16.0


def test_the_step_is_where_larger_forwards_gain_nothing() -> None:
    curve = CostCurve(SIZES, H200)
    assert 768 <= curve.step <= 1024
    assert CostCurve(SIZES).step == CostCurve(SIZES).step, "the default curve is deterministic"
    assert CostCurve((64,)).step == 64
    assert CostCurve(prefill_token_buckets(448), H200, grid=192).step == 384


@given(st.integers(1, 40_000), st.integers(0, 20_000))
def test_cutting_a_prompt_costs_less_than_those_that_pass_it_gain(tokens: int, start: int) -> None:
    curve = CostCurve(SIZES, H200)
    assert 1 <= curve.cut(tokens) <= min(tokens, curve.largest)
    if tokens <= curve.largest:
        context, whole = curve.ms(1, start * tokens) - curve.ms(1), curve.ms(tokens)
        gained = (whole - curve.ms(curve.cut(tokens))) / 2
        assert curve.prompt_ms(tokens, start) - context <= whole + gained + 1e-6
    assert curve.prompt_ms(tokens, start + 1) > curve.prompt_ms(tokens, start)


@pytest.mark.parametrize("start", [0, 777])
@pytest.mark.parametrize(("chunks", "rest"), [(1, 0), (3, 0), (4, 1), (5, 300)])
def test_a_prompt_that_is_cut_takes_as_long_as_its_chunks(chunks: int, rest: int, start: int) -> None:
    """Each chunk attends to what was before it."""
    curve = CostCurve((64, 128, 512), {64: 2.0, 128: 2.5, 512: 9.0}, context_ms=0.001)
    assert curve.step == 512
    parts = [*[512] * chunks, *([rest] if rest else [])]
    wanted = sum(curve.ms(part, part * (start + 512 * index)) for index, part in enumerate(parts))
    assert curve.prompt_ms(512 * chunks + rest, start) == pytest.approx(wanted)


@given(st.lists(st.tuples(st.sampled_from(SIZES), st.floats(0.5, 2.0)), max_size=40))
def test_whatever_it_learns_times_stay_positive_and_a_step_exists(seen: list[tuple[int, float]]) -> None:
    curve = CostCurve(SIZES, H200)
    for tokens, factor in seen:
        curve.learn(tokens, 0, factor * curve.ms(tokens))
        assert all(curve.ms(size) > 0 for size in SIZES)
        assert curve.step in SIZES


def test_it_learns_from_forwards_and_their_neighbours() -> None:
    curve = CostCurve(SIZES, H200)
    for _ in range(200):
        curve.learn(1024, 0, 50.0)
    assert curve.ms(1024) == pytest.approx(50.0, rel=0.01)
    assert curve.ms(960) > 1.5 * CostCurve(SIZES, H200).ms(960)
    assert curve.ms(8192) == pytest.approx(221.0), "sizes more than a factor of two away keep theirs"


def test_one_outlier_changes_little() -> None:
    curve = CostCurve(SIZES, H200)
    curve.learn(1024, 0, 60_000.0)
    assert curve.ms(1024) < 1.1 * 25.0


def test_it_learns_what_context_adds() -> None:
    curve = CostCurve(SIZES, H200)
    for _ in range(200):
        curve.learn(512, 512 * 16_384, 20.0)
    assert curve.ms(512, 512 * 16_384) == pytest.approx(20.0, rel=0.02)
    assert curve.ms(512) == pytest.approx(13.4)


@pytest.mark.parametrize("error", [-0.3, 0.7])
def test_short_forwards_after_a_cached_prefix_teach_their_size_and_not_context(error: float) -> None:
    curve = CostCurve(SIZES, H200)
    before, slower = curve.prompt_ms(32_768), 5.3 + error
    for _ in range(100):
        curve.learn(16, 16 * 2000, slower)
    assert curve.ms(16, 16 * 2000) == pytest.approx(slower, rel=0.01)
    assert curve.prompt_ms(32_768) == pytest.approx(before, rel=0.01)


@pytest.mark.parametrize("ms", [0.001, 60_000.0])
def test_the_cost_of_context_stays_near_the_first_one(ms: float) -> None:
    curve, contexts = CostCurve(SIZES, H200), 512 * 16_384
    first = curve.ms(512, contexts) - curve.ms(512)
    for _ in range(300):
        curve.learn(512, contexts, ms)
    learnt = curve.ms(512, contexts) - curve.ms(512)
    assert learnt == pytest.approx(first * CONTEXT_RANGE if ms > 1.0 else first / CONTEXT_RANGE)


@pytest.mark.parametrize(
    ("grid", "most", "largest"),
    [(1, 100, 64), (1, 64, 64), (1, 3, 16), (64, 100, 64), (64, 20, 64), (1, 999, 256)],
)
def test_a_part_of_it_has_the_same_times(grid: int, most: int, largest: int) -> None:
    """Forwards are bounded by the largest size that is on the grid, or the smallest such one."""
    curve = CostCurve((16, 32, 64, 256), {16: 2.0, 64: 3.0, 256: 9.0}, grid)
    curve.learn(32, 0, 4.0)
    part = curve.up_to(most)
    assert part.largest == largest
    for tokens in (1, 16, 30, 60):
        assert part.ms(tokens, 100) == pytest.approx(curve.ms(min(tokens, largest), 100))
    assert part.cut(1000) <= largest
