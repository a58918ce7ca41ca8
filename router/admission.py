"""Lets requests through to the nodes while these have room; the others wait here, in fair order and for a bounded time.

A request costs its prompt and the tokens that a decode node keeps free for its answer. Requests are let in while their
cost fits what the decode nodes can hold, or while the nodes themselves report much more room than that: prompts may
share cached pages. Without this gate the nodes' queues fill up in order of arrival, and a short request waits behind
every long one that came before it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from common.errors import Overloaded
from router.fair_queue import FairQueue, Waiting
from router.node_registry import Node

LOOK_SECONDS = 0.25  # between two looks at what nodes report, while requests wait
REPORTED_SECONDS = 1.0  # after so long a request shows in what its node reports
RATE_SECONDS = 10.0  # over which the rate of finished work is taken
LONGEST_RETRY = 60.0


@dataclass(frozen=True, slots=True)
class Room:
    """What the decode nodes can hold."""

    tokens: int  # in all
    requests: int
    spare_tokens: int  # free now, as they report it


class NodeRoom:
    """`Room` of the nodes that are up."""

    def __init__(self, nodes: Callable[[], Iterable[Node]], requests_per_node: int) -> None:
        """`requests_per_node`: in its batch, and on the way there."""
        self._nodes = nodes
        self._requests = requests_per_node

    def __call__(self) -> Room:
        tokens = requests = spare = 0
        for node in self._nodes():
            if node.role == "decode" and node.state == "up":
                page = node.register.page_size
                tokens += node.register.total_pages * page
                requests += self._requests
                if not node.load.queued:
                    # half of it: those that run want more pages, too
                    spare += (node.load.free_pages + node.load.cached_pages) * page // 2
        return Room(tokens, requests, spare)


class SlidingSum:
    """The sum of what was added in the last `seconds`. Forgets the rest whenever something is added."""

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


@dataclass(slots=True)
class _Gate:
    """A request that waits, and how it hears that it may go."""

    waiting: Waiting
    opened: asyncio.Event = field(default_factory=asyncio.Event)


class Admission:
    """Used on the event loop."""

    def __init__(
        self,
        room: Callable[[], Room],
        reserved_tokens: int,
        longest_wait: float,
        clock: Callable[[], float],
    ) -> None:
        """`reserved_tokens`: what a decode node keeps free for a request's answer, at most."""
        self._room = room
        self._reserved = reserved_tokens
        self._longest_wait = longest_wait
        self._clock = clock
        self._queue = FairQueue()
        self._gates: dict[Waiting, _Gate] = {}
        self._tokens = 0  # of what was let in and has not ended
        self._requests = 0
        self._recent = SlidingSum(REPORTED_SECONDS, clock)  # tokens that nodes may not report yet
        self._finished = SlidingSum(RATE_SECONDS, clock)  # tokens
        self._look: asyncio.TimerHandle | None = None

    @property
    def waiting(self) -> int:
        """Number of requests that wait."""
        return len(self._queue)

    @asynccontextmanager
    async def let_in(
        self, client: str, prompt_tokens: int, max_tokens: int, patience: float, weight: int = 1
    ) -> AsyncIterator[None]:
        """Wait for room; inside, the request counts as in flight. `weight`: see FairQueue.

        Raises Overloaded where the wait is too long, or longer than `patience` seconds.
        """
        cost = prompt_tokens + min(max_tokens, self._reserved)
        if not len(self._queue) and self._fits(cost):
            self._queue.let_in(client, cost, weight)
            self._count(cost)
        else:
            waiting = Waiting(client, cost, self._clock(), weight)
            await self._wait(waiting, min(patience, self._longest_wait))
        try:
            yield
        finally:
            self._tokens -= cost
            self._requests -= 1
            self._finished.add(cost)
            self._queue.leave(client)
            self._open_gates()

    def open_all(self) -> None:
        """Let everybody in, because the router shuts down and each request is to end with its own error."""
        while (head := self._queue.head()) is not None:
            self._open(head)

    async def _wait(self, waiting: Waiting, patience: float) -> None:
        expected = self._expected_wait(waiting)
        if expected > self._longest_wait:
            raise _overloaded(expected)
        gate = _Gate(waiting)
        self._queue.push(waiting)
        self._gates[waiting] = gate
        try:
            self._open_gates()
            async with asyncio.timeout(patience):
                await gate.opened.wait()
        except BaseException as error:
            if gate.opened.is_set():  # let in and gone at once
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
        """Let in whoever's turn it is, as long as there is room."""
        while (head := self._queue.head()) is not None and self._fits(head.cost):
            self._open(head)
        if len(self._queue) and self._look is None:
            self._look = asyncio.get_running_loop().call_later(LOOK_SECONDS, self._look_again)

    def _open(self, head: Waiting) -> None:
        self._queue.take(head)
        self._count(head.cost)
        self._gates.pop(head).opened.set()

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
            # whatever its size; and without decode nodes it is the placement that waits or refuses
            return True
        if self._requests >= room.requests:
            return False
        if self._tokens + cost <= room.tokens:
            return True
        return self._recent.total() + cost <= room.spare_tokens

    def _expected_wait(self, waiting: Waiting) -> float:
        """Seconds until another request of this client has its turn; 0 while nothing is known."""
        finished = self._finished.total()
        before = self._queue.tokens_before(waiting.client, waiting.weight)
        return before * RATE_SECONDS / finished if finished else 0.0


def _overloaded(seconds: float) -> Overloaded:
    return Overloaded(
        "the cluster has more work than it can take in now; try again later",
        retry_after=min(max(seconds, 1.0), LONGEST_RETRY),
    )
