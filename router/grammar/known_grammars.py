"""Remembers the grammars of recent constraints: clients send the same schema again and again."""

from __future__ import annotations

from collections import OrderedDict

MAX_KNOWN = 256
MAX_BYTES = 8 << 20  # for constraints and grammars together


class KnownGrammars:
    """Grammars by their encoded constraint, the least recently used dropped first."""

    def __init__(self) -> None:
        self._grammars: OrderedDict[bytes, str] = OrderedDict()
        self._bytes = 0

    def get(self, constraint: bytes) -> str | None:
        found = self._grammars.get(constraint)
        if found is not None:
            self._grammars.move_to_end(constraint)
        return found

    def add(self, constraint: bytes, grammar: str) -> None:
        if constraint in self._grammars:  # two requests had it compiled at once
            return
        self._grammars[constraint] = grammar
        self._bytes += len(constraint) + len(grammar)
        while len(self._grammars) > MAX_KNOWN or self._bytes > MAX_BYTES:
            dropped, text = self._grammars.popitem(last=False)
            self._bytes -= len(dropped) + len(text)
