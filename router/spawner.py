"""The router's end of the process that starts all of its other processes (spawn_process.py)."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import signal
import socket
import sys
from asyncio import Future
from asyncio.subprocess import Process
from collections.abc import Mapping, Sequence

import msgspec

from common.errors import InternalError
from router.child_process import START_BYTES, START_SECONDS
from router.spawn_process import Ended, Kill, Start, Started

PROGRAM = ("-m", "router.spawn_process")
END_SECONDS = 10.0  # until the end of a process is reported: it was killed, or has closed its channel
_answers: msgspec.msgpack.Decoder[Started | Ended] = msgspec.msgpack.Decoder(Started | Ended)
_encode = msgspec.msgpack.encode


class Child:
    """A process that a Spawner started."""

    def __init__(self, spawner: Spawner, number: int) -> None:
        self._spawner = spawner
        self._number = number
        self.started: Future[int] = asyncio.get_running_loop().create_future()
        self._ended: Future[int] = asyncio.get_running_loop().create_future()

    @property
    def pid(self) -> int:
        return self.started.result()

    @property
    def returncode(self) -> int | None:
        """None while it runs; -N: ended by signal N."""
        return self._ended.result() if self._ended.done() else None

    def kill(self) -> None:
        """SIGKILL; nothing if it has ended."""
        self._spawner.tell(Kill(self._number))

    async def wait(self) -> int:
        """The return code, once it has ended; that of a killed process if nothing is heard for END_SECONDS."""
        try:
            async with asyncio.timeout(END_SECONDS):
                return await asyncio.shield(self._ended)
        except TimeoutError:
            return -signal.SIGKILL

    def end(self, code: int, problem: str = "it has ended") -> None:
        """It has ended, or was never started for this problem."""
        if not self.started.done():
            self.started.set_exception(OSError(problem))
            # Whoever waited for it may have left: then nobody else asks.
            self.started.exception()
        self._ended.set_result(code)


class Spawner:
    """Starts processes without holding the event loop: only the first start, and one after a death, takes a fork."""

    def __init__(self, program: Sequence[str] = PROGRAM) -> None:
        self._program = tuple(program)
        self._turn = asyncio.Lock()
        self._process: Process | None = None
        self._socket: socket.socket | None = None
        self._numbers = itertools.count(1)
        self._children: dict[int, Child] = {}

    async def open(self) -> None:
        """Start the process that starts others, unless it runs. Raises InternalError."""
        async with self._turn:
            if self._socket is not None:
                return
            try:
                ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                with theirs:
                    self._process = await asyncio.create_subprocess_exec(
                        sys.executable, *self._program, stdin=theirs.fileno()
                    )
            except OSError as error:
                raise InternalError(f"the process that starts others cannot be started: {error}") from error
            ours.setblocking(False)
            self._socket = ours
            asyncio.get_running_loop().add_reader(ours, self._read)

    async def start(
        self,
        arguments: Sequence[str],
        channel: socket.socket,
        environment: Mapping[str, str] | None = None,
        answers: bool = False,
        quiet: bool = False,
    ) -> Child:
        """Run Python with these arguments and `channel` as standard input. Raises OSError or InternalError.

        Args:
            environment: variables beside this process's own.
            answers: `channel` is standard output, too.
            quiet: what the process prints goes to /dev/null.
        """
        await self.open()
        number = next(self._numbers)
        child = self._children[number] = Child(self, number)
        asked = Start(number, tuple(arguments), dict(environment or {}), answers, quiet)
        try:
            self.tell(asked, channel)
            async with asyncio.timeout(START_SECONDS):
                await asyncio.shield(child.started)
        except TimeoutError as error:
            self._replace()
            raise OSError("the process that starts others did not answer") from error
        except asyncio.CancelledError:
            child.kill()
            raise
        return child

    async def close(self) -> None:
        """End the process that starts others; what it started notices nothing."""
        self._replace()
        if self._process is not None:
            await self._process.wait()

    def tell(self, message: Start | Kill, channel: socket.socket | None = None) -> None:
        """Raises OSError for a Start that cannot be sent. A Kill after the end of the process does nothing."""
        if self._socket is None:
            if isinstance(message, Start):
                raise ConnectionResetError("the process that starts others has ended")
            return
        descriptors = [] if channel is None else [channel.fileno()]
        try:
            socket.send_fds(self._socket, [_encode(message)], descriptors)
        except BlockingIOError:
            # It has not read for hundreds of messages.
            self._replace()
        except (BrokenPipeError, ConnectionResetError):
            self._lose()

    def _read(self) -> None:
        """Messages of the process; at its end its children are given up."""
        while self._socket is not None:
            try:
                message = self._socket.recv(START_BYTES)
            except BlockingIOError:
                return
            except OSError:
                message = b""
            if not message:
                self._lose()
                return
            self._take(_answers.decode(message))

    def _take(self, answer: Started | Ended) -> None:
        child = self._children[answer.number]
        if isinstance(answer, Ended):
            del self._children[answer.number]
            child.end(answer.code)
        elif answer.problem:
            del self._children[answer.number]
            child.end(-signal.SIGKILL, answer.problem)
        else:
            child.started.set_result(answer.pid)

    def _replace(self) -> None:
        """End the process, which may hang. The next start begins with a new one."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
        self._lose()

    def _lose(self) -> None:
        """The process has ended, or is to. What it started runs until its channel closes; nobody can wait for it."""
        if self._socket is None:
            return
        asyncio.get_running_loop().remove_reader(self._socket)
        self._socket.close()
        self._socket = None
        for child in self._children.values():
            child.end(-signal.SIGKILL, "the process that starts others has ended")
        self._children.clear()
