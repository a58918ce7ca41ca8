"""Who is next among requests that wait: fair shares between clients, and for each client the shortest first, ageing.

A client that has had few tokens served goes before one that has had many, whatever it sends. Tokens are divided by the
client's weight: with weight 3 it gets three times as many while everybody waits. Among the requests
of one client the cheapest goes first, but every second of waiting counts as AGEING_TOKENS: nobody waits for ever.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from itertools import count

AGEING_TOKENS = 500.0  # per second


@dataclass(slots=True, eq=False)
class Waiting:
    """One request in the queue."""

    client: str
    cost: int  # tokens
    since: float  # monotonic seconds
    weight: int = 1  # of the client
    withdrawn: bool = False


@dataclass(slots=True)
class _Client:
    # tokens that were served, divided by its weight; counted from the least of the clients that were there when it came
    given: float = 0.0
    weight: int = 1  # as its latest request has it: the file of the API keys may change
    present: int = 0  # requests that wait or were let in
    waiting: int = 0  # tokens of those that wait
    heap: list[tuple[float, int, Waiting]] = field(default_factory=list)


class FairQueue:
    """Remembers a client as long as something of it waits or is in flight."""

    def __init__(self) -> None:
        self._clients: dict[str, _Client] = {}
        self._numbers = count()
        self._waiting = 0

    def __len__(self) -> int:
        return self._waiting

    def push(self, waiting: Waiting) -> None:
        client = self._enter(waiting.client, waiting.weight)
        # cost - AGEING * (now - since) has the order of cost + AGEING * since, which never changes
        key = waiting.cost + AGEING_TOKENS * waiting.since
        heapq.heappush(client.heap, (key, next(self._numbers), waiting))
        self._waiting += 1
        client.waiting += waiting.cost

    def tokens_before(self, name: str, weight: int = 1) -> int:
        """About how many waiting tokens are served before the next request of this client."""
        client = self._clients.get(name)
        if client is None:
            client = _Client(self._least_given())
        turn = client.given + client.waiting / weight
        others = (each for each in self._clients.values() if each is not client)
        return client.waiting + sum(
            int(min(each.waiting, max(turn - each.given, 0) * each.weight)) for each in others
        )

    def head(self) -> Waiting | None:
        """Return the request whose turn it is; None: nobody waits."""
        while self._waiting:
            client = min(
                (each for each in self._clients.values() if each.heap),
                key=lambda each: (each.given, each.heap[0][0]),
            )
            waiting = client.heap[0][2]
            if not waiting.withdrawn:
                return waiting
            heapq.heappop(client.heap)
        return None

    def take(self, waiting: Waiting) -> None:
        """Let in `waiting`, which is the head."""
        client = self._clients[waiting.client]
        heapq.heappop(client.heap)
        client.given += waiting.cost / client.weight
        self._count_out(waiting)

    def let_in(self, client: str, cost: int, weight: int = 1) -> None:
        """Count a request that did not have to wait."""
        self._enter(client, weight).given += cost / weight

    def withdraw(self, waiting: Waiting) -> None:
        """Remove a request whose client has left or whose wait is over."""
        waiting.withdrawn = True
        self._count_out(waiting)
        self.leave(waiting.client)

    def leave(self, client: str) -> None:
        """Count the end of a request that was let in."""
        found = self._clients[client]
        found.present -= 1
        if not found.present:
            del self._clients[client]

    def _enter(self, name: str, weight: int) -> _Client:
        client = self._clients.get(name)
        if client is None:
            client = self._clients[name] = _Client(self._least_given())
        client.weight = weight
        client.present += 1
        return client

    def _least_given(self) -> float:
        return min((each.given for each in self._clients.values()), default=0.0)

    def _count_out(self, waiting: Waiting) -> None:
        self._waiting -= 1
        self._clients[waiting.client].waiting -= waiting.cost
