"""Runs a plan against a server, as an open or a closed loop, and watches whether this process keeps up."""

from __future__ import annotations

import asyncio
import gc
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from itertools import islice, takewhile

import aiohttp

from deploy.load_generator.plan import PlannedRequest
from deploy.load_generator.stream import RequestTimes, stream_completion

PROBE_SECONDS = 0.005
# Bodies that an open loop makes before its start. One of 50,000 tokens takes 8 ms, which would delay other requests.
MADE_BYTES = 256 << 20
CUT_OFF = "unanswered when the run was ended"

MakeBody = Callable[[PlannedRequest], bytes]
Answered = Callable[[], None]


def no_progress() -> None:
    """Report an answer to nobody."""


@dataclass(frozen=True, slots=True)
class Server:
    """The receiver of requests, and the maker of their bodies."""

    session: aiohttp.ClientSession
    url: str  # of completions
    body: MakeBody


@dataclass(slots=True)
class Run:
    """All requests of one plan, in its order, or of several plans of one load."""

    requests: list[RequestTimes] = field(default_factory=list)
    seconds: float = 0.0  # from the start to the last answer
    loop_lags: list[float] = field(default_factory=list)  # seconds by which short sleeps ended late
    # Requests that `EarlyStop` cut off, which are in `requests` with an error, and those that it did not send.
    outstanding: int = 0
    unsent: int = 0

    def add(self, other: Run) -> None:
        """Append a run of the same load, as with another seed."""
        self.requests += other.requests
        self.outstanding += other.outstanding
        self.unsent += other.unsent
        self.seconds += other.seconds
        self.loop_lags += other.loop_lags


@contextmanager
def no_collections() -> Iterator[None]:
    """Collect Python's garbage now, and not again before the end.

    A collection halts this process, which makes a gap in every running stream: 5 to 13 ms for new objects, 60 ms and
    more for the times of some thousand answers. Requests leave no garbage in cycles, so nothing grows meanwhile.
    """
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@dataclass(frozen=True, slots=True)
class EarlyStop:
    """Ends an open loop whose server does not keep up, so that it does not run until the last answer."""

    # A request that is unanswered this many seconds after its due time is overdue: it has missed a limit for certain.
    overdue: float
    max_overdue: int  # with more of them at a time, nothing more is sent and nothing awaited
    drain: float  # seconds after the last arrival for which answers are awaited


async def open_loop(
    server: Server,
    plan: Sequence[PlannedRequest],
    answered: Answered = no_progress,
    early_stop: EarlyStop | None = None,
) -> Run:
    """Send each request when it is due, however many are unanswered, or until `early_stop` ends the run."""
    run, made = Run(), _made(server, plan)
    start = time.perf_counter()
    async with asyncio.TaskGroup() as group, _probed(run):
        lags: dict[asyncio.Task[RequestTimes], float] = {}
        unanswered: dict[asyncio.Task[RequestTimes], float] = {}
        wait_for_answers = None if early_stop is None else early_stop.drain
        for request in plan:
            body = made.popleft() if made else server.body(request)
            due = start + request.due
            await asyncio.sleep(due - time.perf_counter())
            if early_stop is not None and _does_not_keep_up(unanswered.values(), early_stop):
                wait_for_answers = 0.0
                break
            task = group.create_task(_send(server, body, due, answered))
            lags[task], unanswered[task] = time.perf_counter() - due, due
            task.add_done_callback(unanswered.pop)
        await _finish([*lags], wait_for_answers)
        run.seconds = time.perf_counter() - start
    cut = [task.cancelled() for task in lags]
    run.requests = [
        RequestTimes(lag=lag, error=CUT_OFF) if task.cancelled() else task.result()
        for task, lag in lags.items()
    ]
    run.outstanding, run.unsent = sum(cut), len(plan) - len(cut)
    return run


def _made(server: Server, plan: Sequence[PlannedRequest]) -> deque[bytes]:
    """Return the bodies of the first requests, of MADE_BYTES and one more at most."""
    made, size = deque[bytes](), 0
    for request in plan:
        if size >= MADE_BYTES:
            break
        made.append(server.body(request))
        size += len(made[-1])
    return made


def _does_not_keep_up(due_times: Iterable[float], early_stop: EarlyStop) -> bool:
    """Return whether too many of the unanswered requests are overdue. Their due times are in ascending order."""
    latest = time.perf_counter() - early_stop.overdue
    overdue = takewhile(lambda due: due < latest, due_times)
    return sum(1 for _ in islice(overdue, early_stop.max_overdue + 1)) > early_stop.max_overdue


async def _finish(tasks: Sequence[asyncio.Task[RequestTimes]], seconds: float | None) -> None:
    """Await all answers, or those that come within `seconds`, and cancel the other requests."""
    if not tasks:
        return
    _, late = await asyncio.wait(tasks, timeout=seconds)
    for task in late:
        task.cancel()
    if late:
        await asyncio.wait(late)


async def closed_loop(
    server: Server, plan: Sequence[PlannedRequest], clients: int, answered: Answered = no_progress
) -> Run:
    """Let each of `clients` send its next request when its last one was answered."""
    run = Run()
    results: list[RequestTimes | None] = [None] * len(plan)
    waiting = iter(enumerate(plan))

    async def client() -> None:
        for index, request in waiting:
            results[index] = await _send(server, server.body(request), None, answered)

    start = time.perf_counter()
    async with asyncio.TaskGroup() as group, _probed(run):
        for task in [group.create_task(client()) for _ in range(min(clients, len(plan)))]:
            await task
        run.seconds = time.perf_counter() - start
    run.requests = [each for each in results if each is not None]
    return run


async def _send(server: Server, body: bytes, due: float | None, answered: Answered) -> RequestTimes:
    times = await stream_completion(server.session, server.url, body, due)
    answered()
    return times


@asynccontextmanager
async def _probed(run: Run) -> AsyncIterator[None]:
    """Note how late short sleeps end, which delays whatever else this process measures."""
    task = asyncio.create_task(_probe(run.loop_lags))
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _probe(lags: list[float]) -> None:
    while True:
        began = time.perf_counter()
        await asyncio.sleep(PROBE_SECONDS)
        lags.append(time.perf_counter() - began - PROBE_SECONDS)
