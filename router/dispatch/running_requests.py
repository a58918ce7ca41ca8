"""The requests in flight, by client: to abort them by id and to count them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from router.dispatch.in_flight import InFlight


class RunningRequests:
    """Requests from their entry into the dispatcher to their end."""

    def __init__(self) -> None:
        self._of: defaultdict[str, set[InFlight]] = defaultdict(set)

    def __len__(self) -> int:
        """Return the number of prompts in flight."""
        return sum(map(len, self._of.values()))

    def add(self, flight: InFlight) -> None:
        self._of[flight.request.client].add(flight)

    def remove(self, flight: InFlight) -> None:
        client = flight.request.client
        self._of[client].discard(flight)
        if not self._of[client]:
            del self._of[client]

    def count(self, client: str) -> int:
        """Return the number of prompts that `client` has in flight."""
        return len(self._of.get(client, ()))

    def abort(self, client: str, identities: Iterable[str]) -> int:
        """Abort all prompts of the requests with one of these ids, if they are the client's; return how many."""
        wanted = set(identities)
        found = [
            flight
            for flight in self._of.get(client, ())
            if not wanted.isdisjoint((flight.request.request_id, *flight.request.known_as))
        ]
        for flight in found:
            flight.abort()
        return len(found)

    def abort_all(self) -> int:
        """Abort the requests of all clients; return how many prompts that were."""
        found = [flight for flights in self._of.values() for flight in flights]
        for flight in found:
            flight.abort()
        return len(found)
