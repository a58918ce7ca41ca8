"""Invariants I8 and I5 within one process: a page belongs to one room at a time, and to none at the end."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from tests.chaos.violation import Violation

Event = dict[str, Any]


class Pages:
    """Tracks the owner of each page."""

    def __init__(self, who: str) -> None:
        self._who = who
        self._owner: dict[int, int] = {}  # page -> room
        self._held: dict[int, set[int]] = {}  # room -> its pages

    def _take(self, room: int, pages: Sequence[int]) -> Iterator[Violation]:
        for page in pages:
            owner = self._owner.get(page)
            if owner is not None:
                yield Violation(
                    "I8", f"{self._who}: page {page} goes to room {room} while room {owner} has it"
                )
            self._owner[page] = room
        self._held.setdefault(room, set()).update(pages)

    def _give(self, room: int) -> None:
        for page in self._held.pop(room, ()):
            if self._owner.get(page) == room:
                del self._owner[page]

    def _leaked(self) -> Iterator[Violation]:
        for room, pages in self._held.items():
            yield Violation("I5", f"{self._who}: room {room} still has {len(pages)} pages at the end")


class PrefillPages(Pages):
    """Leases of a prefill node."""

    def check(self, events: list[Event], ended: bool) -> Iterator[Violation]:
        for event in events:
            room, kind = event["room"], event["event"]
            if kind == "leased":
                yield from self._take(room, event["pages"][event["cached"] :])
            elif kind == "released":
                self._give(room)
            elif kind == "posted" and room not in self._held:
                yield Violation("I8", f"{self._who}: room {room} posts pages without a lease")
        if ended:
            yield from self._leaked()


class DecodePages(Pages):
    """Leases of a decode node, and the pages into which a prefill node may write."""

    def check(self, events: list[Event], ended: bool) -> Iterator[Violation]:
        writable: dict[int, int] = {}  # page -> room with an open transfer
        opened: dict[int, list[int]] = {}
        last = 0
        for event in events:
            room, kind = event["room"], event["event"]
            if kind == "opened":
                if event["generation"] <= last:
                    yield Violation("I8", f"{self._who}: generation {event['generation']} follows {last}")
                last = event["generation"]
                for page in event["held"]:
                    if page in writable:
                        yield Violation(
                            "I8",
                            f"{self._who}: room {room} reads page {page}, which room {writable[page]} writes",
                        )
                yield from self._take(room, event["pages"])
                opened[room] = event["pages"]
                writable.update(dict.fromkeys(event["pages"], room))
            elif kind in ("accepted", "unwritable"):
                for page in opened.pop(room, ()):
                    writable.pop(page, None)
            elif kind in ("grown", "resumed"):
                yield from self._take(room, event["pages"])
            elif kind in ("freed", "retracted"):
                if room in opened:
                    yield Violation("I8", f"{self._who}: room {room} frees pages that may still be written")
                    for page in opened.pop(room):
                        writable.pop(page, None)
                self._give(room)
        if ended:
            yield from self._leaked()
