"""The router's end of the spawn process, which starts all of its other child processes (spawn_process.py)."""

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

from router.process.child_process import START_BYTES, START_SECONDS
from router.process.spawn_process import Ended, Kill, Start, Started

PROGRAM = ("-m", "router.process.spawn_process")
END_SECONDS = 10.0  # how long to wait for the end of a process that was killed or closed its channel
OWN_END_SECONDS = 0.5  # how long a process that has closed its channel may take to end before it is killed
_answers: msgspec.msgpack.Decoder[Started | Ended] = msgspec.msgpack.Decoder(Started | Ended)
_encode = msgspec.msgpack.encode


def ending(code: int) -> str:
    """Say how a process has ended that nobody here has killed, and where to look."""
    if code >= 0:
        return f"it ended with exit code {code}"
    if code == -signal.SIGKILL:
        return "it was killed (SIGKILL), as the kernel does where memory runs out: see `dmesg`"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"it was ended by {name}; libraries end so, too, if they need more memory than such a process may have"


class Child:
    """A process that a Spawner started."""

    def __init__(self, spawner: Spawner, number: int) -> None:
        self._spawner = spawner
        self._number = number
        self._killed = False
        self._printed = ""
        self.started: Future[int] = asyncio.get_running_loop().create_future()
        self._ended: Future[int] = asyncio.get_running_loop().create_future()

    @property
    def pid(self) -> int:
        return self.started.result()

    @property
    def returncode(self) -> int | None:
        """None while the process runs; -N if signal N killed it."""
        return self._ended.result() if self._ended.done() else None

    def kill(self) -> None:
        """Send SIGKILL; does nothing if the process has ended."""
        self._killed = True
        self._spawner.send(Kill(self._number))

    async def wait(self) -> int:
        """Wait for the end and return the exit code; -SIGKILL if no end is reported for END_SECONDS."""
        try:
            async with asyncio.timeout(END_SECONDS):
                return await asyncio.shield(self._ended)
        except TimeoutError:
            return -signal.SIGKILL

    async def failure(self, error: Exception) -> str:
        """Return why the process was not ready in time, in words for an operator; it has ended then.

        That is how it has ended by itself and what it printed, or `error` if it had to be killed.
        """
        try:
            async with asyncio.timeout(OWN_END_SECONDS):
                await asyncio.shield(self._ended)
        except TimeoutError:
            self.kill()
        code = await self.wait()
        how = (str(error) or "it was not ready in time") if self._killed else ending(code)
        return f"{how}; {f'it printed: {self._printed.strip()}' if self._printed else 'it printed nothing'}"

    def end(self, code: int, problem: str = "it has ended", printed: str = "") -> None:
        """Record that the process has ended, or that it could not be started because of `problem`."""
        self._printed = printed
        if not self.started.done():
            self.started.set_exception(OSError(problem))
            # Marks it as retrieved: the caller that awaited it may have been cancelled.
            self.started.exception()
        self._ended.set_result(code)


class Spawner:
    """Starts processes without blocking the event loop: only the start of the spawn process itself forks the router."""

    def __init__(self, program: Sequence[str] = PROGRAM) -> None:
        self._program = tuple(program)
        self._turn = asyncio.Lock()
        self._process: Process | None = None
        self._socket: socket.socket | None = None
        self._numbers = itertools.count(1)
        self._children: dict[int, Child] = {}

    @property
    def pid(self) -> int | None:
        """The spawn process; None before the first one was started."""
        return None if self._process is None else self._process.pid

    async def open(self) -> None:
        """Start the spawn process unless it runs. Raises OSError."""
        async with self._turn:
            if self._socket is not None:
                return
            ours: socket.socket | None = None
            try:
                ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                with theirs:
                    self._process = await asyncio.create_subprocess_exec(
                        sys.executable, *self._program, stdin=theirs.fileno()
                    )
            except OSError as error:
                if ours is not None:
                    ours.close()
                reason = error.strerror or error
                raise OSError(f"the spawn process cannot be started: {reason}") from error
            ours.setblocking(False)
            self._socket = ours
            asyncio.get_running_loop().add_reader(ours, self._read)

    async def start(
        self,
        arguments: Sequence[str],
        environment: Mapping[str, str] | None = None,
        answers: bool = False,
        discard_output: bool = False,
    ) -> tuple[Child, socket.socket]:
        """Run Python with these arguments and a socket as standard input. Return the process and the other end.

        Raises OSError, also if no descriptor is left.

        Args:
            environment: variables in addition to those of this process.
            answers: make the socket standard output, too.
            discard_output: keep what the process prints out of the log; it is then seen only in `Child.failure`.
        """
        await self.open()
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                child = await self._started(theirs, arguments, environment or {}, answers, discard_output)
        except BaseException:
            ours.close()
            raise
        return child, ours

    async def _started(
        self,
        channel: socket.socket,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        answers: bool,
        discard_output: bool,
    ) -> Child:
        number = next(self._numbers)
        child = self._children[number] = Child(self, number)
        asked = Start(number, tuple(arguments), dict(environment), answers, discard_output)
        try:
            self.send(asked, channel)
            async with asyncio.timeout(START_SECONDS):
                await asyncio.shield(child.started)
        except TimeoutError as error:
            self._replace()
            raise OSError("the spawn process did not answer") from error
        except OSError:
            # Nobody reports the end of a process that was not asked for.
            self._children.pop(number, None)
            raise
        except asyncio.CancelledError:
            child.kill()
            raise
        return child

    async def close(self) -> None:
        """End the spawn process. The processes that it started keep running."""
        self._replace()
        if self._process is not None:
            await self._process.wait()

    def send(self, message: Start | Kill, channel: socket.socket | None = None) -> None:
        """Send a message. Raises OSError if a Start cannot be sent; drops a Kill if the spawn process has ended."""
        if self._socket is None:
            if isinstance(message, Start):
                raise ConnectionResetError("the spawn process has ended")
            return
        descriptors = [] if channel is None else [channel.fileno()]
        try:
            socket.send_fds(self._socket, [_encode(message)], descriptors)
        except BlockingIOError:
            # The process has left hundreds of messages unread: it hangs.
            self._replace()
        except (BrokenPipeError, ConnectionResetError):
            self._lose()

    def _read(self) -> None:
        """Handle the messages of the spawn process, and its end."""
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
            child.end(answer.code, printed=answer.printed)
        elif answer.problem:
            del self._children[answer.number]
            child.end(-signal.SIGKILL, answer.problem)
        else:
            child.started.set_result(answer.pid)

    def _replace(self) -> None:
        """Kill the spawn process, which may hang. The next start launches a new one."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
        self._lose()

    def _lose(self) -> None:
        """Drop the spawn process. Its children run until their channels close; they are reported as killed now."""
        if self._socket is None:
            return
        asyncio.get_running_loop().remove_reader(self._socket)
        self._socket.close()
        self._socket = None
        for child in self._children.values():
            child.end(-signal.SIGKILL, "the spawn process has ended")
        self._children.clear()
