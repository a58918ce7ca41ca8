"""Which prompts share a forward: the division of a queue with the lowest sum of waits, against all divisions."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.engine.graphs.ladders import prefill_token_buckets
from prefill_node.cost_curve import CostCurve
from prefill_node.packing import MAX_DIVIDED, Share, Waiting, share

H200 = CostCurve(prefill_token_buckets(8192), {64: 5.3, 512: 13.4, 1024: 25.0, 2048: 49.6, 8192: 221.0})


def queue_of(*lengths: int) -> list[Waiting]:
    return [Waiting(0, tokens) for tokens in lengths]


def waits(queue: list[Waiting], groups: tuple[int, ...], curve: CostCurve, others: int) -> float:
    """Return the sum of waits if the queue is computed in forwards of so many prompts each."""
    at, total, left = 0, 0.0, list(queue)
    for group in groups:
        tokens = sum(each.remaining for each in left[:group])
        contexts = sum(each.start * each.remaining for each in left[:group])
        spent = curve.prompt_ms(tokens, left[0].start) if group == 1 else curve.ms(tokens, contexts)
        total += spent * (len(left) + others)
        at, left = at + group, left[group:]
    return total


STARTS = st.just(0) | st.integers(0, 100_000)


@given(st.lists(st.tuples(STARTS, st.integers(1, 1200)), min_size=1, max_size=6), st.integers(0, 30))
@settings(max_examples=80)
def test_no_other_division_has_a_lower_sum_of_waits(prompts: list[tuple[int, int]], others: int) -> None:
    """The tokens that precede a prompt's next ones make its forward longer."""
    queue, count = [Waiting(*each) for each in sorted(prompts, key=lambda each: each[1])], len(prompts)
    found = share(queue, H200, others)
    best: dict[int, float] = {}  # prompts of the first forward -> lowest sum
    for cuts in itertools.product((False, True), repeat=count - 1):
        ends = [index + 1 for index, cut in enumerate(cuts) if cut] + [count]
        groups = tuple(end - begin for begin, end in zip([0, *ends], ends, strict=False))
        sum_of_waits = waits(queue, groups, H200, others)
        best[groups[0]] = min(best.get(groups[0], sum_of_waits), sum_of_waits)
    first = max(found.whole, 1)
    assert best[first] == pytest.approx(min(best.values()))


def test_no_prompt_of_a_thousand_tokens_waits_for_another() -> None:
    assert share(queue_of(*[1024] * 8), H200) == Share(1)


def test_short_prompts_share_a_forward() -> None:
    assert share(queue_of(*[16] * 4), H200) == Share(4)
    few, many = share(queue_of(*[64] * 4), H200).whole, share(queue_of(*[64] * 32), H200).whole
    assert 1 < few < many < 32, "the longer the queue, the more a saved forward is worth"


def test_a_long_prompt_is_not_extended_by_short_ones_after_it() -> None:
    cut = share(queue_of(8192, 64), H200)
    assert cut == Share(0, H200.step)


def test_a_long_prompt_is_cut_only_if_enough_shorter_ones_arrive() -> None:
    """Whole it takes 221 ms; the forward in chunks is longer, and later prompts wait for that."""
    assert share(queue_of(8192), H200, passing=0.0) == Share(1)
    assert share(queue_of(8192), H200, passing=0.016) == Share(0, H200.step)
    assert share(queue_of(*[8192] * 9), H200, passing=0.0001) == Share(1)
    assert share(queue_of(20_000), H200, passing=0.0) == Share(0, 8192), "the largest forward"
    assert share(queue_of(20_000), H200, passing=0.016) == Share(0, H200.step)


def test_nothing_waits() -> None:
    assert share([], H200) == Share(0)


class Counting(CostCurve):
    """Counts how often the time of a forward is asked for."""

    asked = 0

    def ms(self, tokens: int, contexts: int = 0) -> float:
        self.asked += 1
        return super().ms(tokens, contexts)


def test_the_work_of_a_plan_does_not_grow_with_the_queue() -> None:
    curve = Counting(H200.sizes, {size: H200.ms(size) for size in H200.sizes})
    asked = []
    for count in (MAX_DIVIDED + 1, 1024):
        curve.asked = 0
        shared = share(queue_of(*[16] * count), curve)
        asked.append(curve.asked)
        assert shared == share(queue_of(*[16] * (MAX_DIVIDED + 1)), H200, count - MAX_DIVIDED - 1)
    assert asked[1] <= 2 * asked[0]
