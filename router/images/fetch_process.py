"""Fetches images in a child process, so that a malformed response can crash only that process.

    python -m router.images.fetch_process      its standard input is a socket to the router; it runs until that closes

The router sends `FetchSettings` first, which the process answers with a `Fetched` once it is ready, and then one
`Wanted` per image; answers come in any order. The process applies all rules of `fetch.py`. The router asks only
for addresses that these rules allow.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
import traceback
from asyncio import Future, StreamReader, StreamWriter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import msgspec

from common.errors import InvalidRequest, Overloaded, ProtocolError
from common.messages.wire import InboxCodec
from router.images.fetch import ImageFetcher
from router.process.child_process import START_SECONDS, confine, framed, read_frame
from router.process.spawner import Child, Spawner

ADDRESS_SPACE = 2 << 30  # bytes
OPEN_FILES = 256
AT_ONCE = 32  # images being fetched, each with a thread to look up its host; further requests are refused
GRACE_SECONDS = 5.0  # added to the timeout of an image before the process counts as hung
HEAD = 1 << 16  # bytes of a frame besides the image
FAILED = "the image cannot be fetched now: the process that fetches images"
PROGRAM = ("-m", "router.images.fetch_process")


class FetchSettings(msgspec.Struct, frozen=True, array_like=True):
    """The parameters of an ImageFetcher."""

    hosts: tuple[str, ...]
    max_bytes: int
    timeout: float


class Wanted(msgspec.Struct, frozen=True, array_like=True):
    """Asks for one image."""

    number: int
    address: str


class Fetched(msgspec.Struct, frozen=True, array_like=True):
    """The answer to one `Wanted`: success unless `problem` or `defect` is set."""

    number: int
    data: bytes = b""
    problem: str = ""  # an error message for the client
    defect: str = ""  # a traceback of a bug of ours, for the log


_settings = msgspec.msgpack.Decoder(FetchSettings)
_wanted = msgspec.msgpack.Decoder(Wanted)
_fetched = InboxCodec[Fetched](Fetched, "images")


class _ProcessEnded(Overloaded):
    """The process ended while it fetched the image."""


class FetchProcess:
    """The router's end. It starts the process when it is first needed, and again after it has died."""

    def __init__(
        self,
        spawner: Spawner,
        hosts: Sequence[str],
        max_bytes: int,
        timeout: float,
        program: Sequence[str] = PROGRAM,
    ) -> None:
        self._spawner = spawner
        self._rules = ImageFetcher(hosts, max_bytes, timeout)
        self._settings = FetchSettings(tuple(hosts), max_bytes, timeout)
        self._program = tuple(program)
        self.seconds = timeout + GRACE_SECONDS
        self._child: _Child | None = None
        self._turn = asyncio.Lock()

    @property
    def pid(self) -> int | None:
        """Process id of the child; None before the first fetch, and after the child has ended."""
        return None if self._child is None or self._child.ended else self._child.process.pid

    @property
    def under_way(self) -> int:
        """Number of fetches that the child has not answered, with those that nobody waits for any more."""
        return 0 if self._child is None else len(self._child.waiting)

    async def fetch(self, address: str) -> bytes:
        """Return the bytes of an image.

        Raises InvalidRequest. Raises Overloaded while too many images are being fetched, or if the process fails.
        """
        self._rules.check(address)
        try:
            fetched = await self._ask(address)
        except _ProcessEnded:
            # Nobody knows which of the images has ended it, if any did: once more.
            fetched = await self._ask(address)
        if fetched.defect:
            raise RuntimeError(f"the image fetch process failed:\n{fetched.defect}")
        if fetched.problem:
            raise InvalidRequest(fetched.problem)
        return fetched.data

    async def close(self) -> None:
        async with self._turn:
            if self._child is not None:
                await self._child.end()

    async def _ask(self, address: str) -> Fetched:
        """Request one image. Raises Overloaded; _ProcessEnded if the process ends before it answers."""
        child = await self._running()
        try:
            async with asyncio.timeout(self.seconds):
                return await child.ask(address)
        except TimeoutError as error:
            await child.end()
            raise Overloaded(f"{FAILED} does not answer; try again later") from error
        except OSError as error:
            raise _ProcessEnded(f"{FAILED} has ended; try again later") from error

    async def _running(self) -> _Child:
        async with self._turn:
            if self._child is None or self._child.ended:
                self._child = await _start(self._spawner, self._program, self._settings)
            return self._child


class _Child:
    """One child process and the images requested from it."""

    def __init__(self, process: Child, reader: StreamReader, writer: StreamWriter, most: int) -> None:
        self.process = process
        self._reader = reader
        self._writer = writer
        self._most = most  # largest frame, in bytes
        self._numbers = itertools.count(1)
        self.waiting: dict[int, Future[Fetched]] = {}  # includes abandoned requests until they are answered
        self.ended = False
        self._listener = asyncio.create_task(self._listen())

    async def ask(self, address: str) -> Fetched:
        """Request one image. Raises OSError if the process ends before it answers."""
        if self.ended:
            raise ConnectionResetError("the image fetch process has ended")
        if len(self.waiting) >= AT_ONCE:
            raise Overloaded(f"{AT_ONCE} images are being fetched already; try again later")
        number = next(self._numbers)
        answer: Future[Fetched] = asyncio.get_running_loop().create_future()
        self.waiting[number] = answer
        # needs no drain: small, and at most AT_ONCE of them
        self._writer.write(framed(Wanted(number, address)))
        return await answer

    async def end(self) -> None:
        self.process.kill()
        await asyncio.shield(self._listener)

    async def _listen(self) -> None:
        try:
            while True:
                fetched = _fetched.decode(await read_frame(self._reader, self._most))
                answer = self.waiting.pop(fetched.number, None)
                if answer is not None and not answer.done():
                    answer.set_result(fetched)
        except (OSError, EOFError, ProtocolError) as error:
            self.ended = True
            for answer in self.waiting.values():
                if not answer.done():
                    answer.set_exception(ConnectionResetError(f"the image fetch process has ended: {error}"))
        finally:
            self._writer.close()
            await _end(self.process)


async def _start(spawner: Spawner, program: tuple[str, ...], settings: FetchSettings) -> _Child:
    """Start a process and wait until it is ready.

    Raises Overloaded if it cannot be started, as for lack of memory, and RuntimeError, for the log, if it is not ready.
    """
    try:
        process, ours = await spawner.start(program)
    except OSError as error:
        raise Overloaded(f"{FAILED} cannot be started: {error}; try again later") from error
    async with contextlib.AsyncExitStack() as undo:
        undo.callback(ours.close)
        undo.push_async_callback(_end, process)
        try:
            reader, writer = await asyncio.open_connection(sock=ours)
            undo.callback(writer.close)
            writer.write(framed(settings))
            async with asyncio.timeout(START_SECONDS):
                await read_frame(reader, HEAD)
        except (OSError, EOFError, TimeoutError, ProtocolError) as error:
            reason = await process.failure(error)
            raise RuntimeError(f"cannot start the image fetch process: {reason}") from error
        undo.pop_all()
    return _Child(process, reader, writer, settings.max_bytes + HEAD)


async def _end(process: Child) -> None:
    process.kill()
    await process.wait()


async def serve(channel: socket.socket) -> None:
    """Run the child's end of the channel. Returns when the router closes its end."""
    reader, writer = await asyncio.open_connection(sock=channel)
    settings = _settings.decode(await read_frame(reader, 1 << 20))
    fetcher = ImageFetcher(settings.hosts, settings.max_bytes, settings.timeout)
    turn = asyncio.Lock()
    # The default has as many as there are cores and four: on few cores one slow lookup would hold up other images.
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(AT_ONCE, "lookup"))

    async def send(fetched: Fetched) -> None:
        async with turn:  # holds at most one image besides the socket's buffer
            writer.write(framed(fetched))
            await writer.drain()

    async def answer(wanted: Wanted) -> None:
        try:
            fetched = Fetched(wanted.number, await fetcher.fetch(wanted.address))
        except InvalidRequest as error:
            fetched = Fetched(wanted.number, problem=str(error))
        except Exception:  # a bug of ours: the router must not wait for an answer
            fetched = Fetched(wanted.number, defect=traceback.format_exc()[-HEAD // 2 :])
        await send(fetched)

    await send(Fetched(0))
    try:
        async with asyncio.TaskGroup() as group:
            while True:
                group.create_task(answer(_wanted.decode(await read_frame(reader, HEAD))))
    except* (OSError, EOFError):  # fetches in progress are abandoned
        writer.close()


def main() -> None:
    confine(ADDRESS_SPACE, OPEN_FILES)
    asyncio.run(serve(socket.socket(fileno=0)))


if __name__ == "__main__":
    main()
