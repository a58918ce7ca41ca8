"""Decisions of the planner: when, in which direction, how far, and when not."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from common.messages.identity import Role
from deploy.planning.decision import (
    MAX_CAUTION,
    OPPOSITE,
    Limits,
    Move,
    NodeSeen,
    Observation,
    RoleLimits,
    Scale,
    State,
    after_change,
    decide,
    direction_of,
    predicted_gap,
    pressure,
    remember,
)

LIMITS = Limits(
    first_token=0.5,
    gap=0.05,
    pool_share=0.9,
    busy_share=0.8,
    spare=0.8,
    window=3,
    cool_down=60.0,
    roles={"prefill": RoleLimits(1, 3), "decode": RoleLimits(1, 3)},
)


def nodes(prefill: int, decode: int, movable: bool = True, up: bool = True) -> tuple[NodeSeen, ...]:
    counts: dict[Role, int] = {"prefill": prefill, "decode": decode}
    return tuple(
        NodeSeen(f"{role}-{index}", role, up, movable, requests=10 - index)
        for role, count in counts.items()
        for index in range(count)
    )


IDLE = Observation(
    at=1000.0,
    nodes=nodes(2, 2),
    first_token=0.1,
    gap=0.01,
    queued=0.0,
    busy=0.1,
    running=9.5,
    pool_use=0.1,
    waiting_for_room=0,
)
LATE: dict[str, Any] = {"first_token": 1.0, "queued": 0.6, "busy": 1.0}
SLOW: dict[str, Any] = {"gap": 0.08, "pool_use": 0.5}


def window(*changes: dict[str, Any], **common: Any) -> list[Observation]:
    """Return three observations, 5 s apart; `changes`: what differs from an idle cluster, by observation."""
    each = changes or ({},)
    return [
        dataclasses.replace(IDLE, at=IDLE.at + 5 * index, **{**common, **each[min(index, len(each) - 1)]})
        for index in range(3)
    ]


def test_an_idle_cluster_stays_as_it_is() -> None:
    assert decide(window(), State(), LIMITS).change is None


def test_late_first_tokens_move_the_node_with_the_fewest_requests() -> None:
    assert decide(window(**LATE), State(), LIMITS).change == Move("decode-1", "prefill")


@pytest.mark.parametrize("short", [SLOW, {"pool_use": 0.95}, {"waiting_for_room": 3}])
def test_slow_or_full_decode_nodes_get_a_prefill_node(short: dict[str, Any]) -> None:
    assert decide(window(**short), State(), LIMITS).change == Move("prefill-1", "decode")


@pytest.mark.parametrize(
    ("seen", "why"),
    [
        (window({}, LATE, LATE), "no role is short"),
        (window(LATE)[:2], "2 of 3 observations"),
        (window(**LATE, **SLOW), "more nodes are needed"),
        # With one node less the gap would be 0.9 of its target.
        (window(**LATE, gap=0.03), "none to spare"),
        (window(**LATE, pool_use=0.5), "none to spare"),
        (window(**LATE, nodes=nodes(3, 2)), "has 3, the most"),
        (window(**LATE, nodes=nodes(2, 1)), "none to spare"),
        (window(**LATE, nodes=nodes(2, 2, movable=False)), "no decode node is movable"),
        (window(**SLOW, busy=0.5), "none to spare"),
        (window(**SLOW, queued=0.25), "none to spare"),
        (window(**LATE, nodes=(*nodes(2, 2), NodeSeen("decode-2", "decode", False, True, 0))), "decode-2"),
        (window({"nodes": nodes(1, 3), **LATE}, LATE), "number of nodes has changed"),
    ],
)
def test_reasons_to_change_nothing(seen: list[Observation], why: str) -> None:
    decision = decide(seen, State(), LIMITS)
    assert decision.change is None
    assert why in decision.reason


def test_nothing_is_changed_while_the_last_change_takes_effect() -> None:
    seen = window(**LATE)
    assert "cooling down" in decide(seen, State(changed_at=seen[-1].at - 59.0), LIMITS).reason
    # The first of the three observations was made before the change.
    quick = dataclasses.replace(LIMITS, cool_down=1.0)
    assert "2 of 3" in decide(seen, State(changed_at=seen[0].at), quick).reason
    assert decide(seen, State(changed_at=seen[-1].at - 60.0), LIMITS).change is not None


def test_first_tokens_that_are_late_without_a_queue_need_no_prefill_node() -> None:
    """A long prompt takes its time on any number of nodes, and one that waits for pages needs decode nodes."""
    assert pressure(dataclasses.replace(IDLE, first_token=2.0), "prefill", LIMITS) == 1.0
    assert pressure(dataclasses.replace(IDLE, first_token=2.0, queued=0.1), "prefill", LIMITS) == 4.0
    waits = dataclasses.replace(IDLE, first_token=2.0, queued=0.1, waiting_for_room=1)
    assert pressure(waits, "prefill", LIMITS) == pytest.approx(0.2)
    assert pressure(dataclasses.replace(IDLE, first_token=None, queued=0.6), "prefill", LIMITS) > 1.0


def test_pages_that_wait_for_prompts_do_not_keep_decode_nodes() -> None:
    """Otherwise both roles would look short whenever prompts queue, and nothing would be changed."""
    seen = window(**LATE, waiting_for_room=50)
    assert decide(seen, State(), LIMITS).change == Move("decode-1", "prefill")
    assert pressure(seen[0], "decode", LIMITS) < 1.0
    assert pressure(dataclasses.replace(seen[0], queued=0.2), "decode", LIMITS) == math.inf


def test_what_a_node_less_does_to_gaps_is_learned_from_earlier_ones() -> None:
    """Half of a gap is assumed to grow with the requests of a node, until both few and many were seen on one."""
    seen = dataclasses.replace(IDLE, gap=0.03)
    assert predicted_gap(seen, 2.0, State()) == pytest.approx(0.045)
    steep = flat = State()
    for requests in (2, 4, 8):
        steep = remember(steep, dataclasses.replace(IDLE, running=requests, gap=0.003 * requests))
        flat = remember(flat, dataclasses.replace(IDLE, running=requests, gap=0.03 + 0.0001 * requests))
        flat = remember(flat, dataclasses.replace(IDLE, running=requests, gap=None))
    assert predicted_gap(seen, 2.0, steep) == pytest.approx(0.03 + 0.003 * 9.5)
    assert predicted_gap(seen, 2.0, flat) == pytest.approx(0.03 + 0.0001 * 9.5)
    assert decide(window(**LATE, gap=0.032), steep, LIMITS).change is None
    assert decide(window(**LATE, gap=0.032), flat, LIMITS).change == Move("decode-1", "prefill")


def test_a_change_that_was_soon_taken_back_needs_longer_evidence() -> None:
    """A load that turns faster than the planner reacts would otherwise be followed in vain for ever."""
    state = State()
    for at, direction in ((1000.0, "prefill"), (1100.0, "decode"), (1200.0, "prefill"), (1300.0, "decode")):
        state = after_change(state, direction, at, LIMITS)
    assert state.caution == {"prefill": 4, "decode": 2}
    many = [dataclasses.replace(IDLE, at=2000.0 + 5 * at, **LATE) for at in range(12)]
    assert decide(many, State(), LIMITS).change is not None
    assert decide(many, state, LIMITS).change is not None
    waits = decide(many[1:], state, LIMITS)
    assert waits.change is None
    assert "soon taken back: 11 of 12 observations" in waits.reason
    # Changes that last make up for it.
    for at, direction in ((9000.0, "prefill"), (18_000.0, "decode"), (27_000.0, "prefill")):
        state = after_change(state, direction, at, LIMITS)
    assert state.caution == {"prefill": 2, "decode": 1}
    for _ in range(20):
        state = after_change(after_change(state, "prefill", 30_000.0, LIMITS), "decode", 30_001.0, LIMITS)
    assert state.caution == {"prefill": MAX_CAUTION, "decode": MAX_CAUTION}


def test_directions_of_replicas_have_opposites() -> None:
    seen = dataclasses.replace(IDLE, replicas=REPLICAS)
    assert direction_of(Scale("decode", 3), seen) == "decode+"
    assert direction_of(Scale("decode", 1), seen) == OPPOSITE["decode+"] == "decode-"
    assert {OPPOSITE[OPPOSITE[each]] for each in OPPOSITE} == set(OPPOSITE)


REPLICAS: dict[Role, int] = {"prefill": 2, "decode": 2}


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        (LATE, Scale("prefill", 3)),
        (SLOW, Scale("decode", 3)),
        ({**LATE, "gap": 0.2}, Scale("decode", 3)),
        ({**LATE, "waiting_for_room": 1, "queued": 0.4}, Scale("decode", 3)),
        # Requests that wait for prefill nodes hold the pages.
        ({**LATE, "waiting_for_room": 1}, Scale("prefill", 3)),
        ({}, Scale("prefill", 1)),
        ({"busy": 0.5}, Scale("decode", 1)),
        ({"busy": 0.5, "pool_use": 0.5}, None),
        ({**LATE, "nodes": nodes(3, 2), "replicas": {"prefill": 3, "decode": 2}}, None),
        ({"nodes": nodes(1, 1), "replicas": {"prefill": 1, "decode": 1}}, None),
        # A pod that has not registered yet counts: asking again would add one more each time.
        ({**LATE, "replicas": {"prefill": 3, "decode": 2}}, None),
        ({**SLOW, "replicas": {"prefill": 2, "decode": 1}}, None),
    ],
)
def test_replicas_grow_and_shrink_by_one(changed: dict[str, Any], expected: Scale | None) -> None:
    assert decide(window(**{"replicas": REPLICAS, **changed}), State(), LIMITS).change == expected
