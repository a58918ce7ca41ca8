"""The queues of a decode node. A request's queue is its state:

waiting ──pages──> transferring ──record──> arrived ──row──> running ──last token──> gone
                        │                                     │   ^
                        │                            no pages v   │ pages
                        │                                  retracted
                        └──abort or failure──> quarantined ──no write can land any more──> gone
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from decode_node.admission import in_order
from decode_node.request import DecodeRequest


class Queues:
    """All requests of a node."""

    def __init__(self) -> None:
        self.waiting: deque[DecodeRequest] = deque()
        self.transferring: dict[int, DecodeRequest] = {}  # room -> request
        self.arrived: deque[DecodeRequest] = deque()
        self.running: dict[int, DecodeRequest] = {}
        self.retracted: deque[DecodeRequest] = deque()
        self.quarantined: dict[int, DecodeRequest] = {}

    def __len__(self) -> int:
        return self.num_live + len(self.quarantined)

    @property
    def num_live(self) -> int:
        """Number of requests that the router still waits for."""
        return (
            len(self.waiting)
            + len(self.transferring)
            + len(self.arrived)
            + len(self.running)
            + len(self.retracted)
        )

    def __iter__(self) -> Iterator[DecodeRequest]:
        yield from self.live()
        yield from list(self.quarantined.values())

    def live(self) -> Iterator[DecodeRequest]:
        """Yield all requests that the router still waits for."""
        yield from list(self.waiting)
        yield from list(self.transferring.values())
        yield from list(self.arrived)
        yield from list(self.running.values())
        yield from list(self.retracted)

    def sort_waiting(self, now: float) -> None:
        """Sort by the scheduler's order. Requests that arrive later are appended until the next call."""
        ordered = in_order(self.waiting, now)
        self.waiting.clear()
        self.waiting.extend(ordered)

    def find(self, room: int) -> DecodeRequest | None:
        found = self.transferring.get(room) or self.running.get(room)
        if found is not None:
            return found
        for queue in (self.waiting, self.arrived, self.retracted):
            for request in queue:
                if request.room == room:
                    return request
        return None

    def holding(self) -> Iterator[DecodeRequest]:
        """Yield the requests that hold pages and will need more."""
        yield from (each for each in self.retracted if each.lease is not None)
        yield from self.transferring.values()
        yield from self.arrived
        yield from self.running.values()
