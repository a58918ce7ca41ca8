"""Finds stop strings in text that arrives in pieces; holds back only what could be the beginning of one.

There is one Knuth-Morris-Pratt automaton per stop string, fed character by character, so the boundaries of pieces and
tokens make no difference. Time is linear in the text for any stop strings ("aaaa..." included).
"""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Matches stop strings: `push` pieces until `matched`. The first complete one wins; of several, the longest."""

    def __init__(self, stops: Sequence[str], include_stop: bool) -> None:
        """`include_stop`: whether the stop string itself is part of the text."""
        self._stops = tuple(dict.fromkeys(stops))
        self._borders = [_borders(stop) for stop in self._stops]
        # characters of each stop string matched at the end of the text
        self._progress = [0] * len(self._stops)
        self._first = frozenset(stop[0] for stop in self._stops)
        self._include = include_stop
        self._held = ""
        self.matched: str | None = None

    def push(self, piece: str, armed: bool) -> str:
        """Return the text that cannot be part of a stop string any more. Nothing may be pushed after a match.

        A stop string that is completed while not `armed` is ordinary text, but one that begins there may be completed
        later.
        """
        if not self._held and self._first.isdisjoint(piece):
            return piece  # the common case
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
        """Return the text held back, after the text ended without a stop string."""
        held, self._held = self._held, ""
        return held

    def _advance(self, character: str, armed: bool) -> str:
        """Advance by one character. Return the stop string that it completes, or ""."""
        longest = ""
        for index, stop in enumerate(self._stops):
            length = self._progress[index]
            while length and stop[length] != character:
                length = self._borders[index][length - 1]
            if stop[length] == character:
                length += 1
                if length == len(stop):
                    longest = max(longest, stop, key=len) if armed else ""
                    # not armed: the match is final and cannot count later
                    length = self._borders[index][length - 1]
            self._progress[index] = length
        return longest


def _borders(stop: str) -> list[int]:
    """Return, for each prefix of `stop`, the length of its longest proper prefix that is also its suffix."""
    borders = [0] * len(stop)
    length = 0
    for position in range(1, len(stop)):
        while length and stop[length] != stop[position]:
            length = borders[length - 1]
        length += stop[length] == stop[position]
        borders[position] = length
    return borders
