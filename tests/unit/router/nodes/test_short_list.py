"""Which nodes of a sample are compared for a prompt: the best of the sample and the best known one."""

from __future__ import annotations

from random import Random

import pytest

from common.messages.identity import NodeCounters, NodeLoad, OtherRouters, Role
from common.messages.router_inbox import Heartbeat
from common.observability.logs import Log
from router.nodes.health import NodeHealth
from router.nodes.placed_prompt import PlacedPrompt
from router.nodes.placement import PlacementPolicy, decode_cost, make_policy, prefill_cost, softened
from router.nodes.placer import Placer
from router.nodes.prompt_times import PromptTime
from router.nodes.registry import Node, NodeRegistry
from router.nodes.short_list import LONGEST_MATCHES, ShortLists, any_node
from tests.fakes.clock import Clock
from tests.fakes.placement_rules import DEFAULT_RULES
from tests.unit.router.nodes.test_registry import register

FAST, SLOW = ((1000, 20.0),), ((1000, 60.0),)
NODES = 8
PROMPT = [1] * 1000


class Fleet:
    """Idle nodes that have been up for long."""

    def __init__(self) -> None:
        clock = Clock()
        self.registry = NodeRegistry(
            "f" * 64, 3.0, 5.0, clock, Log("router"), lambda node, why: None, lambda: None
        )
        roles: tuple[Role, ...] = ("prefill", "decode")
        for role in roles:
            for number in range(NODES):
                self.registry.register(register(role, f"{role[0]}{number}", total_pages=1000))
        self.prefills, self.decodes = (
            [node for node in self.registry if node.role == role] for role in roles
        )
        for node in self.registry:
            self.beat(node)
        clock.now += 1000.0
        policies: dict[Role, PlacementPolicy] = {
            "prefill": make_policy("cache_aware", prefill_cost),
            "decode": make_policy("cache_aware", decode_cost),
        }
        self.placer = Placer(self.registry, policies, NodeHealth(10.0, clock), Random(1), DEFAULT_RULES)
        self.history = self.placer.history
        self.lists = ShortLists(self.registry, self.history)
        self._room = 0

    def beat(
        self,
        node: Node,
        times: tuple[tuple[int, float], ...] = FAST,
        free: int = 1000,
        running: int = 0,
        accept: float = 1.0,
    ) -> None:
        load = NodeLoad(prompt_times=times, free_pages=free, total_pages=1000, running=running)
        counters = NodeCounters(avg_spec_accept_length=accept)
        assert self.registry.heartbeat(
            Heartbeat(
                incarnation=node.incarnation,
                sequence=1,
                state="up",
                loop_age_ms=0,
                as_of=0.0,
                load=load,
                counters=counters,
                others=OtherRouters(),
            )
        )

    def busy(self, node: Node, ms: float) -> None:
        self._room += 1
        node.rooms.add(self._room, 100, PromptTime(ms, ms))

    def prompt(self, tokens: list[int] = PROMPT) -> PlacedPrompt:
        return self.history.prompt(tokens, b"", (), b"")

    def holds(self, node: Node, tokens: int = len(PROMPT)) -> None:
        """Note that a node holds so many tokens of the prompt."""
        pair = (node, self.decodes[-1]) if node.role == "prefill" else (self.prefills[-1], node)
        self.history.placed(self.prompt(PROMPT[:tokens]), *pair)

    def prefill(self, sample: list[Node], session_nodes: tuple[str, ...] = ()) -> list[Node]:
        prompt = self.prompt()
        return [
            *self.lists.prefill(
                sample, self.history.matches("prefill", prompt), prompt, session_nodes, any_node
            )
        ]

    def decode(self, sample: list[Node], session_nodes: tuple[str, ...] = ()) -> list[Node]:
        prompt = self.prompt()
        matches = self.history.matches("decode", prompt)
        return [*self.lists.decode(sample, matches, prompt, session_nodes, self.prefills[0], any_node)]


def test_the_shortest_queue_of_equally_fast_nodes_is_taken() -> None:
    fleet = Fleet()
    one, two, three, *_ = fleet.prefills
    fleet.busy(one, 5.0)
    fleet.busy(three, 3.0)
    assert fleet.prefill([one, two, three]) == [two]
    assert fleet.prefill([one, three]) == [three]


def test_a_faster_node_may_have_a_longer_queue() -> None:
    fleet = Fleet()
    fast, slow, *_ = fleet.prefills
    fleet.beat(slow, SLOW)
    fleet.busy(fast, 30.0)
    assert fleet.prefill([slow, fast]) == [fast]
    fleet.busy(fast, 20.0)
    assert fleet.prefill([slow, fast]) == [slow]


def test_a_holder_outside_the_sample_is_taken_where_it_is_clearly_better() -> None:
    fleet = Fleet()
    one, two, holder, *_ = fleet.prefills
    fleet.holds(holder)
    assert fleet.prefill([one, two]) == [holder]
    fleet.busy(holder, 18.0)
    assert fleet.prefill([one, two]) == [one, holder], (
        "20 ms without the prefix, about 18.8 with it: compare both"
    )
    fleet.busy(holder, 18.0)
    assert fleet.prefill([one, two]) == [one]


def test_a_holder_with_far_more_in_its_queue_than_the_shortest_counts_for_nothing() -> None:
    fleet = Fleet()
    one, holder, *_ = fleet.prefills
    fleet.beat(one, ((1000, 50_000.0),))
    fleet.holds(holder)
    fleet.busy(holder, 4000.0)
    assert fleet.prefill([one]) == [holder]
    fleet.busy(holder, 4000.0)
    assert fleet.prefill([one]) == [one], "more than max_imbalance_ms"


def test_few_holders_are_looked_at() -> None:
    fleet = Fleet()
    for number, node in enumerate(fleet.decodes):
        fleet.holds(node, 64 * (number + 1))
    prompt = fleet.prompt()
    found = fleet.lists.holders(fleet.history.matches("decode", prompt), any_node)
    longest = [(node, 64 * (number + 1)) for number, node in enumerate(fleet.decodes)][::-1]
    # Every prompt for a prefill node was placed with the last decode node, none for the others.
    assert found == longest[:LONGEST_MATCHES]
    fleet.registry.unreachable(fleet.decodes[-1])
    found = fleet.lists.holders(fleet.history.matches("decode", prompt), any_node)
    assert found == longest[1 : LONGEST_MATCHES + 1], "one that cannot be reached is passed over"


def test_the_decode_node_with_the_fewest_requests_per_accepted_token_is_taken() -> None:
    fleet = Fleet()
    one, two, *_ = fleet.decodes
    fleet.beat(one, running=3)
    fleet.beat(two, running=4)
    assert fleet.decode([two, one]) == [one]
    fleet.beat(two, running=4, accept=2.0)
    assert fleet.decode([two, one]) == [two]


def test_a_slow_link_counts_and_cached_pages_save_it() -> None:
    fleet = Fleet()
    near, far, *_ = fleet.decodes
    measured = fleet.history.transfers.measured
    measured(fleet.prefills[0].incarnation, near.incarnation, 0.01, 1000)
    measured(fleet.prefills[0].incarnation, far.incarnation, 1.0, 1000)
    assert fleet.decode([far, near]) == [near]
    fleet.beat(near, running=20)
    assert fleet.decode([far, near]) == [near], "10 ms and 20 requests, or 1 s"
    fleet.holds(far)
    assert fleet.decode([near]) == [far]


def test_without_room_for_the_prompt_the_whole_sample_is_compared() -> None:
    fleet = Fleet()
    sample = fleet.decodes[:3]
    fleet.beat(sample[0], free=240)
    for node in sample[1:]:
        fleet.beat(node, running=1)
    assert fleet.decode(sample) == sample, "1000 tokens need 63 pages, and a fifth of the pool is kept free"
    fleet.beat(sample[0], free=300)
    assert fleet.decode(sample) == sample[:1]


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_the_node_of_the_session_is_taken_unless_it_is_much_worse(role: Role) -> None:
    fleet = Fleet()
    nodes, choose = (fleet.prefills, fleet.prefill) if role == "prefill" else (fleet.decodes, fleet.decode)
    one, two, seat, *_ = nodes
    session_nodes = (fleet.prefills[2].incarnation, fleet.decodes[2].incarnation)
    assert choose([one, two], session_nodes) == [seat]
    if role == "prefill":
        fleet.busy(seat, 600.0)
    else:
        fleet.beat(seat, running=40)
    assert choose([one, two], session_nodes) == [one], "by more than session_ms"
    fleet.registry.unreachable(seat)
    assert choose([one, two], session_nodes) == [one]


def test_draws_and_other_costs_see_the_whole_sample() -> None:
    """The estimates are those of the costs of the roles, so nothing else may be decided by them."""
    for cost in (prefill_cost, decode_cost):
        assert make_policy("least_loaded", cost).predicts  # type: ignore[attr-defined]
        drawn = softened(cost, 10.0, Random(1))
        assert not make_policy("least_loaded", drawn).predicts  # type: ignore[attr-defined]
