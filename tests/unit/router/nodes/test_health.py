"""Weights and breakers of nodes, and their effect on the choice of a pair."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from random import Random

import pytest

from common.messages.identity import Role
from common.observability.logs import Log
from router.nodes.health import CHECKSUM_LIMITS, NODE_LIMITS, NodeHealth
from router.nodes.placement import Candidate, LeastLoaded, PlacementPolicy, decode_cost, make_policy
from router.nodes.placer import Placer
from router.nodes.prompt_times import PromptTime
from router.nodes.registry import NodeRegistry
from tests.fakes.clock import Clock
from tests.fakes.placement_rules import DEFAULT_RULES
from tests.unit.router.nodes.test_registry import register


class Rig:
    def __init__(self, policy: str = "round_robin") -> None:
        self.clock = Clock()
        self.health = NodeHealth(10.0, self.clock)
        self.registry = NodeRegistry(
            "f" * 64, 3.0, 5.0, self.clock, Log("router"), lambda node, reason: None, lambda: None
        )
        policies: dict[Role, PlacementPolicy] = {
            "prefill": make_policy(policy, decode_cost),
            "decode": make_policy(policy, decode_cost),
        }
        self.placer = Placer(self.registry, policies, self.health, Random(1), DEFAULT_RULES)

    def join(self, role: Role, *names: str) -> None:
        for name in names:
            assert self.registry.register(register(role, name)) is None

    def choices(self, count: int, avoid: frozenset[str] = frozenset()) -> Counter[str]:
        chosen: Counter[str] = Counter()
        for _ in range(count):
            pair = self.placer.choose(avoid)
            assert not isinstance(pair, str)
            chosen.update(node.name for node in pair)
        return chosen

    def fail(self, name: str, times: int = NODE_LIMITS.failures) -> None:
        for _ in range(times):
            self.health.node_failed(self.registry.node(f"i-{name}"))


def test_the_missing_role_is_named() -> None:
    rig = Rig()
    assert rig.placer.choose() == "prefill"
    rig.join("prefill", "p0")
    assert rig.placer.choose() == "decode"
    assert not rig.placer.has_others(set())


@pytest.mark.parametrize("policy", ["round_robin", "least_loaded"])
def test_the_share_of_a_new_node_rises(policy: str) -> None:
    rig = Rig(policy)
    rig.join("prefill", "p0", "p1")
    rig.join("decode", "d0")
    assert rig.choices(20) == {"p0": 10, "p1": 10, "d0": 20}, (
        "new nodes share equally, and a single node takes all"
    )
    rig.clock.now += 10
    rig.join("prefill", "p2")
    shares = []
    for _ in range(3):
        shares.append(rig.choices(210)["p2"])
        rig.clock.now += 5
    assert shares[0] == pytest.approx(10, abs=2)  # a weight of 0.1 against 2.1
    assert shares[1] == pytest.approx(210 * 0.55 / 2.55, abs=2)
    assert shares[2] == 70


class Counting:
    """A policy that notes how many candidates it gets."""

    def __init__(self) -> None:
        self.policy = LeastLoaded(decode_cost)
        self.sample = self.policy.sample
        self.counts: list[int] = []

    def choose(self, candidates: Sequence[Candidate]) -> Candidate:
        self.counts.append(len(candidates))
        return self.policy.choose(candidates)


def test_many_alike_nodes_are_sampled_and_none_is_left_out() -> None:
    rig = Rig()
    policy = Counting()
    rig.placer = Placer(
        rig.registry, {"prefill": policy, "decode": Counting()}, rig.health, Random(1), DEFAULT_RULES
    )
    rig.join("prefill", *(f"p{number}" for number in range(100)))
    rig.join("decode", "d0", "d1")
    rig.clock.now += 10  # the end of the slow start
    chosen: Counter[str] = Counter()
    for room in range(300):
        pair = rig.placer.choose()
        assert not isinstance(pair, str)
        pair[0].rooms.add(room, 1)
        chosen[pair[0].name] += 1
    assert max(policy.counts) <= policy.policy.most_candidates
    assert len(chosen) == 100
    assert all(2 <= count <= 4 for count in chosen.values())
    policy.counts.clear()
    rig.fail("p7")
    assert rig.choices(200)["p7"] == 0, "a breaker is open"
    assert max(policy.counts) <= policy.policy.most_candidates


def test_new_nodes_among_many_take_their_share() -> None:
    rig = Rig("least_loaded")
    rig.join("prefill", *(f"p{number:02}" for number in range(40)))
    rig.join("decode", "d0")
    rig.clock.now += 100
    new = {f"new{number}" for number in range(20)}
    rig.join("prefill", *new)
    rig.clock.now += 5  # half of the slow start: a weight of 0.55
    chosen = rig.choices(3000)
    share = sum(chosen[name] for name in new) / 3000
    assert share == pytest.approx(20 * 0.55 / (40 + 20 * 0.55), abs=0.06)
    rig.clock.now += 5
    chosen = rig.choices(3000)
    assert sum(chosen[name] for name in new) / 3000 == pytest.approx(20 / 60, abs=0.06), (
        "no share is left behind"
    )


@pytest.mark.parametrize("policy", ["least_loaded", "power_of_two", "cache_aware"])
def test_a_new_node_among_many_does_not_take_more_because_it_is_idle(policy: str) -> None:
    """By its load alone it would win every sample in which it takes part."""
    rig = Rig(policy)
    rig.join("prefill", *(f"p{number:02}" for number in range(39)))
    rig.join("decode", "d0")
    rig.clock.now += 100
    for number, node in enumerate(rig.registry.eligible_by_role().of["prefill"]):
        node.rooms.add(number, 1000, PromptTime(100.0, 100.0))
    rig.join("prefill", "new")
    rig.clock.now += 1e-3
    share = rig.choices(8000)["new"] / 8000
    assert share == pytest.approx(0.1 / 39.1, rel=0.7)


def test_where_most_of_many_nodes_are_to_be_avoided_the_others_are_found() -> None:
    rig = Rig("least_loaded")
    names = [f"p{number:02}" for number in range(60)]
    rig.join("prefill", *names)
    rig.join("decode", "d0")
    rig.clock.now += 100
    avoid = frozenset(f"i-{name}" for name in names[:-1])
    assert rig.choices(20, avoid) == {"p59": 20, "d0": 20}
    assert sum(rig.choices(20, avoid | {"i-p59"}).values()) == 40, "all of them are better than none"


def test_a_pair_without_a_failed_link_is_found_among_many() -> None:
    rig = Rig("least_loaded")
    names = [f"p{number:02}" for number in range(40)]
    rig.join("prefill", *names)
    rig.join("decode", "d0")
    rig.clock.now += 100
    decode = rig.registry.node("i-d0")
    for name in names[1:]:
        rig.health.transfer_failed(rig.registry.node(f"i-{name}"), decode)
    assert rig.choices(20) == {"p00": 20, "d0": 20}


def test_a_policy_that_asks_for_no_sample_sees_all_nodes() -> None:
    rig = Rig("round_robin")
    names = [f"p{number:02}" for number in range(40)]
    rig.join("prefill", *names)
    rig.join("decode", "d0", "d1")
    rig.clock.now += 10
    assert [next(iter(rig.choices(1))) for _ in names] == names


def test_nodes_that_fail_are_left_out_while_there_are_others() -> None:
    rig = Rig()
    rig.join("prefill", "p0", "p1")
    rig.join("decode", "d0")
    rig.fail("p0", NODE_LIMITS.failures - 1)
    assert rig.choices(4)["p0"] == 2
    rig.fail("p0", 1)
    assert rig.choices(4) == {"p1": 4, "d0": 4}
    rig.fail("p1")
    rig.fail("d0")
    assert rig.choices(4) == {"p0": 2, "p1": 2, "d0": 4}, "failing nodes are better than none"
    assert [each.breaker for each in rig.health.conditions(rig.registry)] == ["open"] * 3
    rig.clock.now += NODE_LIMITS.first_pause
    prefill, decode = (rig.registry.node(name) for name in ("i-p0", "i-d0"))
    rig.health.placed(prefill, decode, 1)
    rig.health.node_served(prefill)
    assert rig.choices(4)["p0"] == 2, "p1 is due for a trial"


def test_a_pair_to_avoid_is_better_than_a_bad_one() -> None:
    rig = Rig()
    rig.join("prefill", "p0", "p1")
    rig.join("decode", "d0", "d1")
    for prefill, decode in (("p1", "d1"), ("p1", "d0")):
        rig.health.transfer_failed(rig.registry.node(f"i-{prefill}"), rig.registry.node(f"i-{decode}"))
    avoid = frozenset({"i-p0", "i-d0"})
    assert rig.choices(4, avoid)["p0"] == 4
    assert not rig.placer.has_others(avoid)
    assert rig.placer.has_others({"i-p1", "i-d1"})


def test_a_pair_that_corrupts_pages_is_left_out_for_longer() -> None:
    rig = Rig()
    rig.join("prefill", "p0")
    rig.join("decode", "d0", "d1")
    prefill, decode = rig.registry.node("i-p0"), rig.registry.node("i-d0")
    for _ in range(CHECKSUM_LIMITS.failures):
        assert rig.choices(4)["d0"] == 2
        rig.health.corrupted(prefill, decode)
        rig.health.verified(prefill, decode)
    assert rig.choices(4) == {"p0": 4, "d1": 4}
    rig.clock.now += CHECKSUM_LIMITS.first_pause - 1
    assert rig.choices(4)["d0"] == 0
    rig.clock.now += 1
    rig.health.placed(prefill, decode, 1)
    assert rig.choices(4)["d0"] == 0, "one trial at a time"
    rig.health.verified(prefill, decode)
    assert rig.choices(4)["d0"] == 2


def test_a_lost_node_takes_its_history_with_it() -> None:
    rig = Rig()
    rig.join("prefill", "p0")
    rig.join("decode", "d0")
    prefill, decode = rig.registry.node("i-p0"), rig.registry.node("i-d0")
    rig.health.transfer_failed(prefill, decode)
    rig.fail("d0")
    [first, second] = rig.health.conditions(rig.registry)
    assert (first.bad_peers, second.bad_peers, second.breaker) == (["d0"], ["p0"], "open")
    rig.health.lost(decode)
    [first, second] = rig.health.conditions(rig.registry)
    assert (first.bad_peers, second.bad_peers, second.breaker) == ([], [], "closed")


def test_what_comes_after_the_loss_of_a_node_is_not_remembered() -> None:
    """A decode node reports a transfer that failed because its prefill node died: no entry may outlive both."""
    rig = Rig()
    rig.join("prefill", "p0")
    rig.join("decode", "d0")
    prefill, decode = rig.registry.node("i-p0"), rig.registry.node("i-d0")
    rig.registry.lose(prefill, "its socket closed", "closed")
    rig.health.lost(prefill)
    for _ in range(10):
        rig.health.transfer_failed(prefill, decode)
        rig.health.corrupted(prefill, decode)
        rig.health.node_failed(prefill)
        rig.health.prefilled(prefill, 1.0, 1000)
        rig.health.decoded(prefill, 1.0, 1000)
    assert not rig.health.bad_pairs()
    assert not rig.health.nodes.blocked()
    assert rig.health.outliers.seconds_per_token("i-p0") is None


def test_a_slow_node_takes_a_smaller_share() -> None:
    rig = Rig()
    rig.join("prefill", "p0")
    rig.join("decode", "d0", "d1", "d2")
    rig.clock.now += 20
    for _ in range(20):
        for name, seconds in (("d0", 0.1), ("d1", 0.1), ("d2", 0.5)):
            rig.health.decoded(rig.registry.node(f"i-{name}"), seconds, 10)
        rig.choices(1)
        rig.clock.now += 0.5
    assert rig.choices(220)["d2"] == pytest.approx(20, abs=2)
    [_, _, _, slow] = rig.health.conditions(rig.registry)
    assert (slow.weight, slow.seconds_per_token) == (pytest.approx(0.2), pytest.approx(0.05))
