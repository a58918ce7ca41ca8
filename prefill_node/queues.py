"""Where a prompt is. The queue is the state:

waiting ──lease──> computing ──last chunk──> handing_over ──settled──> gone
   │                  │                           │
   └──────────────── ending (aborted or failed, waits for launches and the sender) ──settled──> gone
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from prefill_node.request import PrefillRequest


class Queues:
    """All prompts of a node."""

    def __init__(self) -> None:
        self.waiting: deque[PrefillRequest] = deque()
        self.computing: dict[int, PrefillRequest] = {}  # room -> request, in order of admission
        self.handing_over: dict[int, PrefillRequest] = {}
        self.ending: dict[int, PrefillRequest] = {}

    def __len__(self) -> int:
        return len(self.waiting) + len(self.computing) + len(self.handing_over) + len(self.ending)

    def __iter__(self) -> Iterator[PrefillRequest]:
        yield from list(self.waiting)
        yield from list(self.computing.values())
        yield from list(self.handing_over.values())
        yield from list(self.ending.values())

    def find(self, room: int) -> PrefillRequest | None:
        """A request that has not ended."""
        found = self.computing.get(room) or self.handing_over.get(room)
        return found or next((each for each in self.waiting if each.room == room), None)

    def next_waiting(self) -> PrefillRequest | None:
        """Whose turn it is: first come among those with decode pages, then among the others; images must be here."""
        ready = [each for each in self.waiting if each.ready]
        return next((each for each in ready if each.granted), ready[0] if ready else None)

    def end(self, request: PrefillRequest) -> None:
        """Move to `ending` from wherever it is."""
        if (
            self.computing.pop(request.room, None) is None
            and self.handing_over.pop(request.room, None) is None
        ):
            self.waiting.remove(request)
        request.ended = True
        self.ending[request.room] = request

    def forget(self, request: PrefillRequest) -> None:
        self.handing_over.pop(request.room, None)
        self.ending.pop(request.room, None)
