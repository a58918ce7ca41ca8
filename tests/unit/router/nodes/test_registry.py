"""Membership of the cluster, tested with messages and a clock only."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import msgspec
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from common.messages.identity import NodeCounters, NodeLoad, NodeRef, NodeState, Role
from common.messages.router_inbox import Heartbeat, Register
from common.observability.logs import Log
from router.nodes.registration import Pattern
from router.nodes.registry import MAX_CONTENDERS, SIGN_OF_LIFE, Node, NodeRegistry
from router.nodes.return_watch import MAX_AWAY, ReturnWatch
from tests.fakes.clock import Clock


@dataclass
class Rig:
    clock: Clock = field(default_factory=Clock)
    lost: list[tuple[str, str]] = field(default_factory=list)
    changes: int = 0
    configured: dict[Role, list[str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.on_lost = self.note_loss
        self.registry = NodeRegistry(
            "f" * 64,
            3.0,
            5.0,
            self.clock,
            Log("router"),
            lambda node, reason: self.on_lost(node, reason),
            self._changed,
            ReturnWatch(self.configured, 60.0, self.clock),
        )

    def note_loss(self, node: Node, reason: str) -> None:
        self.lost.append((node.name, reason))

    def _changed(self) -> None:
        self.changes += 1


def register(role: Role, name: str, incarnation: str = "", **options: Any) -> Register:
    values = {
        "host": "h",
        "pid": 1,
        "model_fingerprint": "f" * 64,
        "max_model_len": 100,
        "page_size": 16,
        "total_pages": 10,
        "effective_config": {},
        **options,
    }
    return Register(node=NodeRef(name=name, role=role, incarnation=incarnation or f"i-{name}"), **values)


def beat(name: str, state: NodeState = "up", age: int = 0, announced: int = 0) -> Heartbeat:
    return Heartbeat(
        as_of=7.0,
        incarnation=f"i-{name}",
        sequence=1,
        state=state,
        loop_age_ms=age,
        announced_ms=announced,
        load=NodeLoad(),
        counters=NodeCounters(),
    )


def test_states() -> None:
    rig = Rig()
    registry = rig.registry
    assert registry.register(register("decode", "d")) is None
    assert (registry.count("decode"), registry.count("prefill"), rig.changes) == (1, 0, 1)
    assert registry.heartbeat(beat("d", "draining"))
    assert [node.as_of for node in registry] == [7.0]
    assert (registry.count("decode"), rig.changes) == (0, 2)
    assert registry.eligible() == []
    assert registry.heartbeat(beat("d", "draining"))
    assert rig.changes == 2, "a repeated report is no change"
    registry.leave("i-d")
    assert not list(registry)
    assert rig.lost == [("d", "it said goodbye")]
    registry.leave("i-d")
    assert len(rig.lost) == 1
    assert not registry.heartbeat(beat("d"))


def test_a_main_loop_is_hung_only_past_the_work_that_it_announced() -> None:
    rig = Rig()
    rig.registry.register(register("prefill", "a"))
    for age in (4_000, 24_900):
        rig.registry.heartbeat(beat("a", age=age, announced=20_000))
        rig.registry.sweep()
        assert not rig.lost
    rig.registry.heartbeat(beat("a", age=25_100, announced=20_000))
    rig.registry.sweep()
    assert rig.lost == [("a", "its main loop has not turned for 25.1 s, 20.0 s of work announced")]


def test_silence_and_hangs_lose_a_node() -> None:
    rig = Rig()
    for name in ("a", "b", "c"):
        rig.registry.register(register("prefill", name))
    rig.clock.now += 2.0
    rig.registry.heartbeat(beat("b"))
    rig.registry.heartbeat(beat("c", age=5001))
    rig.clock.now += 1.5
    rig.registry.sweep()
    assert rig.lost == [
        ("a", "no heartbeat for 3.5 s"),
        ("c", "its main loop has not turned for 5.0 s, 0.0 s of work announced"),
    ]
    assert [node.name for node in rig.registry] == ["b"]


def test_a_stall_of_the_router_is_no_silence_of_a_node() -> None:
    rig = Rig()
    rig.registry.register(register("prefill", "a"))
    rig.clock.now += 10
    rig.registry.sweep(9.0)
    assert not rig.lost
    assert [node.seen for node in rig.registry] == [rig.clock.now - 1.0]
    rig.registry.sweep(9.0)
    assert [node.seen for node in rig.registry] == [rig.clock.now], "none is seen in the future"
    rig.clock.now += 3.5
    rig.registry.sweep(0.1)
    assert rig.lost == [("a", "no heartbeat for 3.4 s")]


def test_refusals() -> None:
    rig = Rig()
    rig.registry.register(register("decode", "d"))
    for options, part in (
        ({"model_fingerprint": "0" * 64}, "start both from the same model directory"),
        ({"page_size": 1}, "p has pages of 1 tokens, d of 16: set kv.page_size alike"),
    ):
        sentence = rig.registry.register(register("prefill", "p", **options))
        assert sentence is not None
        assert part in sentence
    assert [node.name for node in rig.registry] == ["d"]
    # A refused process must not replace the one that serves under its name.
    assert rig.registry.register(register("decode", "d", "other", model_fingerprint="0" * 64)) is not None
    assert not rig.lost


def test_a_living_process_keeps_its_name() -> None:
    """A second process is refused as soon as the first has been heard from again."""
    rig = Rig()
    registry, newer = rig.registry, register("decode", "d", "newer", pid=7)
    registry.register(register("decode", "d", host="near", pid=5))
    rig.clock.now += 1.0
    assert registry.undecided(newer)
    rig.clock.now += SIGN_OF_LIFE
    registry.heartbeat(beat("d"))
    assert not registry.undecided(newer)
    assert registry.register(newer) == (
        "d is already running as process 5 on near: stop that one first, or start this one under another name of "
        "the cluster file"
    )
    assert not rig.lost
    assert [node.incarnation for node in registry] == ["i-d"]


def test_old_messages_of_a_dead_process_are_no_sign_of_life() -> None:
    """Its last heartbeat may be read after its successor's first registration."""
    rig = Rig()
    newer = register("decode", "d", "newer")
    rig.registry.register(register("decode", "d"))
    rig.clock.now += 1.0
    assert rig.registry.undecided(newer)
    rig.clock.now += 0.1
    rig.registry.heartbeat(beat("d"))
    assert rig.registry.undecided(newer)


def test_the_name_of_a_dead_process_passes_on() -> None:
    rig = Rig()
    newer = register("decode", "d", "newer")
    rig.registry.register(register("decode", "d"))
    for _ in range(4):
        rig.clock.now += 1.0
        assert rig.registry.undecided(newer)
    rig.registry.sweep()
    assert rig.lost == [("d", "no heartbeat for 4.0 s")]
    assert not rig.registry.undecided(newer)
    assert rig.registry.register(newer) is None
    assert [node.incarnation for node in rig.registry] == ["newer"]


def test_a_process_that_drains_gives_its_name_away_when_it_ends() -> None:
    rig = Rig()
    newer = register("decode", "d", "newer")
    rig.registry.register(register("decode", "d"))
    rig.registry.heartbeat(beat("d", "draining"))
    for _ in range(3):
        assert rig.registry.undecided(newer)
        rig.clock.now += 1.0
        rig.registry.heartbeat(beat("d", "draining"))
    rig.registry.leave("i-d")
    assert not rig.registry.undecided(newer)
    assert rig.registry.register(newer) is None


def test_processes_that_ask_for_a_name_are_bounded() -> None:
    rig = Rig()
    rig.registry.register(register("decode", "d"))
    for number in range(100):
        assert rig.registry.undecided(register("decode", "d", f"other-{number}"))
    [node] = rig.registry
    assert len(node.contenders) == MAX_CONTENDERS


def test_a_node_out_of_reach_is_not_eligible_until_it_speaks() -> None:
    rig = Rig()
    rig.registry.register(register("decode", "a"))
    for speak in (
        lambda: rig.registry.heartbeat(beat("a")),
        lambda: rig.registry.register(register("decode", "a")),
    ):
        [node] = rig.registry.eligible_by_role().of["decode"]
        version = rig.registry.version
        rig.registry.unreachable(node)
        assert rig.registry.version != version
        assert rig.registry.eligible_by_role().of["decode"] == []
        assert rig.registry.expected_within("decode") == math.inf, "it comes back or is lost"
        before = rig.changes
        speak()
        assert rig.registry.eligible_by_role().of["decode"] == [node]
        assert rig.changes == before + 1


def test_eligible_nodes_are_collected_again_after_each_change() -> None:
    rig = Rig()
    registry = rig.registry
    registry.register(register("decode", "a"))
    first = registry.eligible_by_role()
    assert registry.heartbeat(beat("a"))
    assert registry.eligible_by_role() is first, "a heartbeat without a change"
    rig.clock.now += 3
    registry.register(register("decode", "b"))
    both = registry.eligible_by_role()
    assert [node.name for node in both.of["decode"]] == ["a", "b"]
    assert both.newest["decode"] == first.newest["decode"] + 3
    assert both.oldest["decode"] == first.oldest["decode"]
    registry.heartbeat(beat("b", "draining"))
    assert [node.name for node in registry.eligible_by_role().of["decode"]] == ["a"]
    registry.leave("i-a")
    assert registry.eligible_by_role().of == {"prefill": [], "decode": []}


def test_heartbeats_are_noted_until_the_set_is_cleared() -> None:
    rig = Rig()
    for name in "ab":
        rig.registry.register(register("decode", name))
    version = rig.registry.version
    rig.registry.heartbeat(beat("a"))
    rig.registry.heartbeat(beat("b"))
    assert rig.registry.heard == {"i-a", "i-b"}
    assert rig.registry.version == version
    rig.registry.leave("i-a")
    assert rig.registry.heard == {"i-b"}, "lost nodes are not collected"
    assert rig.registry.version != version


def test_nodes_of_the_file_are_expected_for_a_while() -> None:
    rig = Rig(configured={"decode": ["d"]})
    assert rig.registry.expected_within("prefill") == 0
    assert rig.registry.expected_within("decode") == 60, "the router has just started"
    rig.registry.register(register("decode", "d"))
    assert rig.registry.expected_within("decode") == 0
    rig.registry.heartbeat(beat("d", "draining"))
    assert rig.registry.expected_within("decode") == math.inf, "its successor is expected"
    rig.registry.leave("i-d")
    rig.clock.now += 20
    assert (rig.registry.expected_within("decode"), rig.registry.expected("decode")) == (40, ["d"])
    assert rig.registry.missing_for("decode") == 20
    rig.clock.now += 40
    assert (rig.registry.expected_within("decode"), rig.registry.expected("decode")) == (0, [])
    rig.registry.register(register("decode", "stranger"))
    rig.registry.leave("i-stranger")
    assert rig.registry.expected_within("decode") == 0, "it is not in the file"


def test_the_least_length_of_all_counts() -> None:
    rig = Rig()
    assert rig.registry.max_model_len is None
    rig.registry.register(register("prefill", "p", max_model_len=90))
    rig.registry.register(register("decode", "d", max_model_len=70))
    assert rig.registry.max_model_len == 70


def test_a_callback_may_change_the_registry() -> None:
    """Losing one node may reveal that others are lost while the sweep is in progress."""
    rig = Rig()
    for name in ("a", "b", "c"):
        rig.registry.register(register("prefill", name))

    def lose_the_next(node: Node, reason: str) -> None:
        rig.note_loss(node, reason)
        for other in rig.registry:
            rig.registry.lose(other, "with it", "hung")

    rig.on_lost = lose_the_next
    rig.clock.now += 4
    rig.registry.sweep()
    assert sorted(name for name, _ in rig.lost) == ["a", "b", "c"]


# -- nodes that join by a pattern --------------------------------------------------------------------------------

TWO = Pattern("decode-*", 2)


def test_a_pattern_has_as_many_nodes_as_its_count() -> None:
    rig = Rig()
    registry = rig.registry
    for name in ("decode-a", "decode-b"):
        assert registry.register(register("decode", name), TWO) is None
    registry.register(register("decode", "decode-0"))  # a listed node takes no place of the pattern
    third = register("decode", "decode-c", "third")
    assert registry.undecided(third, TWO)
    rig.clock.now += SIGN_OF_LIFE
    for name in ("decode-a", "decode-b", "decode-0"):
        registry.heartbeat(beat(name))
    assert not registry.undecided(third, TWO)
    refusal = registry.register(third, TWO)
    assert refusal is not None
    assert refusal.startswith(
        "2 nodes have joined as decode-*, which is all that its count allows: raise count"
    )
    registry.leave("i-decode-a")
    assert not registry.undecided(third, TWO)
    assert registry.register(third, TWO) is None


def test_the_successor_of_a_joined_node_waits_until_its_end_is_known() -> None:
    """A rolling update kills a pod and starts one under another name before the router has noticed."""
    rig = Rig()
    one = Pattern("decode-*", 1)
    rig.registry.register(register("decode", "decode-a"), one)
    newer = register("decode", "decode-b")
    for _ in range(4):
        rig.clock.now += 1.0
        assert rig.registry.undecided(newer, one)
    rig.registry.sweep()
    assert not rig.registry.undecided(newer, one)
    assert rig.registry.register(newer, one) is None


def test_a_joined_node_is_expected_back_for_a_while() -> None:
    rig = Rig(configured={"decode": ["decode-*"]})
    assert rig.registry.expected("decode") == ["decode-*"]
    rig.registry.register(register("decode", "decode-1"), TWO)
    assert rig.registry.expected("decode") == []
    rig.registry.leave("i-decode-1")
    assert rig.registry.expected("decode") == ["decode-1"]
    assert rig.registry.expected_within("decode") == 60.0
    rig.clock.now += 61.0
    assert rig.registry.expected("decode") == []


def test_names_that_never_come_back_are_forgotten() -> None:
    clock = Clock()
    watch = ReturnWatch({"decode": ["decode-0", "decode-*"]}, 60.0, clock)
    for number in range(100):
        clock.now += 15.0
        watch.left("decode", f"decode-{number}")
    assert watch.expected("decode") == [f"decode-{number}" for number in (96, 97, 98, 99)]


def test_names_that_come_and_go_in_a_moment_are_bounded() -> None:
    """One node with the key of a pattern could otherwise fill the memory, and each further name would cost more."""
    watch = ReturnWatch({"decode": ["decode-0", "decode-*"]}, 60.0, Clock())
    for number in range(2 * MAX_AWAY):
        watch.left("decode", f"decode-{number}")
    expected = watch.expected("decode")
    assert len(expected) <= MAX_AWAY + 2
    assert {"decode-0", f"decode-{2 * MAX_AWAY - 1}"} <= {*expected}


class Claims(RuleBasedStateMachine):
    """Nodes of one pattern come, live, drain and die in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.rig = Rig()
        self.alive: dict[str, str] = {}  # incarnation of a registered process -> its name
        self.started = 0

    @rule(name=st.sampled_from(["decode-0", "decode-1", "decode-2", "decode-3"]))
    def start(self, name: str) -> None:
        """A process asks until it is registered or refused, as the control plane does."""
        self.started += 1
        message = register("decode", name, f"i-{self.started}")
        pattern = None if name == "decode-0" else TWO
        if self.rig.registry.undecided(message, pattern):
            return
        if self.rig.registry.register(message, pattern) is None:
            self.alive[message.node.incarnation] = name

    @rule(seconds=st.sampled_from([0.1, 0.6, 2.0]))
    def beat(self, seconds: float) -> None:
        self.rig.clock.now += seconds
        for incarnation in self.alive:
            assert self.rig.registry.heartbeat(msgspec.structs.replace(beat("x"), incarnation=incarnation))

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def die(self, data: st.DataObject) -> None:
        gone = data.draw(st.sampled_from(sorted(self.alive)))
        del self.alive[gone]
        self.rig.registry.leave(gone)

    @invariant()
    def names_are_unique_and_the_pattern_is_bounded(self) -> None:
        nodes = list(self.rig.registry)
        assert {node.incarnation: node.name for node in nodes} == self.alive
        assert len({node.name for node in nodes}) == len(nodes)
        assert sum(node.pattern == "decode-*" for node in nodes) <= TWO.count
        assert all(node.name != "decode-0" for node in nodes if node.pattern)


Claims.TestCase.settings = settings(max_examples=30, stateful_step_count=25, deadline=None)
test_claims = Claims.TestCase
