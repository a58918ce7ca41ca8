"""Invariants I1, I2, I3, I5 and I8 on the events of router and nodes, which clients cannot see."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from tests.chaos.history import History
from tests.chaos.pages import DecodePages, PrefillPages
from tests.chaos.violation import Violation

Event = dict[str, Any]


@dataclass
class Process:
    """One incarnation and its events, in the order of writing."""

    node: str
    incarnation: str
    pid: int
    events: list[Event] = field(default_factory=list)

    @property
    def who(self) -> str:
        return f"{self.node}/{self.incarnation[:8]}"


def check(history: History) -> list[Violation]:
    processes = by_process(history.events)
    orderly = set(history.run["orderly"])  # pids of processes that were idle when asked to end
    found: list[Violation] = []
    runs = _runs(processes)
    placed = {event["room"]: event for event in history.events if event["event"] == "placed"}
    for process in processes:
        if process.node == "router":
            found += _router(process, runs, process.pid in orderly)
        elif process.node.startswith("prefill"):
            found += PrefillPages(process.who).check(process.events, process.pid in orderly)
            found += _placement(process, placed, "prefill")
        else:
            found += DecodePages(process.who).check(process.events, process.pid in orderly)
            found += _decode_runs(process)
            found += _placement(process, placed, "decode")
    found += _transfers(processes)
    return found


def by_process(events: list[Event]) -> list[Process]:
    """Group events by process. Events carry `source` (the file); its first event identifies the process."""
    found: dict[str, Process] = {}
    for event in events:
        if event["event"] == "start":
            found[event["source"]] = Process(event["node"], event["incarnation"], event["pid"])
        if event["source"] in found:
            found[event["source"]].events.append(event)
    return list(found.values())


def _runs(processes: list[Process]) -> dict[int, dict[int, int]]:
    """Return room -> offset in the attempt -> token id, as the nodes reported it."""
    said: dict[int, dict[int, int]] = defaultdict(dict)
    for process in processes:
        for event in process.events:
            if event["event"] == "first_token":
                said[event["room"]][0] = event["id"]
            elif event["event"] == "tokens":
                said[event["room"]].update(enumerate(event["ids"], event["offset"]))
    return said


def _router(process: Process, runs: dict[int, dict[int, int]], ended: bool) -> Iterator[Violation]:
    """Check every request: received once, delivered exactly what its nodes reported, ended once."""
    prompt: dict[str, int] = {}
    given: dict[str, int] = {}  # request -> tokens delivered
    # request -> (tokens before the attempt, room)
    attempts: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for event in process.events:
        request, kind = event.get("request", ""), event["event"]
        who = f"{process.who} {request}"
        if kind == "received":
            if request in prompt:
                yield Violation("I3", f"{who}: received twice")
            prompt[request], given[request] = event["prompt"], 0
        elif kind == "placed":
            attempts[request].append((event["tokens"] - prompt.get(request, 0), event["room"]))
        elif kind == "delivered":
            if event["offset"] != given.get(request):
                yield Violation(
                    "I2", f"{who}: tokens from {event['offset']} delivered after {given.get(request)}"
                )
            for place, token in enumerate(event["ids"], event["offset"]):
                known = [runs[room].get(place - before) for before, room in attempts[request]]
                if known and token not in known and any(each is not None for each in known):
                    yield Violation("I1", f"{who}: token {place} is {token}, nodes said {known}")
                    break
            given[request] = event["offset"] + len(event["ids"])
        elif kind == "ended":
            if request not in given:
                yield Violation("I3", f"{who}: ended twice, or without having been received")
            elif event["tokens"] != given.pop(request):
                yield Violation("I2", f"{who}: ended with {event['tokens']} tokens, delivered others")
    if ended:
        for request in given:
            yield Violation("I3", f"{process.who} {request}: no terminal event")


def _decode_runs(process: Process) -> Iterator[Violation]:
    """Check the tokens of a room: after its record, from offset 1, no gap or repetition, none after the last."""
    following: dict[int, int] = {}  # room -> next offset; -1: finished
    for event in process.events:
        room, kind = event["room"], event["event"]
        who = f"{process.who} room {room}"
        if kind == "accepted":
            if room in following:
                yield Violation("I2", f"{who}: its record is accepted twice")
            following[room] = 1
        elif kind == "tokens":
            if event["offset"] != following.get(room):
                wanted = following.get(room, "a record")
                yield Violation("I2", f"{who}: tokens from {event['offset']} where {wanted} is due")
            following[room] = -1 if event["finish"] else event["offset"] + len(event["ids"])
        elif kind in ("freed", "dropped") and room in following:
            following[room] = -1


def _placement(process: Process, placed: dict[int, Event], role: str) -> Iterator[Violation]:
    """Check that a node works only on rooms that the router gave to this incarnation.

    Final router events may be lost.
    """
    for event in process.events:
        if event["event"] == "taken" and event["room"] in placed:
            chosen = placed[event["room"]][role]
            if chosen != process.incarnation:
                yield Violation(
                    "I8", f"{process.who} took room {event['room']}, which was placed on {chosen[:8]}"
                )


def _transfers(processes: list[Process]) -> Iterator[Violation]:
    """Check that pages are posted under the generation opened for the room, and all before it is accepted."""
    opened: dict[int, list[Event]] = defaultdict(list)
    posted: dict[tuple[int, int], int] = defaultdict(int)
    accepted: set[int] = set()
    for process in processes:
        for event in process.events:
            if event["event"] == "opened":
                opened[event["room"]].append(event)
            elif event["event"] == "posted":
                posted[event["room"], event["generation"]] += len(event["pages"])
            elif event["event"] == "accepted":
                accepted.add(event["room"])
    for (room, generation), pages in posted.items():
        grants = [each for each in opened[room] if each["generation"] == generation]
        if opened[room] and not grants:
            known = [each["generation"] for each in opened[room]]
            yield Violation("I8", f"room {room}: pages posted under generation {generation}, opened {known}")
        elif grants and (
            pages > len(grants[0]["pages"]) or (room in accepted and pages != len(grants[0]["pages"]))
        ):
            yield Violation("I8", f"room {room}: {pages} pages posted, {len(grants[0]['pages'])} opened")
