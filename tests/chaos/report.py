"""Summarizes a run in numbers: faults by kind and station, what clients saw, durations."""

from __future__ import annotations

from collections import Counter
from typing import Any

from tests.chaos import isolation_rules, progress_rules, recovery_rules, stations
from tests.chaos.faults import group, minimums
from tests.chaos.history import History
from tests.chaos.stations import STATIONS
from tests.chaos.violation import Violation

EVERY_STATION = 40  # from this number of kills or stops, each station must be among them


def summary(recorded: History, violations: list[Violation]) -> dict[str, Any]:
    begun = faults_of(recorded)
    errors = Counter(each.error_code for each in recorded.exchanges if each.error_code is not None)
    undisturbed, elsewhere = isolation_rules.gaps(recorded)
    recovery = recovery_rules.measured(recorded)
    return {
        "seed": recorded.run["seed"],
        "setup": recorded.run["setup"],
        "seconds": round(recorded.run["ended"] - recorded.run["begun"], 1),
        "faults": len(begun),
        "faults_by_kind": dict(Counter(note["kind"] for note in begun)),
        "stations_by_kind": stations_by_kind(recorded),
        "too_few": too_few(recorded),
        "requests": len(recorded.exchanges),
        "complete": sum(each.done for each in recorded.exchanges),
        "with_pictures": sum(each.case.startswith("pictures") for each in recorded.exchanges),
        "left": sum(each.left for each in recorded.exchanges),
        "broken": sum(bool(each.broken) for each in recorded.exchanges),
        "errors_by_code": dict(errors),
        "violations": dict(Counter(each.invariant for each in violations)),
        "longest_gap_s": round(progress_rules.longest_gap(recorded), 2),
        "gap_p99_ms": {
            "undisturbed": round(undisturbed.p99 * 1000, 1),
            "elsewhere": round(elsewhere.p99 * 1000, 1),
            "gaps": [undisturbed.count, elsewhere.count],
        },
        "recovery": None
        if recovery is None
        else {
            "undisturbed_tokens_per_s": round(recovery.undisturbed, 1),
            "share": round(recovery.share, 3),
            "after_s": recovery.seconds,
        },
        "detection_s": _detections(recorded),
        "restart_s": round(max(recorded.run["restarts"], default=0.0), 1),
        "starved_s": round(sum(note["seconds"] for note in recorded.faults if note["event"] == "starved"), 1),
        "leaks": len(recorded.run["leaks"]),
    }


def too_few(recorded: History) -> list[str]:
    """Name the kinds with too few faults for a run of this size, and the stations at which none hit a request."""
    begun = faults_of(recorded)
    made = Counter(group(note["kind"]) for note in begun)
    found = []
    hit = stations_by_kind(recorded)
    for name, least in recorded.run.get("minimums", minimums(len(begun))).items():
        if made[name] < least:
            found.append(f"{made[name]} faults of kind {name}, at least {least} were due")
        if name != "link" and least >= EVERY_STATION:
            missed = [station for station in STATIONS if not hit.get(name, {}).get(station)]
            found += [f"no {name} hit a request at the station {station}" for station in missed]
    return found


def faults_of(recorded: History) -> list[dict[str, Any]]:
    return [note for note in recorded.faults if note["event"] == "begin" and note["kind"] != "hold"]


def stations_by_kind(recorded: History) -> dict[str, dict[str, int]]:
    return stations.hits(
        recorded.events, [(note["t"], note["kind"], note["target"]) for note in faults_of(recorded)]
    )


def _detections(recorded: History) -> dict[str, dict[str, float]]:
    detected: dict[str, list[float]] = {}
    for kind, role, seconds in recorded.run["detections"]:
        detected.setdefault(f"{kind} {role}", []).append(round(seconds, 3))
    return {name: {"max": max(each), "n": len(each)} for name, each in detected.items()}
