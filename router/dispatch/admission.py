"""Admission control: requests wait here, in fair order and for a bounded time, until the nodes have room for them.

The cost of a request is its prompt plus the tokens that a decode node reserves for its answer. A request is admitted
while the total cost fits the capacity of the decode nodes, or while the nodes report spare capacity for it, because
prompts can share cached pages. Without this gate the queues of the nodes would fill up in order of arrival, and a short
request would wait for every long one that arrived before it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol

from common.errors import Overloaded
from router.dispatch.fair_queue import FairQueue, WaitingRequest
from router.dispatch.generation import GenerationRequest
from router.nodes.registry import Node

LOOK_SECONDS = 0.25  # interval at which reported loads are read again while requests wait
REPORTED_SECONDS = 1.0  # a request appears in the load report of its node within this time
RATE_SECONDS = 10.0  # window over which the service rate is measured


class Room(NamedTuple):
    """Capacity of the decode nodes for this router: its share of their pages, and what others leave of the rest."""

    tokens: int  # total
    requests: int
    spare_tokens: int  # free now, as the nodes report


NO_ROOM = Room(0, 0, 0)


class VersionedNodes(Protocol):
    """The nodes, with versions that tell what has changed."""

    @property
    def version(self) -> int:
        """A number that changes whenever a node joins, leaves or changes its state."""
        ...

    @property
    def heard(self) -> set[str]:
        """Incarnations of the nodes whose reported load has changed since somebody cleared the set."""
        ...

    def node(self, incarnation: str) -> Node: ...

    def __iter__(self) -> Iterator[Node]: ...


class NodeRoom:
    """Computes the `Room` of all nodes that are up.

    A node sends heartbeats all the time, and every request asks for the room: only what has changed is added up.
    """

    def __init__(self, nodes: VersionedNodes, requests_per_node: int) -> None:
        """`requests_per_node`: requests that a decode node may have in its batch or in transfer."""
        self._nodes = nodes
        self._requests = requests_per_node
        self._version: int | None = None
        self._parts: dict[str, Room] = {}  # incarnation -> what the node adds
        self._room = NO_ROOM

    def __call__(self) -> Room:
        nodes = self._nodes
        if self._version != nodes.version:
            self._version = nodes.version
            self._parts, self._room = {}, NO_ROOM
            for node in nodes:
                self._count(node)
        elif nodes.heard:
            for incarnation in nodes.heard:
                self._count(nodes.node(incarnation))
        nodes.heard.clear()
        return self._room

    def _count(self, node: Node) -> None:
        """Replace what the node has added before."""
        before, part, room = self._parts.get(node.incarnation, NO_ROOM), self._part(node), self._room
        self._parts[node.incarnation] = part
        self._room = Room(
            room.tokens + part.tokens - before.tokens,
            room.requests + part.requests - before.requests,
            room.spare_tokens + part.spare_tokens - before.spare_tokens,
        )

    def _part(self, node: Node) -> Room:
        if node.role != "decode" or node.state != "up":
            return NO_ROOM
        page, routers, spare = node.register.page_size, 1 + node.others.routers, 0
        if not node.load.queued:
            # Only half of it: running requests will need more pages, too. The others may take as much.
            spare = (node.load.free_pages + node.load.cached_pages) * page // 2 // routers
        return Room(
            node.register.total_pages * page // routers,
            max(self._requests - node.others.requests, self._requests // routers),
            spare,
        )


class SlidingSum:
    """The sum of the amounts that were added in the last `seconds`. Older ones are dropped at each call."""

    def __init__(self, seconds: float, clock: Callable[[], float]) -> None:
        self._seconds = seconds
        self._clock = clock
        self._added: deque[tuple[float, int]] = deque()
        self._sum = 0

    def __len__(self) -> int:
        return len(self._added)

    def add(self, amount: int) -> None:
        self._added.append((self._clock(), amount))
        self._sum += amount
        self._forget()

    def total(self) -> int:
        self._forget()
        return self._sum

    def _forget(self) -> None:
        before = self._clock() - self._seconds
        while self._added and self._added[0][0] < before:
            self._sum -= self._added.popleft()[1]


class ServiceRate:
    """The tokens per second of requests that ended while others waited.

    Requests that end while none wait show the demand, not the capacity of the nodes. The first of many that began
    together do not show it either: the rate is known once as many tokens have ended as were running when the first
    request waited.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._since = 0.0  # when requests began to wait
        self._missing = 0  # tokens that have to end before the rate is known
        self._ended = SlidingSum(RATE_SECONDS, clock)

    def restart(self, running: int) -> None:
        """Begin to measure: the first request waits, while this many tokens are running."""
        self._since = self._clock()
        self._missing = running
        self._ended = SlidingSum(RATE_SECONDS, self._clock)

    def add(self, tokens: int) -> None:
        self._missing -= tokens
        self._ended.add(tokens)

    def seconds_for(self, tokens: int) -> float:
        """Return the seconds that this many tokens take; 0 while that is not known."""
        if self._missing > 0:
            return 0.0
        ended = self._ended.total()
        return tokens * min(self._clock() - self._since, RATE_SECONDS) / ended if ended else 0.0


class Admission:
    """Admits requests in fair order while the decode nodes have room. Used on the event loop only."""

    def __init__(
        self,
        room: Callable[[], Room],
        reserved_tokens: int,
        longest_wait: float,
        clock: Callable[[], float],
    ) -> None:
        """`reserved_tokens`: the most tokens that a decode node reserves for the answer of one request."""
        self._room = room
        self._reserved = reserved_tokens
        self._longest_wait = longest_wait
        self._clock = clock
        self._queue = FairQueue()
        self._gates: dict[WaitingRequest, asyncio.Event] = {}  # what admits each waiting request
        self._tokens = 0  # cost of the admitted requests that have not ended
        self._requests = 0
        self._recent = SlidingSum(REPORTED_SECONDS, clock)  # cost that nodes may not report yet
        self._rate = ServiceRate(clock)
        self._look: asyncio.TimerHandle | None = None

    @property
    def waiting(self) -> int:
        """Number of waiting requests."""
        return len(self._gates)

    @property
    def tokens(self) -> int:
        """The cost of the admitted requests that have not ended."""
        return self._tokens

    @property
    def requests(self) -> int:
        """Number of admitted requests that have not ended."""
        return self._requests

    @property
    def clients(self) -> int:
        """Number of clients that are remembered: those of waiting and of admitted requests."""
        return self._queue.clients

    def let_in(self, request: GenerationRequest) -> int | None:
        """Admit the request if there is room for it now; return None if it has to `enter`.

        It counts as in flight until `leave`, which takes the returned cost.
        """
        cost = len(request.token_ids) + min(request.sampling.max_tokens, self._reserved)
        if self._gates or not self._fits(cost):
            return None
        self._queue.let_in(request.client, cost, request.weight)
        self._count(cost)
        return cost

    async def enter(self, request: GenerationRequest, timeout: float) -> int:
        """Wait for room for a request for which `let_in` has just found none, and admit it in the same way.

        Raises Overloaded if it would wait, or has waited, longer than `timeout` or the configured limit.
        """
        cost = len(request.token_ids) + min(request.sampling.max_tokens, self._reserved)
        now = self._clock()
        waiting = WaitingRequest(request.client, cost, now, request.weight, priority=request.priority)
        await self._wait(waiting, min(timeout, self._longest_wait))
        return cost

    def leave(self, client: str, cost: int) -> None:
        """Count the end of a request, and admit others."""
        self._tokens -= cost
        self._requests -= 1
        if self._gates:
            self._rate.add(cost)
        self._queue.leave(client)
        if self._gates:
            self._open_gates()

    def open_all(self) -> None:
        """Admit every waiting request: the router is shutting down, and each request ends with its own error."""
        while (head := self._queue.head()) is not None:
            self._open(head)

    async def _wait(self, waiting: WaitingRequest, timeout: float) -> None:
        expected = self._expected_wait(waiting)
        if expected > self._longest_wait:
            raise _overloaded(expected)
        opened = asyncio.Event()
        if not len(self._queue):
            self._rate.restart(self._tokens)
        self._queue.push(waiting)
        self._gates[waiting] = opened
        try:
            self._open_gates()
            async with asyncio.timeout(timeout):
                await opened.wait()
        except BaseException as error:
            # Admitted and cancelled at the same time.
            if opened.is_set():
                self._tokens -= waiting.cost
                self._requests -= 1
                self._queue.leave(waiting.client)
                self._open_gates()
            else:
                del self._gates[waiting]
                self._queue.withdraw(waiting)
            if isinstance(error, TimeoutError):
                raise _overloaded(self._expected_wait(waiting)) from None
            raise

    def _open_gates(self) -> None:
        """Admit the requests whose turn it is while there is room."""
        while (head := self._queue.head()) is not None and self._fits(head.cost):
            self._open(head)
        if len(self._queue) and self._look is None:
            self._look = asyncio.get_running_loop().call_later(LOOK_SECONDS, self._look_again)

    def _open(self, head: WaitingRequest) -> None:
        self._queue.take(head)
        self._count(head.cost)
        self._gates.pop(head).set()

    def _look_again(self) -> None:
        self._look = None
        self._open_gates()

    def _count(self, cost: int) -> None:
        self._tokens += cost
        self._requests += 1
        self._recent.add(cost)

    def _fits(self, cost: int) -> bool:
        room = self._room()
        if not self._requests or not room.requests:
            # An idle cluster takes a request of any size. Without decode nodes, placement waits or refuses.
            return True
        if self._requests >= room.requests:
            return False
        if self._tokens + cost <= room.tokens:
            return True
        return self._recent.total() + cost <= room.spare_tokens

    def _expected_wait(self, waiting: WaitingRequest) -> float:
        """Return the seconds until this client's next request is admitted; 0 while no rate is known."""
        return self._rate.seconds_for(self._queue.tokens_before(waiting.client, waiting.weight))


def _overloaded(seconds: float) -> Overloaded:
    return Overloaded("the cluster is overloaded; try again later", retry_after=seconds)
