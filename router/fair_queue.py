"""Who is next among requests that wait: fair shares between clients, and for each client the shortest first, ageing.

A client that has had few tokens served goes before one that has had many, whatever it sends. Tokens are divided by the
client's weight: with weight 3 it gets three times as many while everybody waits. Among the requests
of one client the cheapest goes first, but every second of waiting counts as AGEING_TOKENS: nobody waits for ever.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from dataclasses import dataclass, field
from itertools import accumulate, count

AGEING_TOKENS = 500.0  # per second
STALE_SHARE = 8  # estimates are made anew after as many changes as an eighth of the clients
SPARE_RANKS = 64  # outdated entries that a heap may hold beyond one for each client


@dataclass(slots=True, eq=False)
class Waiting:
    """One request in the queue."""

    client: str
    cost: int  # tokens
    since: float  # monotonic seconds
    weight: int = 1  # of the client
    withdrawn: bool = False


@dataclass(slots=True, eq=False)
class _Client:
    # tokens that were served, divided by its weight; counted from the least of the clients that were there when it came
    given: float = 0.0
    weight: int = 1  # as its latest request has it: the file of the API keys may change
    present: int = 0  # requests that wait or were let in
    waiting: int = 0  # tokens of those that wait
    heap: list[tuple[float, int, Waiting]] = field(default_factory=list)  # its first entry waits
    rank: _Rank | None = None  # its valid entry in the order of clients; None: nothing waits


_Rank = tuple[float, float, int, _Client]  # given, key of its first request, a number, whose it is


class _Backlog:
    """How much waits before a client that has been given so much: an estimate for all clients at one moment."""

    def __init__(self, clients: list[_Client]) -> None:
        self._starts = _Excess([(each.given, each.weight) for each in clients])
        self._ends = _Excess([(each.given + each.waiting / each.weight, each.weight) for each in clients])

    def before(self, turn: float) -> int:
        """Waiting tokens that are served before a client has been given `turn`."""
        # of each client min(waiting, weight * (turn - given)), where that is positive
        return round(self._starts.over(turn) - self._ends.over(turn))


class _Excess:
    """Sums of weight * max(0, value - each) over many numbers with their weights, in logarithmic time."""

    def __init__(self, weighted: list[tuple[float, int]]) -> None:
        weighted.sort()
        self._sorted = [number for number, _ in weighted]
        self._weights = [0, *accumulate(weight for _, weight in weighted)]
        self._sums = [0.0, *accumulate(number * weight for number, weight in weighted)]

    def over(self, value: float) -> float:
        below = bisect_left(self._sorted, value)
        return value * self._weights[below] - self._sums[below]


class FairQueue:
    """Remembers a client as long as something of it waits or is in flight. No step looks at every client."""

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

    def push(self, waiting: Waiting) -> None:
        client = self._enter(waiting.client, waiting.weight)
        # cost - AGEING * (now - since) has the order of cost + AGEING * since, which never changes
        key = waiting.cost + AGEING_TOKENS * waiting.since
        heapq.heappush(client.heap, (key, next(self._numbers), waiting))
        self._waiting += 1
        client.waiting += waiting.cost
        self._changed(client)

    def tokens_before(self, name: str, weight: int = 1) -> int:
        """About how many waiting tokens are served before the next request of this client."""
        if self._changes * STALE_SHARE >= len(self._clients):
            self._backlog = _Backlog(list(self._clients.values()))
            self._changes = 0
        client = self._clients.get(name)
        if client is None:
            client = _Client(self._least_given())
        return self._backlog.before(client.given + client.waiting / weight)

    def head(self) -> Waiting | None:
        """Return the request whose turn it is; None: nobody waits."""
        while self._order:
            rank = self._order[0]
            client = rank[3]
            if client.rank is rank:
                return client.heap[0][2]
            heapq.heappop(self._order)
        return None

    def take(self, waiting: Waiting) -> None:
        """Let in `waiting`, which is the head."""
        client = self._clients[waiting.client]
        heapq.heappop(client.heap)
        client.given += waiting.cost / client.weight
        self._count_out(waiting)

    def let_in(self, name: str, cost: int, weight: int = 1) -> None:
        """Count a request that did not have to wait."""
        client = self._enter(name, weight)
        client.given += cost / weight
        self._changed(client)

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
            elif client.given != given:  # it only grows
                heapq.heapreplace(self._least, (client.given, number, client))
            else:
                return given
        return 0.0

    def _count_out(self, waiting: Waiting) -> None:
        self._waiting -= 1
        client = self._clients[waiting.client]
        client.waiting -= waiting.cost
        self._changed(client)

    def _changed(self, client: _Client) -> None:
        """Give a client its place in the order again."""
        self._changes += 1
        while client.heap and client.heap[0][2].withdrawn:
            heapq.heappop(client.heap)
        if not client.heap:
            client.rank = None
            return
        client.rank = (client.given, client.heap[0][0], next(self._numbers), client)
        heapq.heappush(self._order, client.rank)
        if len(self._order) > 2 * len(self._clients) + SPARE_RANKS:
            self._order = [rank for rank in self._order if rank[3].rank is rank]
            heapq.heapify(self._order)
