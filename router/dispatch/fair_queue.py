"""Order of waiting requests: fair shares between clients; within a client the shortest request first, with ageing.

The client that has been served the fewest tokens goes first, whatever it sends. Tokens are divided by the weight of the
client: with weight 3 it is served three times as many while everybody waits. Among the requests of one client the
cheapest goes first, but every second of waiting subtracts AGEING_TOKENS from its cost, so none waits for ever. Each
level of priority counts as PRIORITY_TOKENS: it orders the client's own requests, and never moves it before another one.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from dataclasses import dataclass, field
from itertools import accumulate, count

AGEING_TOKENS = 500.0  # per second
PRIORITY_TOKENS = 30 * AGEING_TOKENS  # half a minute of waiting outweighs one level
STALE_SHARE = 8  # the backlog estimate is renewed after a number of changes equal to 1/8 of the clients
SPARE_RANKS = 64  # outdated entries that a heap may hold beyond one per client


@dataclass(slots=True, eq=False)
class WaitingRequest:
    """One request in the queue."""

    client: str
    cost: int  # tokens
    since: float  # monotonic seconds
    weight: int = 1  # the client's
    withdrawn: bool = False
    priority: int = 0  # lower goes first

    @property
    def aged_cost(self) -> float:
        """The cost minus AGEING_TOKENS per second of waiting, up to a constant: it orders requests at any time."""
        return self.cost + AGEING_TOKENS * self.since


@dataclass(slots=True, eq=False)
class _Client:
    # tokens served, divided by the weight; starts at the least `given` of the clients present when this one arrived
    given: float = 0.0
    weight: int = 1  # as in its latest request: a reload of the API keys may change it
    present: int = 0  # requests that wait or are admitted
    waiting: int = 0  # tokens of the waiting requests
    # Its first entry is never withdrawn.
    heap: list[tuple[float, int, WaitingRequest]] = field(default_factory=list)
    rank: _Rank | None = None  # its valid entry in the order of clients; None while nothing waits


# (given, aged cost of the client's first request, a tie breaker, client)
_Rank = tuple[float, float, int, _Client]


class _Backlog:
    """Estimates how many waiting tokens are served before a client's turn. A snapshot of all clients."""

    def __init__(self, clients: list[_Client]) -> None:
        self._starts = _Excess([(each.given, each.weight) for each in clients])
        self._ends = _Excess([(each.given + each.waiting / each.weight, each.weight) for each in clients])

    def before(self, turn: float) -> int:
        """Waiting tokens that are served before a client has been given `turn`."""
        # For each client this is min(waiting, weight * (turn - given)) where positive.
        return round(self._starts.over(turn) - self._ends.over(turn))


class _Excess:
    """Computes sums of weight * max(0, value - number) over many weighted numbers in logarithmic time."""

    def __init__(self, weighted: list[tuple[float, int]]) -> None:
        weighted.sort()
        self._sorted = [number for number, _ in weighted]
        self._weights = [0, *accumulate(weight for _, weight in weighted)]
        self._sums = [0.0, *accumulate(number * weight for number, weight in weighted)]

    def over(self, value: float) -> float:
        below = bisect_left(self._sorted, value)
        return value * self._weights[below] - self._sums[below]


class FairQueue:
    """The fair queue. It keeps a client while one of its requests waits or is in flight. No step visits all clients."""

    def __init__(self) -> None:
        self._clients: dict[str, _Client] = {}
        self._numbers = count()
        self._waiting = 0
        self._order: list[_Rank] = []  # a heap; an entry that is not its client's `rank` is outdated
        self._least: list[tuple[float, int, _Client]] = []  # a heap of all clients; `given` may be outdated
        self._backlog = _Backlog([])
        self._changes = 1  # since `_backlog` was made

    def __len__(self) -> int:
        return self._waiting

    @property
    def clients(self) -> int:
        """Number of clients with a request that waits or is in flight."""
        return len(self._clients)

    @property
    def ranks(self) -> int:
        """Number of entries in its heaps, outdated ones included."""
        return len(self._order) + len(self._least)

    def push(self, waiting: WaitingRequest) -> None:
        client = self._enter(waiting.client, waiting.weight)
        key = waiting.aged_cost + PRIORITY_TOKENS * waiting.priority
        heapq.heappush(client.heap, (key, next(self._numbers), waiting))
        self._waiting += 1
        client.waiting += waiting.cost
        self._changed(client)

    def tokens_before(self, name: str, weight: int = 1) -> int:
        """Estimate how many waiting tokens are served before the next request of this client."""
        if self._changes * STALE_SHARE >= len(self._clients):
            self._backlog = _Backlog(list(self._clients.values()))
            self._changes = 0
        client = self._clients.get(name)
        if client is None:
            client = _Client(self._least_given())
        return self._backlog.before(client.given + client.waiting / weight)

    def head(self) -> WaitingRequest | None:
        """Return the request whose turn it is; None if none waits."""
        while self._order:
            rank = self._order[0]
            client = rank[3]
            if client.rank is rank:
                return client.heap[0][2]
            heapq.heappop(self._order)
        return None

    def take(self, waiting: WaitingRequest) -> None:
        """Admit `waiting`, which must be the head."""
        client = self._clients[waiting.client]
        heapq.heappop(client.heap)
        client.given += waiting.cost / client.weight
        self._count_out(waiting)

    def let_in(self, name: str, cost: int, weight: int = 1) -> None:
        """Count a request that was admitted without waiting."""
        client = self._enter(name, weight)
        client.given += cost / weight
        self._changed(client)

    def withdraw(self, waiting: WaitingRequest) -> None:
        """Remove a request whose client has disconnected or whose wait is over."""
        waiting.withdrawn = True
        self._count_out(waiting)
        self.leave(waiting.client)

    def leave(self, client: str) -> None:
        """Count the end of an admitted request."""
        found = self._clients[client]
        found.present -= 1
        if not found.present:
            del self._clients[client]
            self._changes += 1

    def _enter(self, name: str, weight: int) -> _Client:
        client = self._clients.get(name)
        if client is None:
            client = self._clients[name] = _Client(self._least_given())
            heapq.heappush(self._least, (client.given, next(self._numbers), client))
            if len(self._least) > 2 * len(self._clients) + SPARE_RANKS:
                self._least = [entry for entry in self._least if entry[2].present or entry[2] is client]
                heapq.heapify(self._least)
        client.weight = weight
        client.present += 1
        return client

    def _least_given(self) -> float:
        while self._least:
            given, number, client = self._least[0]
            if not client.present:
                heapq.heappop(self._least)
            elif client.given != given:  # outdated: `given` only grows
                heapq.heapreplace(self._least, (client.given, number, client))
            else:
                return given
        return 0.0

    def _count_out(self, waiting: WaitingRequest) -> None:
        self._waiting -= 1
        client = self._clients[waiting.client]
        client.waiting -= waiting.cost
        self._changed(client)

    def _changed(self, client: _Client) -> None:
        """Update the position of a client in the order."""
        self._changes += 1
        while client.heap and client.heap[0][2].withdrawn:
            heapq.heappop(client.heap)
        if not client.heap:
            client.rank = None
            return
        client.rank = (client.given, client.heap[0][2].aged_cost, next(self._numbers), client)
        heapq.heappush(self._order, client.rank)
        if len(self._order) > 2 * len(self._clients) + SPARE_RANKS:
            self._order = [rank for rank in self._order if rank[3].rank is rank]
            heapq.heapify(self._order)
