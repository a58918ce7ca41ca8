"""Placement by what nodes hold of a prompt, by session, and its limits, with a registry and without sockets."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Sequence
from random import Random
from typing import Any

import pytest
from msgspec.structs import replace

from common.errors import Overloaded
from common.messages.identity import NodeLoad, Role
from common.observability.logs import Log
from router.nodes.health import NodeHealth
from router.nodes.history import ExpectedCache
from router.nodes.placed_prompt import PlacedPrompt
from router.nodes.placement import (
    Candidate,
    PlacementPolicy,
    decode_cost,
    make_policy,
    prefill_cost,
    softened,
)
from router.nodes.placer import Placer
from router.nodes.prefix_index import PrefixIndex, PrefixMatches
from router.nodes.registry import Node, NodeRegistry
from tests.fakes.clock import Clock
from tests.fakes.placement_rules import DEFAULT_RULES
from tests.unit.router.nodes.test_placement import candidate
from tests.unit.router.nodes.test_registry import register

TIMES = ((64, 8.0), (8192, 800.0))
PROMPT = list(range(1, 1025))


class Fleet:
    """Nodes that have been up for long, and a placer; `place` does what the dispatcher does."""

    def __init__(self, policy: str = "cache_aware", nodes: int = 4, **rules: Any) -> None:
        self.clock = Clock()
        self.registry = NodeRegistry(
            "f" * 64, 3.0, 5.0, self.clock, Log("router"), lambda node, why: None, lambda: None
        )
        for role in ("prefill", "decode"):
            for number in range(nodes):
                name = f"{role[0]}{number:03}"
                self.registry.register(register(role, name, total_pages=10_000))
                self.node(name).load = NodeLoad(prompt_times=TIMES, free_pages=10_000, total_pages=10_000)
        self.clock.now += 1000.0
        policies: dict[Role, PlacementPolicy] = {
            "prefill": make_policy(policy, prefill_cost),
            "decode": make_policy(policy, decode_cost),
        }
        self.health = NodeHealth(10.0, self.clock)
        self.placer = Placer(
            self.registry, policies, self.health, Random(1), dataclasses.replace(DEFAULT_RULES, **rules)
        )
        self.expected = ExpectedCache(0, 0)
        self.room = 0

    def node(self, name: str) -> Node:
        return self.registry.node(f"i-{name}")

    def prompt(self, tokens: list[int], salt: bytes = b"", session: bytes = b"") -> PlacedPrompt:
        return self.placer.history.prompt(tokens, salt, (), session)

    def place(self, tokens: list[int], salt: bytes = b"", session: bytes = b"") -> tuple[Node, Node]:
        prompt = self.prompt(tokens, salt, session)
        pair = self.placer.choose(prompt=prompt)
        assert not isinstance(pair, str)
        self.expected = self.placer.history.placed(prompt, *pair)
        return pair

    def busy(self, node: Node, tokens: int) -> None:
        self.room += 1
        node.rooms.add(self.room, tokens, node.prompt_time(tokens))


def test_a_prompt_follows_its_prefix() -> None:
    fleet = Fleet()
    first = fleet.place(PROMPT)
    assert fleet.expected == (0, 0)
    for _ in range(20):
        fleet.place([number + 5000 for number in PROMPT[:100]])
    assert fleet.place([*PROMPT, 7, 8])[0] is first[0]
    assert fleet.expected.prefill == 1024
    assert fleet.place(PROMPT)[0] is first[0]
    assert fleet.expected.prefill == 1023, "the last token is always computed"


def test_without_the_policy_prompts_take_turns_and_no_hash_is_computed() -> None:
    fleet = Fleet("least_loaded")
    assert len({fleet.place(PROMPT)[0].name for _ in range(4)}) == 4
    assert fleet.prompt(PROMPT).blocks.hashes == ()
    assert fleet.expected == (0, 0)


def test_tenants_do_not_share_what_is_known() -> None:
    fleet = Fleet()
    fleet.place(PROMPT, b"a")
    fleet.place(PROMPT, b"b")
    assert fleet.expected == (0, 0)
    fleet.place(PROMPT, b"a")
    assert fleet.expected.prefill == 1023


@pytest.mark.parametrize("nodes", [2, 4])
def test_a_short_queue_is_better_than_a_short_prefix(nodes: int) -> None:
    """A queue of 800 ms is not worth the 100 ms that the cached tokens take, whether all nodes are compared or few."""
    fleet = Fleet(nodes=nodes)
    first, _ = fleet.place(PROMPT)
    fleet.busy(first, 8192)
    assert fleet.place(PROMPT)[0] is not first


@pytest.mark.parametrize("nodes", [2, 4])
def test_a_long_queue_makes_a_prefix_worthless(nodes: int) -> None:
    long = list(range(100_000))
    for most, found in ((5000.0, True), (500.0, False)):
        fleet = Fleet(nodes=nodes, max_imbalance_ms=most)
        fleet.placer.history.placed(fleet.prompt(long), fleet.node("p001"), fleet.node("d001"))
        fleet.busy(fleet.node("p001"), 8192)
        assert (fleet.place(long)[0].name == "p001") is found


def test_the_holder_of_a_prefix_is_found_among_hundreds() -> None:
    fleet = Fleet(nodes=200)
    first = fleet.place(PROMPT)
    assert {fleet.place(PROMPT)[0].name for _ in range(20)} == {first[0].name}
    fleet.registry.unreachable(first[0])
    assert fleet.place(PROMPT)[0] is not first[0]


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize(("host", "found"), [(0, 256), (4096, 1024)])
def test_host_memory_counts_like_a_larger_pool(role: Role, host: int, found: int) -> None:
    """A pool for 1,280 tokens keeps the second prompt and the beginning of the first one, host memory both."""
    fleet = Fleet(nodes=1)
    node = fleet.node(f"{role[0]}000")
    node.register = replace(node.register, total_pages=1280 // node.register.page_size)
    node.load = replace(node.load, host_total_tokens=host)
    history = fleet.placer.history
    for start in (0, 10_000):
        tokens = [number + start for number in PROMPT]
        history.placed(fleet.prompt(tokens), fleet.node("p000"), fleet.node("d000"))
    prompt = fleet.prompt([*PROMPT, 1])
    assert history.cached_tokens(history.matches(role, prompt), node, prompt) == found


def test_a_lost_node_and_a_flush_are_forgotten() -> None:
    fleet = Fleet()
    first, _ = fleet.place(PROMPT)
    fleet.placer.history.lost(first)
    fleet.place(PROMPT)
    assert fleet.expected.prefill == 0
    fleet.placer.history.flushed()
    fleet.place(PROMPT)
    assert fleet.expected == (0, 0)


@pytest.mark.parametrize("said_by", ["config", "node"])
def test_nodes_without_a_prefix_cache_hold_nothing(said_by: str) -> None:
    fleet = Fleet(uncached=frozenset(["prefill", "decode"] if said_by == "config" else []))
    if said_by == "node":
        for node in fleet.registry:
            node.register = replace(node.register, effective_config={"prefix_cache": "off: it keeps a state"})
    assert len({fleet.place(PROMPT)[0].name for _ in range(4)}) == 4
    assert fleet.expected == (0, 0)
    fleet.placer.history.answered(fleet.prompt(PROMPT), PROMPT, fleet.node("d000"))
    assert fleet.placer.history.blocks == 0


def test_a_decode_node_that_holds_the_conversation_saves_its_transfer() -> None:
    fleet = Fleet()
    history = fleet.placer.history
    prompt = fleet.prompt(PROMPT)
    history.answered(prompt, [*PROMPT, *range(64)], fleet.node("d002"))
    assert fleet.place([*PROMPT, *range(64), 5])[1] is not fleet.node("d002"), "no transfer was measured yet"
    history.transfers.measured("i-p000", "i-d000", 0.1, 1000)
    history.flushed()
    history.answered(prompt, [*PROMPT, *range(64)], fleet.node("d002"))
    assert fleet.place([*PROMPT, *range(64), 5])[1] is fleet.node("d002")
    assert fleet.expected.decode == 1088


def test_a_slow_link_is_avoided() -> None:
    fleet = Fleet("least_loaded", nodes=2)
    for number in range(2):
        fleet.placer.history.transfers.measured("i-p000", f"i-d00{number}", 0.5 * number, 1000)
        fleet.placer.history.transfers.measured("i-p001", f"i-d00{number}", 0.5 - 0.5 * number, 1000)
    pairs = {(p.name, d.name) for p, d in (fleet.place(PROMPT) for _ in range(20))}
    assert pairs == {("p000", "d000"), ("p001", "d001")}
    fleet.health.node_failed(fleet.node("p001"))  # the candidates of all nodes are compared from now on
    pairs = {(p.name, d.name) for p, d in (fleet.place(PROMPT) for _ in range(20))}
    assert pairs == {("p000", "d000"), ("p001", "d001")}


@pytest.mark.parametrize("policy", ["least_loaded", "power_of_two", "cache_aware"])
def test_a_session_stays_on_its_nodes(policy: str) -> None:
    fleet = Fleet(policy, nodes=40, block_tokens=64)
    first = fleet.place(PROMPT[:60], session=b"s")
    for number in range(10):
        assert fleet.place([number], session=b"s") == first
    for _ in range(3):
        fleet.busy(first[0], 8192)
    assert fleet.place([1], session=b"s")[0] is not first[0], "its queue is too long"
    fleet.clock.now += 301
    assert fleet.placer.history.sessions.nodes(b"s") == ()


def test_two_drawn_nodes_are_compared() -> None:
    fleet = Fleet("power_of_two", nodes=100)
    fleet.busy(fleet.node("p007"), 8192)
    chosen = Counter(fleet.place(PROMPT)[0].name for _ in range(1000))
    assert "p007" not in chosen
    assert len(chosen) == 99
    assert max(chosen.values()) < 30


def test_the_temperature_is_a_softmax() -> None:
    policy = make_policy("least_loaded", softened(prefill_cost, 100.0, Random(1)))
    nodes = [candidate("a", ready_ms=100), candidate("b", ready_ms=200), candidate("c", ready_ms=5000)]
    chosen = Counter(policy.choose(nodes).name for _ in range(4000))
    assert chosen["a"] / chosen["b"] == pytest.approx(math.e, rel=0.15)
    assert chosen["c"] == 0
    assert softened(prefill_cost, 0.0, Random(1)) is prefill_cost


def test_drafts_pages_and_the_wait_for_them_are_part_of_the_cost() -> None:
    def cost(**values: Any) -> float:
        load = NodeLoad(running=8, total_pages=100, free_pages=values.pop("free", 90))
        return decode_cost(Candidate("d", "i", load, 8, 0.0, **values))

    assert cost(accept=2.0) == pytest.approx(cost() / 2)
    assert cost(free=10) > cost(free=15) > cost()
    assert cost(free=30, moved=640) > cost(free=30)
    assert cost(transfer_ms=7.0) == cost() + 7.0
    assert cost(session_ms=50.0) == cost() - 50.0


def test_busy_nodes_take_nothing_new() -> None:
    fleet = Fleet("least_loaded", nodes=2, busy_first_token_ms=1000.0, busy_pool_share=0.9)
    prompt = fleet.prompt(PROMPT)
    busy, idle = fleet.node("p000"), fleet.node("p001")
    full, empty = fleet.node("d000"), fleet.node("d001")
    for _ in range(2):
        fleet.busy(busy, 8192)
    full.load = NodeLoad(total_pages=100, free_pages=5)
    assert fleet.placer.spared((busy, full), (), prompt) == (idle, empty)
    assert fleet.placer.spared((idle, empty), (), prompt) == (idle, empty)
    fleet.placer.check_busy(prompt)
    for _ in range(3):
        fleet.busy(idle, 8192)
    with pytest.raises(Overloaded, match="all prefill nodes are busy") as refused:
        fleet.placer.check_busy(prompt)
    assert refused.value.retry_after == 1.0
    for _ in range(40):
        fleet.busy(busy, 8192)
        fleet.busy(idle, 8192)
    with pytest.raises(Overloaded) as refused:
        fleet.placer.check_busy(prompt)
    assert 10 < refused.value.retry_after < 40


def test_an_idle_node_is_not_busy_however_long_the_prompt() -> None:
    fleet = Fleet("least_loaded", nodes=2, busy_first_token_ms=1.0)
    pair, prompt = (fleet.node("p000"), fleet.node("d000")), fleet.prompt(list(range(50_000)))
    assert fleet.placer.spared(pair, (), prompt) == pair
    fleet.placer.check_busy(prompt)


def test_a_prompt_is_looked_up_once_however_many_nodes_may_be_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = Fleet("cache_aware", nodes=8, busy_first_token_ms=1.0)
    for number in range(8):
        fleet.busy(fleet.node(f"p{number:03}"), 8192)
    lookups, match = [0], PrefixIndex.match

    def counted(index: PrefixIndex, blocks: Sequence[int]) -> PrefixMatches:
        lookups[0] += 1
        return match(index, blocks)

    monkeypatch.setattr(PrefixIndex, "match", counted)
    with pytest.raises(Overloaded):
        fleet.placer.check_busy(fleet.prompt(PROMPT))
    assert lookups == [1]
