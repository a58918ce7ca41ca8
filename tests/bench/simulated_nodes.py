"""An event loop whose clock is virtual, and simulated nodes that answer the messages of a real dispatcher.

Prompts are shortened: one token stands for `SCALE`, and all times are those of the full lengths.
"""

from __future__ import annotations

import asyncio
import selectors
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from common.kv_events.wire import GPU
from common.messages.decode_inbox import Reserve
from common.messages.generation import FINISH_LENGTH, OutputToken
from common.messages.identity import (
    BucketTotals,
    NodeCounters,
    NodeLoad,
    NodeRef,
    NodeState,
    OtherRouters,
    Role,
)
from common.messages.prefill_inbox import Prefill
from common.messages.router_inbox import FirstToken, Heartbeat, Register, TokenRun
from common.node.ageing import aged
from common.observability.histogram import TOKEN_SECONDS, Histogram
from router.dispatch.dispatcher import Dispatcher
from router.nodes.prompt_times import rest_ms
from router.nodes.registry import NodeRegistry
from router.nodes.reported_blocks import ReportedBlocks

SCALE = 16
BLOCK = 32  # tokens of a page: 512 of the full lengths
POOL_PAGES = 1700  # an H200 with a model of 8B parameters in 16 bits
HEARTBEAT = 0.5
# Forwards of an H200 with a model of 8B parameters, roughly: (tokens, ms) of the full lengths.
FORWARDS = ((128, 5.0), (512, 10.0), (2048, 34.0), (8192, 150.0), (32_768, 800.0), (131_072, 6000.0))
TIMES = tuple((tokens // SCALE, ms) for tokens, ms in FORWARDS)
STEP_MS, STEP_MS_PER_REQUEST = 6.0, 0.06
STEPS = 16  # of a decode node that are simulated at once
EVENT_SECONDS = 0.07  # from a change of a cache to the router's knowledge of it
TRANSFER_MS = 0.005 * SCALE  # per token: 128 KiB at 25 GB/s


class _Jump(selectors.SelectSelector):
    """Waits for nothing: the time until the next timer passes at once."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 1000.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise RuntimeError("the simulation waits for something that never happens")
        self.now += max(timeout, 0.0)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose time advances from timer to timer. Nothing may wait for a socket or a thread."""

    def __init__(self) -> None:
        self._jump = _Jump()
        super().__init__(self._jump)

    def time(self) -> float:
        return self._jump.now


class PageCache:
    """The prefix cache of a node: the least recently used pages leave first, later ones of a prompt before earlier."""

    def __init__(self, pages: int, changed: Callable[[Sequence[int], Sequence[int]], None]) -> None:
        """`changed` is called with the pages that came and those that left."""
        self._pages = pages
        self._changed = changed
        self._used: OrderedDict[int, None] = OrderedDict()
        self.held = 0  # pages of running requests, which leave less for the cache

    def cached(self, blocks: Sequence[int]) -> int:
        """Return the number of leading blocks that are cached."""
        return next((index for index, block in enumerate(blocks) if block not in self._used), len(blocks))

    def add(self, blocks: Sequence[int]) -> None:
        added = [block for block in blocks if block not in self._used]
        for block in reversed(blocks):
            self._used[block] = None
            self._used.move_to_end(block)
        gone: list[int] = []
        while self._used and len(self._used) + self.held > self._pages:
            gone.append(self._used.popitem(last=False)[0])
        if added or gone:
            self._changed(added, gone)

    def load(self, **values: int) -> NodeLoad:
        """Return a load report with the pages of the pool."""
        cached = min(len(self._used), max(self._pages - self.held, 0))
        return NodeLoad(
            free_pages=max(self._pages - self.held - cached, 0),
            cached_pages=cached,
            total_pages=self._pages,
            prompt_times=TIMES,
            **values,
        )


@dataclass(slots=True)
class Tally:
    """Prompt tokens of one role, and those that were cached."""

    tokens: int = 0
    cached: int = 0

    @property
    def rate(self) -> float:
        return self.cached / self.tokens if self.tokens else 0.0


@dataclass(slots=True)
class Cluster:
    """What all simulated nodes share."""

    loop: asyncio.AbstractEventLoop
    registry: NodeRegistry
    blocks: Callable[[str], Sequence[int]]  # request id -> whole blocks of its prompt
    dispatchers: list[Dispatcher] = field(default_factory=list)  # one per router process
    decodes: dict[str, DecodeSimulation] = field(default_factory=dict)  # incarnation -> node
    # of the routers whose policies read KV events
    reported: list[ReportedBlocks] = field(default_factory=list)
    hashes: dict[int, int] = field(default_factory=dict)  # block -> hash that the router knows it by
    tallies: dict[Role, Tally] = field(default_factory=lambda: {"prefill": Tally(), "decode": Tally()})

    def serving(self, room: int) -> Dispatcher:
        """Return the dispatcher that runs an attempt; any of them if it has ended."""
        of = (each for each in self.dispatchers if each.attempt(room) is not None)
        return next(of, self.dispatchers[0])


class _Simulation(ABC):
    """A registered node that sends heartbeats."""

    def __init__(self, cluster: Cluster, role: Role, number: int) -> None:
        self.cluster = cluster
        self.cache = PageCache(POOL_PAGES, self._publish)
        self.state: NodeState = "up"
        name = f"{role}-{number:03}"
        self.incarnation = f"{name} 0123456789abcdef"
        ref = NodeRef(name=name, role=role, incarnation=self.incarnation)
        record = Register(
            node=ref,
            host="h",
            pid=1,
            model_fingerprint="f",
            max_model_len=1 << 20,
            page_size=BLOCK,
            total_pages=POOL_PAGES,
            effective_config={},
        )
        assert cluster.registry.register(record) is None
        self.node = cluster.registry.node(self.incarnation)
        # Heartbeats of many nodes do not arrive at the same moment.
        self._sequence = 0
        cluster.loop.call_later(HEARTBEAT * (number % 16) / 16, self._beat)

    @abstractmethod
    def load(self) -> NodeLoad:
        """Return what its next heartbeat reports."""

    @abstractmethod
    def receive(self, message: msgspec.Struct) -> None:
        """Take a message of the router."""

    def _publish(self, added: Sequence[int], gone: Sequence[int]) -> None:
        if self.cluster.reported:
            self.cluster.loop.call_later(EVENT_SECONDS, self._report_blocks, added, gone)

    def _report_blocks(self, added: Sequence[int], gone: Sequence[int]) -> None:
        hashes = self.cluster.hashes
        for reported in self.cluster.reported:
            reported.stored(self.node, GPU, [hashes[block] for block in added])
            reported.removed(self.node, GPU, [hashes[block] for block in gone])

    @property
    @abstractmethod
    def requests(self) -> int:
        """The number of requests that it has."""

    def counters(self) -> NodeCounters:
        """Return the counters that its next heartbeat reports."""
        return NodeCounters()

    def enter(self, state: NodeState) -> None:
        """Change the state and tell the router at once."""
        self.state = state
        self._report()

    def _report(self) -> None:
        self._sequence += 1
        message = Heartbeat(
            incarnation=self.incarnation,
            sequence=self._sequence,
            state=self.state,
            loop_age_ms=0,
            as_of=0.0,
            load=self.load(),
            counters=self.counters(),
            others=OtherRouters(),
        )
        self.cluster.registry.heartbeat(message)

    def _beat(self) -> None:
        self._report()
        self.cluster.loop.call_later(HEARTBEAT, self._beat)


class PrefillSimulation(_Simulation):
    """Computes one prompt after the other: the shortest one next, where waiting makes a prompt count as shorter."""

    def __init__(self, cluster: Cluster, number: int) -> None:
        self._queue: list[tuple[float, Prefill]] = []  # (arrival, prompt)
        self._leaving = 0  # computed prompts whose pages are on their way
        self._busy = False
        self._busy_ms = 0.0  # of all forwards that have begun
        super().__init__(cluster, "prefill", number)

    @property
    def requests(self) -> int:
        return len(self._queue) + self._busy + self._leaving

    def load(self) -> NodeLoad:
        load = self.cache.load(queued=len(self._queue), running=int(self._busy), transferring=self._leaving)
        queued = sum(rest_ms(TIMES, len(message.token_ids), 0) for _, message in self._queue)
        return msgspec.structs.replace(load, queued_ms=queued)

    def counters(self) -> NodeCounters:
        return NodeCounters(forward_seconds=self._busy_ms / 1000)

    def receive(self, message: msgspec.Struct) -> None:
        if isinstance(message, Prefill):
            self._queue.append((self.cluster.loop.time(), message))
            if not self._busy:
                self._start()

    def _start(self) -> None:
        now = self.cluster.loop.time()
        at = min(self._queue, key=lambda each: aged(len(each[1].token_ids), now - each[0]))
        self._queue.remove(at)
        self._busy = True
        arrived, message = at
        blocks, tokens = self.cluster.blocks(message.request_id), len(message.token_ids)
        cached = min(self.cache.cached(blocks) * BLOCK, tokens - 1)
        tally = self.cluster.tallies["prefill"]
        tally.tokens, tally.cached = tally.tokens + tokens, tally.cached + cached
        stages = {"prefill_start": now - arrived}
        ms = rest_ms(TIMES, tokens, cached)
        self._busy_ms += ms
        self.cluster.loop.call_later(ms / 1000, self._computed, message, arrived, cached, stages)

    def _computed(self, message: Prefill, arrived: float, cached: int, stages: dict[str, float]) -> None:
        self._busy = False
        self.cache.add(self.cluster.blocks(message.request_id))
        router = self.cluster.serving(message.room)
        attempt = router.attempt(message.room)
        if attempt is not None:
            attempt.prefill.rooms.computed(message.room)
            token = OutputToken(1)
            attempt.on_first_token(
                FirstToken(room=message.room, token=token, finish_reason=None, cached_tokens=cached)
            )
            stages["prefill_end"] = self.cluster.loop.time() - arrived
            self._leaving += 1
            ms = self.cluster.decodes[message.decode].reserved[message.room] * TRANSFER_MS
            self.cluster.loop.call_later(ms / 1000, self._handed_over, message, arrived, stages)
        if self._queue:
            self._start()

    def _handed_over(self, message: Prefill, arrived: float, stages: dict[str, float]) -> None:
        self._leaving -= 1
        stages["last_page_sent"] = self.cluster.loop.time() - arrived
        router = self.cluster.serving(message.room)
        attempt = router.attempt(message.room)
        if attempt is not None:
            attempt.prefill_over = True
            attempt.prefill.rooms.remove(message.room)
            router.transferred(attempt, stages)
            self.cluster.decodes[message.decode].join(message)


class DecodeSimulation(_Simulation):
    """Writes the tokens of its requests in steps of all of them, `STEPS` at a time."""

    def __init__(self, cluster: Cluster, number: int) -> None:
        self.reserved: dict[int, int] = {}  # room -> tokens of its prompt that are not cached
        self._pages: dict[int, int] = {}  # room -> pages
        self._left: dict[int, list[int]] = {}  # room -> [tokens still to write, tokens written]
        self._joined: dict[int, float] = {}
        self._blocks: dict[int, Sequence[int]] = {}  # room -> whole blocks of its prompt
        self._gaps = Histogram(TOKEN_SECONDS)
        super().__init__(cluster, "decode", number)
        cluster.decodes[self.incarnation] = self

    @property
    def requests(self) -> int:
        return len(self.reserved)

    def counters(self) -> NodeCounters:
        return NodeCounters(inter_token=BucketTotals.of(self._gaps))

    def load(self) -> NodeLoad:
        return self.cache.load(running=len(self._left), transferring=len(self.reserved) - len(self._left))

    def receive(self, message: msgspec.Struct) -> None:
        if isinstance(message, Reserve):
            blocks, tokens = self.cluster.blocks(message.request_id), len(message.token_ids)
            cached = self.cache.cached(blocks) * BLOCK
            tally = self.cluster.tallies["decode"]
            tally.tokens, tally.cached = tally.tokens + tokens, tally.cached + cached
            self.reserved[message.room] = tokens - cached
            self._blocks[message.room] = blocks
            self._pages[message.room] = tokens // BLOCK + 1
            self.cache.held += self._pages[message.room]
            self.cache.add(())

    def join(self, message: Prefill) -> None:
        """Begin to write the answer of a request whose pages have arrived."""
        self._left[message.room] = [message.sampling.max_tokens - 1, 1]
        self._joined[message.room] = self.cluster.loop.time()
        if len(self._left) == 1:
            self._later()

    def _later(self) -> None:
        ms = STEP_MS + STEP_MS_PER_REQUEST * len(self._left)
        self._gaps.observe(ms / 1000, STEPS * len(self._left))
        self.cluster.loop.call_later(STEPS * ms / 1000, self._steps, [*self._left])

    def _steps(self, rooms: list[int]) -> None:
        for room in rooms:
            left, written = self._left[room]
            count = min(left, STEPS)
            over = count == left
            self._left[room] = [left - count, written + count]
            router = self.cluster.serving(room)
            attempt = router.attempt(room)
            if attempt is not None:
                reason = FINISH_LENGTH if over else None
                run = TokenRun(room, written, [OutputToken(1)] * count, reason)
                if over:
                    attempt.decode_over = True
                    took = self.cluster.loop.time() - self._joined[room]
                    stages = {"first_decode": 0.0, "finished": took}
                    router.feedback.decoded(attempt, stages, written + count)
                    self.cache.add(self._blocks[room])
                attempt.on_run(run)
            if over or attempt is None:
                self._forget(room)
        if self._left:
            self._later()

    def _forget(self, room: int) -> None:
        self.cache.held -= self._pages.pop(room)
        del self._left[room], self._joined[room], self._blocks[room], self.reserved[room]
