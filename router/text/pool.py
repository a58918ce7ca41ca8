"""Runs text jobs in worker processes: two lanes with bounded queues, deadlines and restarts.

Small jobs have workers of their own, so that none of them waits for a large one.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from common.errors import InternalError, InvalidRequest, Overloaded, TandemError
from common.observability.logs import Log
from router.process.spawner import Spawner
from router.text.channel import TextChannel, WorkerEnded, WorkerStuck, start_worker
from router.text.jobs import Job, JobAnswer, Payload, WorkerSettings, too_costly

SMALL_JOB = 1 << 16  # largest payload in the lane of small jobs, in bytes
WORKERS = 2  # in each lane
MAX_WAITING = 1024  # jobs of a lane that wait for a worker
MAX_WAITING_BYTES = 128 << 20  # limit for the payloads of waiting jobs
SMALL_SECONDS = 4.0  # limit for a small job's wait for a worker, and for its run; then the worker is killed
LARGE_SECONDS = 30.0
LARGE_NICE = 10  # large jobs leave the processors to the router, to small jobs and to nodes on CPUs
RESTART_SECONDS = 1.0  # between attempts to start a worker
MAX_ANSWER_BYTES = 32 << 20  # in addition to the payload of the job
# A worker ended by one of these ran out of CPU time or memory: Rust aborts if an allocation fails.
OVER_LIMITS = {
    -signal.SIGPROF,
    -signal.SIGABRT,
    -signal.SIGSEGV,
    -signal.SIGBUS,
    -signal.SIGTRAP,
    -signal.SIGILL,
}
BUSY = "the texts of other requests keep this router busy; try again later"
Start = Callable[[], Coroutine[Any, Any, TextChannel]]


class WorkerLane:
    """Worker processes that run one job at a time each, and the queue of jobs that wait for them."""

    def __init__(self, start: Start, seconds: float, log: Log) -> None:
        """`seconds`: how long a job may wait for a worker, and then how long the worker may take."""
        self._start = start
        self._seconds = seconds
        self._log = log
        self._idle: list[TextChannel] = []
        self._all: set[TextChannel] = set()
        self._waiting: dict[asyncio.Future[TextChannel], None] = {}  # in order of arrival
        self._waiting_bytes = 0
        self._starts: set[asyncio.Task[None]] = set()
        self._closed = False

    async def open(self) -> None:
        """Start the workers and return when the first one is ready. Raises ModelError or InternalError."""
        self._add(await self._start())
        for _ in range(WORKERS - 1):
            self._start_another()

    async def run(self, job: Job, payload: Payload) -> JobAnswer:
        """Run a job. Raises Overloaded, or InvalidRequest if the job exceeds the CPU time or memory of a worker."""
        for _ in range(2):
            worker = await self._take(len(payload))
            answer = worker.ask(job, payload, self._seconds)
            # Shielded: if the client disconnects, the worker finishes the job and stays usable.
            answer.add_done_callback(partial(self._done, worker))
            try:
                return await asyncio.shield(answer)
            except WorkerStuck as error:
                self._log.warning(
                    "a text worker did not answer in time and was killed", seconds=self._seconds
                )
                raise Overloaded(BUSY) from error
            except WorkerEnded as error:
                if await worker.exit_code() in OVER_LIMITS:
                    message, param = too_costly(job)
                    raise InvalidRequest(message, param=param) from error
            # Something else ended the worker, not the job: retry once.
        raise InternalError("two text workers in a row ended while they worked on this request")

    async def close(self) -> None:
        self._closed = True
        for task in self._starts:
            task.cancel()
        await asyncio.gather(*self._starts, return_exceptions=True)
        await asyncio.gather(*(worker.end() for worker in list(self._all)))

    async def _take(self, size: int) -> TextChannel:
        """Wait for an idle worker, in order of arrival. Raises Overloaded."""
        if self._idle:
            return self._idle.pop()
        if len(self._waiting) >= MAX_WAITING or self._waiting_bytes + size > MAX_WAITING_BYTES:
            raise Overloaded(BUSY)
        turn: asyncio.Future[TextChannel] = asyncio.get_running_loop().create_future()
        self._waiting[turn] = None
        self._waiting_bytes += size
        try:
            async with asyncio.timeout(self._seconds):
                return await turn
        except BaseException as error:
            if turn.done() and not turn.cancelled():
                self._give(turn.result())
            if isinstance(error, TimeoutError):
                raise Overloaded(BUSY) from None
            raise
        finally:
            self._waiting_bytes -= size
            self._waiting.pop(turn, None)

    def _done(self, worker: TextChannel, answer: asyncio.Future[JobAnswer]) -> None:
        if answer.cancelled() or answer.exception() is None:
            self._give(worker)

    def _give(self, worker: TextChannel) -> None:
        if worker.ended:
            return
        while self._waiting:
            turn = next(iter(self._waiting))
            del self._waiting[turn]
            if not turn.done():
                turn.set_result(worker)
                return
        self._idle.append(worker)

    def _add(self, worker: TextChannel) -> None:
        self._all.add(worker)
        worker.on_end(partial(self._replace, worker))
        self._give(worker)

    def _replace(self, worker: TextChannel) -> None:
        self._all.discard(worker)
        if worker in self._idle:
            self._idle.remove(worker)
        if not self._closed:
            self._start_another()

    def _start_another(self) -> None:
        task = asyncio.get_running_loop().create_task(self._keep_starting())
        self._starts.add(task)
        task.add_done_callback(self._starts.discard)

    async def _keep_starting(self) -> None:
        while True:
            try:
                self._add(await self._start())
                return
            except TandemError as error:
                self._log.error("a text worker cannot be started", reason=str(error))
                await asyncio.sleep(RESTART_SECONDS)


class TextPool:
    """Runs jobs in worker processes of one model."""

    def __init__(
        self,
        spawner: Spawner,
        path: Path,
        max_body_bytes: int,
        log: Log,
        manifest: Path | None = None,
        template: Path | None = None,
    ) -> None:
        """Prepare the workers; none is started.

        Args:
            manifest: checksum list of the files in `path`; None skips the check.
            template: file with a chat template that replaces the model's own.
        """
        listed = None if manifest is None else str(manifest)
        given = None if template is None else str(template)
        small = WorkerSettings(
            str(path), max_body_bytes + MAX_ANSWER_BYTES, manifest=listed, chat_template=given
        )
        large = msgspec.structs.replace(small, nice=LARGE_NICE)
        self._small = WorkerLane(partial(start_worker, spawner, small), SMALL_SECONDS, log)
        self._large = WorkerLane(partial(start_worker, spawner, large), LARGE_SECONDS, log)

    async def start(self) -> None:
        """Start both lanes. Raises ModelError if the workers cannot read the model directory."""
        opened = await asyncio.gather(self._small.open(), self._large.open(), return_exceptions=True)
        for error in opened:
            if error is not None:
                await self.close()
                raise error

    async def run(self, job: Job, payload: Payload) -> JobAnswer:
        """Run a job. Raises Overloaded if too many wait, and InvalidRequest if it takes too much time or memory."""
        lane = self._small if len(payload) <= SMALL_JOB else self._large
        return await lane.run(job, payload)

    async def close(self) -> None:
        await self._small.close()
        await self._large.close()
