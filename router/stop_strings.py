"""Finds stop strings in text that comes in pieces; holds back only what could be the beginning of one.

One Knuth-Morris-Pratt automaton per stop string, fed character by character: where a piece ends makes no difference, so
neither does where token borders fall. Time is linear in the text whatever the stop strings look like ("aaaa..." too).
"""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """`push` pieces until `matched`. The stop string that is complete first wins; of several, the longest."""

    def __init__(self, stops: Sequence[str], include_stop: bool) -> None:
        """`include_stop`: the stop string itself is part of the text that comes out."""
        self._stops = tuple(dict.fromkeys(stops))
        self._borders = [_borders(stop) for stop in self._stops]
        self._progress = [0] * len(self._stops)  # characters of each stop string that end the text so far
        self._first = frozenset(stop[0] for stop in self._stops)
        self._include = include_stop
        self._held = ""
        self.matched: str | None = None

    def push(self, piece: str, armed: bool = True) -> str:
        """The text that is certain now. After a match nothing may be pushed.

        A stop string that is complete while not `armed` is text like any other; it may begin there and count later.
        """
        if not self._held and self._first.isdisjoint(piece):
            return piece  # nearly every piece of nearly every answer
        for position, character in enumerate(piece):
            matched = self._advance(character, armed)
            if matched:
                self.matched = matched
                text = self._held + piece[: position + 1]
                self._held = ""
                return text if self._include else text[: len(text) - len(matched)]
        text = self._held + piece
        certain = len(text) - max(self._progress)
        self._held = text[certain:]
        return text[:certain]

    def flush(self) -> str:
        """What was held back, when the text ended without a stop string."""
        held, self._held = self._held, ""
        return held

    def _advance(self, character: str, armed: bool) -> str:
        """One character; returns the stop string that it completes, or ""."""
        longest = ""
        for index, stop in enumerate(self._stops):
            length = self._progress[index]
            while length and stop[length] != character:
                length = self._borders[index][length - 1]
            if stop[length] == character:
                length += 1
                if length == len(stop):
                    longest = max(longest, stop, key=len) if armed else ""
                    length = self._borders[index][length - 1]  # read where it is no match: that is final
            self._progress[index] = length
        return longest


def _borders(stop: str) -> list[int]:
    """For each prefix of `stop`: length of its longest proper prefix that also ends it."""
    borders = [0] * len(stop)
    length = 0
    for position in range(1, len(stop)):
        while length and stop[length] != stop[position]:
            length = borders[length - 1]
        length += stop[length] == stop[position]
        borders[position] = length
    return borders
