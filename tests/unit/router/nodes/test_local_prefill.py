"""Which prompts a movable decode node computes itself: short ones, where that is predicted to be faster."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from common.messages.generation import ImageSpan
from common.messages.identity import NodeLoad, Role
from common.observability.logs import Log
from router.nodes.health import NodeHealth
from router.nodes.placement import CacheAware, decode_cost, prefill_cost
from router.nodes.placer import Placer
from router.nodes.registry import Node, NodeRegistry
from tests.fakes.clock import Clock
from tests.fakes.placement_rules import DEFAULT_RULES
from tests.unit.router.nodes.test_registry import beat, register

TIMES = ((1, 10.0), (1000, 110.0))  # tokens, milliseconds


class Rig:
    """A prefill node, and a movable node that decodes."""

    def __init__(self, local_tokens: int = 128) -> None:
        clock = Clock()
        self.registry = NodeRegistry(
            "f" * 64, 3.0, 5.0, clock, Log("router"), lambda node, reason: None, lambda: None
        )
        self.health = NodeHealth(0.0, clock)
        policies = {"prefill": CacheAware(prefill_cost), "decode": CacheAware(decode_cost)}
        rules = replace(DEFAULT_RULES, local_tokens=local_tokens)
        self.placer = Placer(self.registry, policies, self.health, Random(0), rules)  # type: ignore[arg-type]
        self.prefill = self.add("prefill", "prefill-0", "p")
        self.half = self.add("prefill", "flex-0", "fp", movable=True)
        self.decode = self.add("decode", "flex-0", "fd", movable=True)
        self.turn("decode")

    def add(self, role: Role, name: str, incarnation: str, movable: bool = False) -> Node:
        message = register(role, name, f"i-{incarnation}", total_pages=100)
        assert self.registry.register(message, None, movable) is None
        node = self.registry.node(f"i-{incarnation}")
        node.load = NodeLoad(prompt_times=TIMES, total_pages=100, free_pages=100)
        return node

    def turn(self, role: Role) -> None:
        """Let the movable node have this role."""
        for node, name in ((self.half, "fp"), (self.decode, "fd")):
            load = node.load
            self.registry.heartbeat(beat(name, "up" if node.role == role else "standby"))
            node.load = load

    def queue(self, tokens: int) -> None:
        """Give the prefill node prompts of another request."""
        self.prefill.rooms.add(1, tokens, self.prefill.prompt_time(tokens))

    def chosen(self, tokens: int, avoid: frozenset[str] = frozenset(), images: bool = False) -> list[str]:
        spans = [ImageSpan(offset=0, length=1, digest=b"0" * 32)] if images else []
        prompt = self.placer.prompt(list(range(tokens)), b"", spans, b"")
        found = self.placer.choose(avoid, prompt=prompt)
        return [found] if isinstance(found, str) else [node.incarnation for node in found]


LOCAL, APART = ["i-fp", "i-fd"], ["i-p", "i-fd"]


def test_an_idle_prefill_node_computes_short_prompts_too() -> None:
    """The prompt would wait for the running step of the decode half, and would hold up the next one."""
    assert Rig().chosen(100) == APART


def test_a_short_prompt_does_not_wait_for_a_long_one() -> None:
    rig = Rig()
    rig.queue(1000)
    assert rig.chosen(100) == LOCAL
    assert rig.chosen(128) == LOCAL
    assert rig.chosen(129) == APART, "longer than router.local_prefill"
    assert Rig(local_tokens=0).chosen(100) == APART, "off by default"


def test_cached_tokens_do_not_count() -> None:
    rig = Rig()
    rig.queue(1000)
    prompt = rig.placer.prompt(list(range(640)), b"", [], b"")
    assert rig.chosen(640) == APART
    rig.placer.history.placed(prompt, rig.half, rig.decode)
    assert rig.chosen(640) == LOCAL


def test_a_busy_half_is_no_better() -> None:
    rig = Rig()
    rig.queue(300)
    rig.half.rooms.add(2, 1000, rig.half.prompt_time(1000))
    assert rig.chosen(100) == APART


@pytest.mark.parametrize("avoided", ["i-fp", "i-fd"])
def test_a_half_that_has_failed_is_avoided(avoided: str) -> None:
    rig = Rig()
    rig.queue(1000)
    assert rig.chosen(100, frozenset([avoided])) == APART
    for _ in range(5):
        rig.health.nodes.failed(avoided)
    assert rig.chosen(100) == APART


def test_images_are_encoded_on_prefill_nodes() -> None:
    rig = Rig()
    rig.queue(1000)
    assert rig.chosen(100, images=True) == APART


def test_only_while_the_node_decodes() -> None:
    rig = Rig()
    rig.queue(1000)
    rig.turn("prefill")
    assert rig.chosen(100) == ["decode"], "no node decodes"
    rig.add("decode", "decode-0", "d")
    assert rig.chosen(100) == ["i-fp", "i-d"], "its half for prompts is a prefill node now"
