"""The router's end of one text worker: its process, its socket and its current job."""

from __future__ import annotations

import asyncio
from asyncio import Future
from collections.abc import Callable
from typing import cast

from common.errors import InternalError, ModelError, ProtocolError
from common.messages.wire import InboxCodec
from router.process.child_process import START_SECONDS, frame_head
from router.process.spawner import OWN_END_SECONDS, Child, Spawner
from router.text.jobs import Job, JobAnswer, JobResult, Payload, WorkerSettings

PROGRAM = ("-m", "router.text.process")
ENVIRONMENT = {"TOKENIZERS_PARALLELISM": "false"}  # a worker has one thread
JOIN = 1 << 16  # bytes; the head and a payload up to this size are written at once
MAX_HEAD = 1 << 20
GRACE_SECONDS = 0.5
_answers = InboxCodec[JobResult](JobResult, "answers")


class WorkerEnded(Exception):
    """The process ended before it answered."""

    def __init__(self) -> None:
        super().__init__("it closed its channel before it answered")


class WorkerStuck(Exception):
    """The process did not answer in time and was killed."""

    def __init__(self) -> None:
        super().__init__("it did not answer in time")


class TextChannel(asyncio.Protocol):
    """One worker process and the channel to it, created by `start_worker`. It runs one job at a time."""

    def __init__(self, max_answer_bytes: int) -> None:
        self._max_answer_bytes = max_answer_bytes
        self._loop = asyncio.get_running_loop()
        self._process: Child | None = None
        self._transport: asyncio.Transport | None = None
        self._answer: Future[JobAnswer] | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self._received = bytearray()
        self._on_end: Callable[[], None] = lambda: None
        self.ended = False

    def ask(self, job: Job | WorkerSettings, payload: Payload, seconds: float) -> Future[JobAnswer]:
        """Send a job and return its answer; it raises WorkerEnded, or WorkerStuck after `seconds` + GRACE_SECONDS."""
        assert self._answer is None, "a worker takes one job at a time"
        answer = self._answer = self._loop.create_future()
        if self.ended or self._transport is None:
            self._settle(WorkerEnded())
            return answer
        head = frame_head(job, len(payload))
        self._deadline = self._loop.call_later(seconds, self._expire)
        if len(payload) <= JOIN:
            self._transport.write(head + payload)
        else:  # joining would copy a large payload
            self._transport.write(head)
            self._transport.write(payload)
        return answer

    def on_end(self, callback: Callable[[], None]) -> None:
        """Call `callback` once when the process has closed its socket; immediately if it already has."""
        self._on_end = callback
        if self.ended:
            callback()

    async def exit_code(self) -> int:
        """Return the exit code of an ended process; -N if signal N killed it."""
        assert self._process is not None
        return await self._process.wait()

    async def end(self) -> None:
        self._kill()
        if self._transport is not None:
            self._transport.close()
        if self._process is not None:
            await asyncio.shield(self._process.wait())

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's transport is not a subclass

    def data_received(self, data: bytes) -> None:
        received = self._received
        received += data
        if len(received) < 8:
            return
        head_bytes = int.from_bytes(received[:4], "little")
        payload_bytes = int.from_bytes(received[4:8], "little")
        if head_bytes > MAX_HEAD or payload_bytes > self._max_answer_bytes:
            self._kill()  # compromised: a sound worker never sends this
            return
        if len(received) < 8 + head_bytes + payload_bytes:
            return
        try:
            head = _answers.decode(memoryview(received)[8 : 8 + head_bytes])
        except ProtocolError:
            self._kill()
            return
        self._received = bytearray()
        del received[: 8 + head_bytes]
        self._settle((head, received))

    def connection_lost(self, error: Exception | None) -> None:
        self.ended = True
        # It may have closed its socket without ending. Killed at once, it could not show how it ends by itself.
        self._loop.call_later(OWN_END_SECONDS, self._kill)
        self._settle(WorkerEnded())
        self._on_end()

    def _expire(self) -> None:
        # If the router itself stalled, the answer may already be in the socket: read it before giving up.
        self._deadline = self._loop.call_later(GRACE_SECONDS, self._give_up)

    def _give_up(self) -> None:
        self._kill()
        self._settle(WorkerStuck())

    def _kill(self) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
        if self._transport is not None:
            self._transport.abort()

    def _settle(self, outcome: JobAnswer | Exception) -> None:
        answer, self._answer = self._answer, None
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        if answer is None or answer.done():
            return
        if isinstance(outcome, Exception):
            answer.set_exception(outcome)
        else:
            answer.set_result(outcome)


async def start_worker(
    spawner: Spawner, settings: WorkerSettings, program: tuple[str, ...] = PROGRAM
) -> TextChannel:
    """Start a worker that is ready for jobs. Raises ModelError if it cannot read the model, otherwise InternalError."""
    channel = TextChannel(settings.max_answer_bytes)
    try:
        # A library that prints something for every malicious text must not fill the router's log.
        channel._process, ours = await spawner.start(program, ENVIRONMENT, discard_output=True)
        try:
            await asyncio.get_running_loop().create_connection(lambda: channel, sock=ours)
        except BaseException:
            ours.close()
            raise
        answer, _ = await channel.ask(settings, b"", START_SECONDS)
    except (OSError, WorkerEnded, WorkerStuck) as error:
        try:
            reason = str(error) if channel._process is None else await channel._process.failure(error)
        finally:
            await channel.end()
        raise InternalError(f"a text worker cannot be started: {reason}") from error
    except BaseException:
        await channel.end()
        raise
    if answer.error:
        await channel.end()
        raise ModelError(answer.message)
    return channel
