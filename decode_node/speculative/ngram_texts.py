"""N-gram drafts without a model: the tokens that followed the latest similar occurrence of the text's end.

The request's own text is searched first, then a table of other answers of this node. All of it is on the host, so a
round is planned once the previous one has been read.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import islice

from decode_node.request import DecodeRequest

MIN_MATCH = 2  # tokens that must match
MAX_MATCH = 16  # longer matches are not distinguished
CANDIDATES = 16  # latest occurrences that are compared
SHARED_CONTEXT = 3  # tokens that select an entry of the shared table
SHARED_ENTRIES = 1 << 17


class SharedTable:
    """Maps a context of SHARED_CONTEXT tokens to the token that last followed it. The oldest entries are evicted."""

    def __init__(self, max_entries: int = SHARED_ENTRIES) -> None:
        self._max_entries = max_entries
        self._next: OrderedDict[tuple[int, ...], int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._next)

    def learn(self, text: Sequence[int], start: int) -> None:
        """Learn from text[start:], which was added to a text."""
        for end in range(max(start, SHARED_CONTEXT), len(text)):
            context = tuple(text[end - SHARED_CONTEXT : end])
            self._next[context] = text[end]
            self._next.move_to_end(context)
        while len(self._next) > self._max_entries:
            self._next.popitem(last=False)

    def continuation(self, tail: Sequence[int], most: int) -> list[int]:
        """Return up to `most` tokens that follow a text ending in `tail`."""
        text = list(tail[-SHARED_CONTEXT:])
        found: list[int] = []
        while len(found) < most:
            following = self._next.get(tuple(text[-SHARED_CONTEXT:]))
            if following is None:
                break
            text.append(following)
            found.append(following)
        return found


class TextIndex:
    """Indexes one text by the MIN_MATCH tokens before each position; it grows with the text."""

    def __init__(self) -> None:
        self.text: list[int] = []
        self._ends: dict[tuple[int, ...], list[int]] = {}  # tokens -> positions that follow them

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens. A position is indexed once it has a token."""
        for token in tokens:
            end = len(self.text)
            if end >= MIN_MATCH:
                self._ends.setdefault(tuple(self.text[-MIN_MATCH:]), []).append(end)
            self.text.append(token)

    def continuation(self, most: int) -> list[int]:
        """Return what follows the longest earlier occurrence of the text's end; the latest one among equals."""
        text = self.text
        ends = self._ends.get(tuple(text[-MIN_MATCH:]), ())
        best, longest = 0, 0
        for end in islice(reversed(ends), CANDIDATES):
            length = MIN_MATCH
            while length < min(MAX_MATCH, end) and text[end - 1 - length] == text[-1 - length]:
                length += 1
            if length > longest:
                best, longest = end, length
        return text[best : best + most] if longest else []


class NgramTexts:
    """Proposes chains for the requests of a batch. The least recently used indexes are dropped."""

    needs_results = True

    def __init__(self, max_texts: int, shared: SharedTable | None = None) -> None:
        self._max_texts = max_texts
        self._shared = SharedTable() if shared is None else shared
        self._texts: OrderedDict[int, TextIndex] = OrderedDict()  # room -> index, rebuilt if it was dropped

    @property
    def texts(self) -> int:
        """Number of requests that have an index now."""
        return len(self._texts)

    def propose(self, requests: Sequence[DecodeRequest], width: int, /) -> tuple[tuple[int, ...], ...]:
        """Return up to `width` drafts for each request."""
        return tuple(tuple(self._continuation(request, width)) for request in requests)

    def _continuation(self, request: DecodeRequest, width: int) -> list[int]:
        index = self._index(request)
        own = index.continuation(width)
        if len(own) == width:
            return own
        tail = index.text[-SHARED_CONTEXT:] + own
        return own + self._shared.continuation(tail, width - len(own))

    def _index(self, request: DecodeRequest) -> TextIndex:
        """Return the request's index, updated with what the host knows of its text."""
        index = self._texts.pop(request.room, None) or TextIndex()
        self._texts[request.room] = index  # moved to the end: least recently used entries are dropped first
        while len(self._texts) > self._max_texts:
            self._texts.popitem(last=False)
        known, prompt = len(index.text), len(request.prompt)
        if known < prompt:
            index.extend(request.prompt[known:])
        index.extend(request.output[len(index.text) - prompt :])
        # Learns only from answers: prompts are private to their clients.
        self._shared.learn(index.text, max(known, prompt))
        return index


def make_text_drafts(max_running: int) -> NgramTexts:
    return NgramTexts(max_texts=2 * max_running)
