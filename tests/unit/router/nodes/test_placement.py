"""Placement policies as pure functions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from common.messages.identity import NodeLoad, Role
from router.nodes.measured_steps import StepTime
from router.nodes.placement import (
    ANSWER_TOKENS,
    Candidate,
    LeastLoaded,
    PlacementPolicy,
    RoundRobin,
    choose_pair,
    decode_cost,
    decode_requests,
    make_policy,
    prefill_cost,
)


def candidate(name: str, assigned: int = 0, ready_ms: float = 0.0, **load: int) -> Candidate:
    return Candidate(
        name,
        f"incarnation of {name}",
        msgspec.convert({"total_pages": 100, "free_pages": 100, **load}, NodeLoad),
        assigned,
        ready_ms,
    )


def test_round_robin_is_an_exact_rotation() -> None:
    policy = RoundRobin()
    three = [candidate(name) for name in ("c", "a", "b")]
    assert [policy.choose(three).name for _ in range(7)] == list("abcabca")
    two = [candidate(name) for name in ("a", "c")]  # b has left
    assert [policy.choose(two).name for _ in range(3)] == list("cac")
    four = [candidate(name) for name in "abcd"]
    assert [policy.choose(four).name for _ in range(4)] == list("dabc")


@given(st.lists(st.sampled_from("abcdefgh"), min_size=1, max_size=8, unique=True), st.integers(1, 5))
def test_round_robin_gives_everybody_the_same(names: list[str], rounds: int) -> None:
    policy = RoundRobin()
    chosen = Counter(policy.choose([candidate(n) for n in names]).name for _ in range(rounds * len(names)))
    assert set(chosen.values()) == {rounds}


def test_a_prompt_goes_where_it_is_computed_soonest() -> None:
    policy = LeastLoaded(prefill_cost)
    nodes = [candidate("a", 1, 500), candidate("b", 9, 100), candidate("c", 2, 100)]
    assert policy.choose(nodes).name == "c", "soonest, then fewest requests"


def test_decode_goes_where_the_smallest_batch_is_and_avoids_full_pools() -> None:
    policy = LeastLoaded(decode_cost)
    assert policy.choose([candidate("a", 5), candidate("b", 4)]).name == "b"
    assert policy.choose([candidate("a", 0, running=9), candidate("b", 4)]).name == "b", (
        "requests of others count, too"
    )
    full, free = candidate("a", 4, free_pages=2), candidate("b", 5)
    assert policy.choose([full, free]).name == "b"
    cached = candidate("a", 4, free_pages=2, cached_pages=90)
    assert policy.choose([cached, free]).name == "a", "cached pages count as free"


def test_a_node_without_a_load_report_counts_as_empty() -> None:
    fresh = Candidate("a", "i", NodeLoad(), 0, 0)
    assert decode_cost(fresh) == 0
    assert LeastLoaded(decode_cost).choose([fresh, candidate("b", 1)]).name == "a"


@pytest.mark.parametrize("names", ["ab", "abcde", "abcdefghijklmnop"])
def test_equals_take_turns_in_drawn_order(names: str) -> None:
    policy = LeastLoaded(prefill_cost)
    nodes = [candidate(name) for name in names]
    rounds = [[policy.choose(nodes).name for _ in nodes] for _ in range(40)]
    assert [sorted(each) for each in rounds] == [[*names]] * 40, "a node is passed over"
    assert {each[0] for each in rounds} == {*names} or len(names) > 8
    assert len({"".join(each) for each in rounds}) > 1


@pytest.mark.parametrize("period", [2, 3, 4])
def test_a_pattern_of_the_traffic_reaches_all_equals(period: int) -> None:
    """If every second, third or fourth prompt is long, no node gets more of them than its share."""
    policy = LeastLoaded(prefill_cost)
    nodes = [candidate(name) for name in "abcdef"[:period]]
    chosen = [policy.choose(nodes).name for _ in range(400 * period)]
    longs = Counter(chosen[::period])
    assert all(300 / period < longs[node.name] < 520 / period for node in nodes)


def test_equals_take_turns_when_others_leave_and_return() -> None:
    policy = LeastLoaded(prefill_cost)
    nodes = [candidate(name) for name in "abcdef"]
    chosen = Counter(policy.choose(nodes[number % 3 :]).name for number in range(3000))
    assert min(chosen[name] for name in "cdef") > 400


@given(
    st.lists(
        st.tuples(st.integers(0, 9), st.integers(0, 999), st.integers(0, 100), st.integers(0, 9)),
        min_size=1,
        max_size=6,
    )
)
def test_the_choice_is_a_candidate_of_least_cost(shapes: list[tuple[int, int, int, int]]) -> None:
    nodes = [
        candidate(f"n{i}", assigned, tokens, free_pages=free, running=running)
        for i, (assigned, tokens, free, running) in enumerate(shapes)
    ]
    for cost in (prefill_cost, decode_cost):
        chosen = make_policy("least_loaded", cost).choose(nodes)
        assert chosen in nodes
        assert cost(chosen) == min(map(cost, nodes))
        assert make_policy("round_robin", cost).choose(nodes) in nodes


def shares(policy: PlacementPolicy, weights: dict[str, float], choices: int) -> Counter[str]:
    nodes = [replace(candidate(name), weight=weight) for name, weight in weights.items()]
    return Counter(policy.choose(nodes).name for _ in range(choices))


@given(
    st.dictionaries(st.sampled_from("abcdefgh"), st.floats(0.1, 1.0), min_size=1, max_size=8),
    st.sampled_from(["round_robin", "least_loaded"]),
)
def test_idle_nodes_take_requests_by_their_weight(weights: dict[str, float], name: str) -> None:
    """No node starves, and one of reduced weight takes no more than its share."""
    policy = make_policy(name, decode_cost)
    chosen = shares(policy, weights, 500)
    total, most = sum(weights.values()), max(weights.values())
    for node, weight in weights.items():
        share = 500 * weight / total
        assert chosen[node] >= int(share) - len(weights)
        if weight < most:
            assert chosen[node] <= share + 1


def test_a_reduced_weight_counts_against_load() -> None:
    """A node with a tenth of the weight is full with a tenth of the requests."""
    policy = LeastLoaded(decode_cost)
    busy = [candidate("old", 20), replace(candidate("new", 3), weight=0.1)]
    assert {policy.choose(busy).name for _ in range(100)} == {"old"}


def test_the_only_node_takes_all_whatever_its_weight() -> None:
    for policy in (RoundRobin(), LeastLoaded(prefill_cost)):
        assert shares(policy, {"a": 0.1}, 20) == {"a": 20}


def pairs_of(bad: set[tuple[str, str]], names: str = "ab", choices: int = 8) -> set[str]:
    policies = {"prefill": RoundRobin(), "decode": RoundRobin()}
    prefills = [candidate(f"p{n}") for n in names]
    decodes = [candidate(f"d{n}") for n in names]
    keys = {(f"incarnation of {p}", f"incarnation of {d}") for p, d in bad}
    chosen = [choose_pair(prefills, decodes, policies, keys, lambda _, each: each) for _ in range(choices)]  # type: ignore[arg-type]
    return {p.name + d.name for p, d in chosen}


def test_a_bad_pair_is_not_chosen_and_its_nodes_are() -> None:
    chosen = pairs_of({("pa", "da")})
    assert "pada" not in chosen
    assert {"p" + c for c in "ab"} <= {pair[:2] for pair in chosen}
    assert {"d" + c for c in "ab"} <= {pair[2:] for pair in chosen}


def test_a_prefill_node_without_a_good_link_is_left_out() -> None:
    assert pairs_of({("pa", "da"), ("pa", "db"), ("pb", "da")}) == {"pbdb"}


def test_bad_pairs_are_better_than_none() -> None:
    assert pairs_of({(f"p{p}", f"d{d}") for p in "ab" for d in "ab"}) == {"pada", "pbdb"}


def test_the_cost_of_a_decode_node_is_transfer_wait_and_slower_steps() -> None:
    """Of 100 pages 70 are used and 20 are kept, so 11 must become free for 21: that takes 11/70 of an answer."""
    loaded = candidate("d", free_pages=10, cached_pages=20, running=3, transferring=2, queued=1)
    made = replace(loaded, assigned=4, moved=21 * 16, transfer_ms=7.0, step=StepTime(10.0, 0.5), accept=2.0)
    steps = ANSWER_TOKENS / 2.0
    assert decode_requests(made) == 6, "those that are on their way count too"
    assert decode_cost(made) == pytest.approx(7.0 + steps * (10.0 + 3.0) * 11 / 70 + steps * 3.0)
    roomy = replace(made, moved=10 * 16)
    assert decode_cost(roomy) == pytest.approx(7.0 + steps * 3.0), "they fit"
    assert decode_cost(replace(roomy, session_ms=5.0)) == pytest.approx(2.0 + steps * 3.0)
    assert decode_requests(replace(made, assigned=9)) == 9


def test_the_transfer_from_the_chosen_prefill_node_decides_among_decode_nodes() -> None:
    prefills = [candidate("p0", ready_ms=5.0), candidate("p1")]
    decodes = [candidate("d0"), candidate("d1")]
    policies: dict[Role, PlacementPolicy] = {
        "prefill": make_policy("least_loaded", prefill_cost),
        "decode": make_policy("least_loaded", decode_cost),
    }

    def link(prefill: Candidate, nodes: Sequence[Candidate]) -> list[Candidate]:
        near = {"p0": "d0", "p1": "d1"}[prefill.name]
        return [replace(node, transfer_ms=0.0 if node.name == near else 50.0) for node in nodes]

    for _ in range(3):
        assert [each.name for each in choose_pair(prefills, decodes, policies, frozenset(), link)] == [
            "p1",
            "d1",
        ]
