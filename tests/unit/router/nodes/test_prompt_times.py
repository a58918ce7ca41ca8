"""Prompts are placed by the predicted time to their first token, which each prefill node's own times say."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.messages.identity import NodeLoad, Role
from common.observability.logs import Log
from prefill_node.cost_curve import CostCurve
from prefill_node.forward_times import ForwardTimes
from prefill_node.packing import Waiting, share
from router.nodes.assigned_rooms import AssignedRooms
from router.nodes.health import NodeHealth
from router.nodes.placed_prompt import PlacedPrompt
from router.nodes.placement import PlacementPolicy, decode_cost, make_policy, prefill_cost
from router.nodes.placer import Placer
from router.nodes.prompt_times import UNKNOWN_MS, prompt_ms, prompt_time
from router.nodes.registry import Node, NodeRegistry
from tests.fakes.clock import Clock
from tests.fakes.placement_rules import DEFAULT_RULES
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
    assert 0.0 <= prompt_time(times, tokens).shared <= prompt_time(times, tokens).alone


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
        self.placer = Placer(registry, policies, NodeHealth(10.0, clock), Random(1), DEFAULT_RULES)

    def place(self, room: int, tokens: int) -> Node:
        """Place a prompt as the dispatcher does."""
        found = self.placer.choose(prompt=PlacedPrompt(tokens))
        assert not isinstance(found, str)
        node = found[0]
        node.rooms.add(room, tokens, node.prompt_time(tokens))
        return node


def test_a_prompt_goes_where_its_first_token_is_predicted_to_come_first() -> None:
    nodes = Nodes()
    placed = [nodes.place(room, 1024).name for room in range(5)]
    assert placed == ["fast", "fast", "fast", "slow", "fast"], "four times as fast"
    assert nodes.slow.rooms.ms == pytest.approx(100.0)
    for room in range(5):
        nodes.fast.rooms.computed(room)
    assert nodes.place(5, 1024) is nodes.fast


def test_many_short_prompts_count_hardly_more_than_a_long_one_of_as_many_tokens() -> None:
    """Sixteen prompts of 64 tokens would take 80 ms one by one. One of 1,024 takes 25."""
    nodes = Nodes()
    nodes.slow.load = nodes.fast.load
    for room in range(16):
        nodes.fast.rooms.add(room, 64, nodes.fast.prompt_time(64))
    nodes.slow.rooms.add(99, 1024, nodes.slow.prompt_time(1024))
    assert nodes.slow.rooms.ms == pytest.approx(25.0)
    assert 25.0 < nodes.fast.rooms.ms < 30.0
    assert nodes.place(100, 512) is nodes.slow


def computed_ms(curve: CostCurve, prompts: Sequence[int]) -> float:
    """Return when a prefill node has computed a queue whose first prompt runs before the others arrive."""
    queue, ms = [Waiting(0, tokens) for tokens in prompts[1:]], curve.prompt_ms(prompts[0])
    while queue:
        found = share(queue, curve)
        chunks, rest = queue[: found.whole], queue[found.whole :]
        if found.part:
            head, *others = rest
            chunks = [*chunks, Waiting(head.start, found.part)]
            rest = [Waiting(head.start + found.part, head.remaining - found.part), *others]
        contexts = sum(each.start * each.remaining for each in chunks)
        ms, queue = ms + curve.ms(sum(each.remaining for each in chunks), contexts), rest
    return ms


@pytest.mark.parametrize(
    "prompts",
    [
        [16] * 2,
        [16] * 16,
        [16] * 256,
        [100] * 40,
        [2000] * 8,
        [30_000] * 3,
        [16, 2000] * 8,
        [9000, *[64] * 50],
    ],
    ids=lambda prompts: f"{len(prompts)} of {prompts[0]} and {prompts[-1]}",
)
def test_a_queue_is_predicted_as_its_node_packs_it(prompts: list[int]) -> None:
    """The times of an H200 with a model of 8B parameters, roughly."""
    measured = {16: 4.0, 128: 5.0, 256: 6.5, 512: 10.0, 1024: 18.0, 2048: 34.0, 4096: 68.0, 8192: 140.0}
    curve = CostCurve([16 * 2**n for n in range(10)], measured, context_ms=5e-7)
    times = ForwardTimes(curve).prompt_times()
    rooms = AssignedRooms()
    *before, last = prompts
    for room, tokens in enumerate(before):
        rooms.add(room, tokens, prompt_time(times, tokens))
    assert rooms.ms + prompt_ms(times, last) == pytest.approx(computed_ms(curve, prompts), rel=0.2)
