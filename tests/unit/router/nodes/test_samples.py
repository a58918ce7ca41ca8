"""Of many nodes a policy sees a sample; over many requests the samples treat all nodes alike."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest

from common.messages.identity import NodeLoad, Role
from common.observability.logs import Log
from router.nodes.health import NodeHealth
from router.nodes.placed_prompt import PlacedPrompt
from router.nodes.placement import LeastLoaded, PlacementPolicy, decode_cost, prefill_cost
from router.nodes.placer import Placer
from router.nodes.registry import Node, NodeRegistry
from tests.fakes.clock import Clock
from tests.fakes.placement_rules import DEFAULT_RULES
from tests.unit.router.nodes.test_registry import register

EACH = 60  # requests for each node, if they are shared equally
SHORT, LONG = 64, 8192
TIMES = ((SHORT, 5.0), (LONG, 200.0))


class Fleet:
    """Prefill nodes that registered in random order and have been up for long, and one decode node."""

    def __init__(self, names: list[str], seed: int) -> None:
        clock = Clock()
        registry = NodeRegistry(
            "f" * 64, 3.0, 5.0, clock, Log("router"), lambda node, why: None, lambda: None
        )
        rng = Random(seed)
        registry.register(register("decode", "d"))
        for name in rng.sample(names, len(names)):
            assert registry.register(register("prefill", name)) is None
            registry.node(f"i-{name}").load = NodeLoad(prompt_times=TIMES)
        clock.now += 1000.0
        policies: dict[Role, PlacementPolicy] = {
            "prefill": LeastLoaded(prefill_cost),
            "decode": LeastLoaded(decode_cost),
        }
        self._placer = Placer(registry, policies, NodeHealth(10.0, clock), rng, DEFAULT_RULES)

    def place(self, tokens: int) -> Node:
        """Return the prefill node for a prompt."""
        found = self._placer.choose(prompt=PlacedPrompt(tokens))
        assert not isinstance(found, str)
        return found[0]


NAMES = {
    "numbered": [f"p{number}" for number in range(32)],
    "uneven": [
        *"abc",
        *(f"host-{number}" for number in range(20)),
        *(f"z{number:03}" for number in range(9)),
    ],
    "one more than a sample": [f"p{number}" for number in range(LeastLoaded.most_candidates + 1)],
}


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("names", NAMES.values(), ids=NAMES)
def test_idle_nodes_get_equal_shares(names: list[str], seed: int) -> None:
    fleet = Fleet(names, seed)
    shares = Counter(fleet.place(SHORT).name for _ in range(EACH * len(names)))
    assert {name for name in names if not EACH / 2 <= shares[name] <= EACH * 2} == set()


@pytest.mark.parametrize("seed", range(2))
def test_long_prompts_that_alternate_with_short_ones_reach_all_nodes(seed: int) -> None:
    """Each prompt is computed before the next arrives."""
    names = NAMES["numbered"]
    fleet = Fleet(names, seed)
    shares: Counter[str] = Counter()
    for number in range(2 * EACH * len(names)):
        tokens = SHORT if number % 2 else LONG
        node = fleet.place(tokens)
        if tokens == LONG:
            shares[node.name] += 1
    assert {name for name in names if not EACH / 2 <= shares[name] <= EACH * 2} == set()


def test_long_prompts_spread_over_busy_nodes() -> None:
    """Every other prompt is long, and the last sixteen are unfinished."""
    names = NAMES["numbered"]
    fleet = Fleet(names, 0)
    shares: Counter[str] = Counter()
    unfinished: list[Node] = []
    for room in range(2 * EACH * len(names)):
        tokens = SHORT if room % 2 else LONG
        node = fleet.place(tokens)
        node.rooms.add(room, tokens, node.prompt_time(tokens))
        unfinished.append(node)
        if tokens == LONG:
            shares[node.name] += 1
        if len(unfinished) > 16:
            unfinished.pop(0).rooms.remove(room - 16)
    assert {name for name in names if not EACH / 2 <= shares[name] <= EACH * 2} == set()
