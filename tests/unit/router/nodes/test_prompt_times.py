"""Prompts are placed by the predicted time to their first token, which each prefill node's own times say."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.messages.identity import NodeLoad, Role
from common.observability.logs import Log
from router.nodes.health import NodeHealth
from router.nodes.placement import PlacementPolicy, decode_cost, make_policy, prefill_cost
from router.nodes.placer import Placer
from router.nodes.prompt_times import UNKNOWN_MS, prompt_ms
from router.nodes.registry import Node, NodeRegistry
from tests.fakes.clock import Clock
from tests.unit.router.nodes.test_registry import register

FAST = ((64, 5.0), (1024, 25.0), (8192, 200.0))
SLOW = ((64, 20.0), (1024, 100.0), (8192, 800.0))


def test_times_are_interpolated() -> None:
    assert prompt_ms(FAST, 1) == prompt_ms(FAST, 64) == 5.0
    assert prompt_ms(FAST, 544) == 15.0
    assert prompt_ms(FAST, 16_384) == 400.0
    assert prompt_ms((), 100) == 100 * UNKNOWN_MS


@given(st.lists(st.tuples(st.integers(0, 9), st.floats(-1e15, 1e15)), max_size=6), st.integers(0, 100_000))
def test_any_report_of_a_node_gives_a_time(times: list[tuple[int, float]], tokens: int) -> None:
    assert prompt_ms(times, tokens) >= 0.0


class Nodes:
    """A fast and a slow prefill node, and a decode node."""

    def __init__(self) -> None:
        clock = Clock()
        registry = NodeRegistry(
            "f" * 64, 3.0, 5.0, clock, Log("router"), lambda node, why: None, lambda: None
        )
        registry.register(register("decode", "d"))
        for name in ("fast", "slow"):
            assert registry.register(register("prefill", name)) is None
        self.fast, self.slow = (registry.node(f"i-{name}") for name in ("fast", "slow"))
        self.fast.load, self.slow.load = NodeLoad(prompt_times=FAST), NodeLoad(prompt_times=SLOW)
        clock.now += 1000.0
        policies: dict[Role, PlacementPolicy] = {
            "prefill": make_policy("least_loaded", prefill_cost),
            "decode": make_policy("least_loaded", decode_cost),
        }
        self.placer = Placer(registry, policies, NodeHealth(10.0, clock), Random(1))

    def place(self, room: int, tokens: int) -> Node:
        """Place a prompt as the dispatcher does."""
        found = self.placer.choose(tokens=tokens)
        assert not isinstance(found, str)
        node = found[0]
        node.rooms.add(room, tokens, node.prompt_ms(tokens))
        return node


def test_a_prompt_goes_where_its_first_token_is_predicted_to_come_first() -> None:
    nodes = Nodes()
    placed = [nodes.place(room, 1024).name for room in range(5)]
    assert placed == ["fast", "fast", "fast", "slow", "fast"], "four times as fast"
    assert nodes.slow.rooms.ms == pytest.approx(100.0)
    for room in range(5):
        nodes.fast.rooms.computed(room)
    assert nodes.place(5, 1024) is nodes.fast


def test_many_short_prompts_count_more_than_a_long_one_of_as_many_tokens() -> None:
    """Sixteen prompts of 64 tokens take 80 ms, one of 1,024 takes 25."""
    nodes = Nodes()
    nodes.slow.load = nodes.fast.load
    for room in range(16):
        nodes.fast.rooms.add(room, 64, nodes.fast.prompt_ms(64))
    nodes.slow.rooms.add(99, 1024, nodes.slow.prompt_ms(1024))
    assert nodes.place(100, 512) is nodes.slow
