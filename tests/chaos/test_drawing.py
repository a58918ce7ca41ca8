"""Drawn faults: the same for one seed, enough of every kind, and always with a healthy pair left."""

from __future__ import annotations

import random
from collections import Counter
from types import SimpleNamespace
from typing import Any, cast

from tests.chaos.cluster import ChaosCluster
from tests.chaos.drawing import Drawer
from tests.chaos.faults import KINDS, LINKS, Fault, Kind, group, minimums
from tests.chaos.timeline import Timeline

PAIRS = [(f"prefill-{p}", f"decode-{d}") for p in range(2) for d in range(2)]


def parts_of_pair(prefill: str, decode: str) -> list[str]:
    ends = f"{prefill}-{decode}"
    return [
        "router",
        prefill,
        decode,
        f"router-{prefill}",
        f"router-{decode}",
        f"{ends}-peer",
        f"{ends}-bulk",
    ]


def cluster(disk: bool = True) -> ChaosCluster:
    """Names and a timeline; nothing runs."""
    links = {part: None for pair in PAIRS for part in parts_of_pair(*pair) if part.count("-") > 1}
    made = SimpleNamespace(
        names=["router", "prefill-0", "prefill-1", "decode-0", "decode-1"],
        links=links,
        pairs=PAIRS,
        parts_of_pair=parts_of_pair,
        timeline=Timeline(),
        disk=SimpleNamespace(can_be_filled=disk),
    )
    return cast(ChaosCluster, made)


def drawn(faults: int, seed: int = 1, made: ChaosCluster | None = None, **fields: Any) -> list[Fault]:
    """All faults of a run in which each one ends before the next."""
    drawer = Drawer(made or cluster(), random.Random(seed), faults, **fields)
    found = [drawer.draw(set()) for _ in range(faults)]
    assert None not in found
    return cast(list[Fault], found)


def test_one_seed_draws_the_same() -> None:
    assert drawn(200) == drawn(200)
    assert drawn(200) != drawn(200, seed=2)


def test_every_kind_is_drawn_and_none_too_rarely() -> None:
    made = drawn(300)
    assert {fault.kind for fault in made} == set(KINDS)
    counts = Counter(group(fault.kind) for fault in made)
    for name, least in minimums(300).items():
        assert counts[name] >= least, name


def test_kills_that_were_not_possible_are_made_up_for() -> None:
    """While both prefill nodes are away nothing may be killed; the last faults are reserved for that."""
    made = cluster()
    drawer = Drawer(made, random.Random(1), 100, kinds=("kill", "stop", "disk-full"))
    made.timeline.begin("0", ["prefill-0", "prefill-1"], kind="kill", target="prefill-0")
    found = sum(drawer.draw(set()) is not None for _ in range(200))
    assert drawer.drawn["kill"] == drawer.drawn["stop"] == 0
    assert found == 100 - minimums(100)["kill"] - minimums(100)["stop"]
    made.timeline.end("0")
    kinds = [fault.kind for fault in (drawer.draw(set()) for _ in range(100 - found)) if fault is not None]
    assert sorted(kinds) == ["kill"] * 6 + ["stop"] * 6


def test_only_requested_kinds_are_drawn() -> None:
    made = drawn(50, kinds=("reset", "cut"), links="peer")
    assert {fault.kind for fault in made} == {"reset", "cut"}
    assert all(fault.target.endswith("peer") for fault in made)


def test_a_disk_that_cannot_be_filled_gets_no_faults() -> None:
    assert "disk-full" not in {fault.kind for fault in drawn(300, made=cluster(disk=False))}


def test_a_healthy_pair_is_left() -> None:
    made = cluster()
    made.timeline.begin("0", ["prefill-0"], kind="kill", target="prefill-0")
    held = {"kill", "stop", "drain", "withhold", "swallow", "half-open", "refuse", "rate", "delay"}
    # The other prefill node's restart would leave no pair.
    kinds = [kind for kind in KINDS if kind != "restart"]
    for fault in drawn(300, made=made, kinds=kinds):
        impaired = {"prefill-0", fault.target}
        assert fault.target not in ("prefill-0", "router-prefill-0") or fault.kind not in held
        if fault.kind in held:
            assert any(impaired.isdisjoint(parts_of_pair(*pair)) for pair in PAIRS), fault


def test_every_station_is_aimed_at_and_the_missed_ones_more_often() -> None:
    drawer = Drawer(cluster(), random.Random(1), 100, kinds=("kill",))
    aimed: Counter[str] = Counter()
    for _ in range(120):
        fault = drawer.draw(set())
        assert fault is not None
        if fault.station is not None:
            aimed[fault.station] += 1
            if fault.station != "finished":
                drawer.hit(fault)
    assert len(aimed) == 6
    assert aimed["finished"] == max(aimed.values()) < 60


def test_links_are_counted_together() -> None:
    kinds: tuple[Kind, ...] = ("kill", "stop", *LINKS)
    assert {group(kind) for kind in kinds} == {"kill", "stop", "link"}
