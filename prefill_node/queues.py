"""The queues of prompts. The queue that holds a prompt is the prompt's state:

waiting ──lease──> computing ──last chunk──> handing_over ──settled──> gone
   │                  │                           │
   └──────────────── ending (aborted or failed, waits for launches and the sender) ──settled──> gone
"""

from __future__ import annotations

from collections.abc import Iterator

from prefill_node.arrivals import RecentArrivals
from prefill_node.request import PrefillRequest


class Queues:
    """All prompts of a node."""

    def __init__(self) -> None:
        self.waiting: dict[int, PrefillRequest] = {}  # room -> request, in order of arrival
        self.computing: dict[int, PrefillRequest] = {}  # in order of admission
        self.handing_over: dict[int, PrefillRequest] = {}
        self.ending: dict[int, PrefillRequest] = {}
        self.arriving: dict[int, PrefillRequest] = {}  # those of `waiting` whose images are not all decoded
        self.compiling: dict[int, PrefillRequest] = {}  # those of `waiting` whose grammar is not compiled
        self.waiting_tokens = 0
        self.arrivals = RecentArrivals()

    def __len__(self) -> int:
        return len(self.waiting) + len(self.computing) + len(self.handing_over) + len(self.ending)

    def __iter__(self) -> Iterator[PrefillRequest]:
        yield from list(self.waiting.values())
        yield from list(self.computing.values())
        yield from list(self.handing_over.values())
        yield from list(self.ending.values())

    def live(self) -> Iterator[PrefillRequest]:
        """Yield the prompts that have not ended."""
        return (each for each in self if not each.ended)

    def find(self, room: int) -> PrefillRequest | None:
        """Return a request that has not ended; None if there is none in this room."""
        return self.computing.get(room) or self.handing_over.get(room) or self.waiting.get(room)

    def wait(self, request: PrefillRequest) -> None:
        """Add a new request."""
        self.waiting[request.room] = request
        self.waiting_tokens += request.num_tokens
        if request.images:
            self.arriving[request.room] = request
        if request.compilation is not None:
            self.compiling[request.room] = request

    def arrived(self, request: PrefillRequest) -> None:
        """Mark the images of a waiting request as decoded."""
        self.arriving.pop(request.room, None)

    def compiled(self, request: PrefillRequest) -> None:
        """Mark the grammar of a waiting request as compiled."""
        self.compiling.pop(request.room, None)

    def ready(self) -> Iterator[PrefillRequest]:
        """Yield the waiting requests whose images are decoded and whose grammar is compiled, in order of arrival."""
        return (
            each
            for each in self.waiting.values()
            if each.room not in self.arriving and each.room not in self.compiling
        )

    def admit(self, request: PrefillRequest, now: float) -> None:
        """Move a request from `waiting` to `computing`. The tokens that it has left now count as its arrival."""
        self._leave_waiting(request)
        self.arrivals.add(request.remaining, now)
        self.computing[request.room] = request

    def end(self, request: PrefillRequest) -> None:
        """Move a request to `ending` from whichever queue holds it."""
        if (
            self.computing.pop(request.room, None) is None
            and self.handing_over.pop(request.room, None) is None
        ):
            self._leave_waiting(request)
        request.ended = True
        self.ending[request.room] = request

    def _leave_waiting(self, request: PrefillRequest) -> None:
        del self.waiting[request.room]
        self.waiting_tokens -= request.num_tokens
        self.arriving.pop(request.room, None)
        self.compiling.pop(request.room, None)

    def forget(self, request: PrefillRequest) -> None:
        self.handing_over.pop(request.room, None)
        self.ending.pop(request.room, None)
