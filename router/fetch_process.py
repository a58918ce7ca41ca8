"""Fetches images in a process of its own: what a host answers is parsed where it can end that process alone.

    python -m router.fetch_process      the router's socket as standard input, until it closes

Frames: `Settings` first, answered by a `Fetched` once it is ready; then a `Wanted` for every image, answered in any
order. The process applies all rules (image_fetch.py); the router asks it for nothing that they refuse by the address.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
import sys
import traceback
from asyncio import Future, StreamReader, StreamWriter
from asyncio.subprocess import Process
from collections.abc import Sequence

import msgspec

from common.errors import InternalError, InvalidRequest, Overloaded, ProtocolError
from router.child_process import START_SECONDS, confine, framed, read_frame
from router.image_fetch import UNREACHABLE, ImageFetcher

ADDRESS_SPACE = 2 << 30  # bytes
OPEN_FILES = 256
AT_ONCE = 32  # images on their way; more are refused
GRACE_SECONDS = 5.0  # beyond the time that an image may take: then the process is taken for hung
HEAD = 1 << 16  # bytes of a frame beside the image
PROGRAM = ("-m", "router.fetch_process")


class Settings(msgspec.Struct, frozen=True, array_like=True):
    """Of an ImageFetcher."""

    hosts: tuple[str, ...]
    max_bytes: int
    timeout: float


class Wanted(msgspec.Struct, frozen=True, array_like=True):
    """An image to fetch."""

    number: int
    address: str


class Fetched(msgspec.Struct, frozen=True, array_like=True):
    """Without a problem or a defect it is here."""

    number: int
    data: bytes = b""
    problem: str = ""  # for the client
    defect: str = ""  # of ours: a traceback for the log


_settings = msgspec.msgpack.Decoder(Settings)
_wanted = msgspec.msgpack.Decoder(Wanted)
_fetched = msgspec.msgpack.Decoder(Fetched)


class FetchProcess:
    """The router's end. The process is started when it is needed and again when it died."""

    def __init__(
        self, hosts: Sequence[str], max_bytes: int, timeout: float, program: Sequence[str] = PROGRAM
    ) -> None:
        self._rules = ImageFetcher(hosts, max_bytes, timeout)
        self._settings = Settings(tuple(hosts), max_bytes, timeout)
        self._program = tuple(program)
        self._seconds = timeout + GRACE_SECONDS
        self._child: _Child | None = None
        self._turn = asyncio.Lock()

    async def fetch(self, address: str) -> bytes:
        """Raises InvalidRequest, or Overloaded while too many are on their way."""
        self._rules.check(address)
        child = await self._running()
        try:
            async with asyncio.timeout(self._seconds):
                fetched = await child.ask(address)
        except TimeoutError as error:
            await child.end()
            raise InvalidRequest(UNREACHABLE) from error
        except OSError as error:
            raise InvalidRequest(UNREACHABLE) from error
        if fetched.defect:
            raise RuntimeError(f"the process that fetches images failed:\n{fetched.defect}")
        if fetched.problem:
            raise InvalidRequest(fetched.problem)
        return fetched.data

    async def close(self) -> None:
        async with self._turn:
            if self._child is not None:
                await self._child.end()

    async def _running(self) -> _Child:
        async with self._turn:
            if self._child is None or self._child.ended:
                self._child = await _start(self._program, self._settings)
            return self._child


class _Child:
    """One process, and the images that it is asked for."""

    def __init__(self, process: Process, reader: StreamReader, writer: StreamWriter, most: int) -> None:
        self._process = process
        self._reader = reader
        self._writer = writer
        self._most = most  # bytes of a frame
        self._numbers = itertools.count(1)
        self._waiting: dict[int, Future[Fetched]] = {}  # given-up ones too, until they are answered
        self.ended = False
        self._listener = asyncio.create_task(self._listen())

    async def ask(self, address: str) -> Fetched:
        """Raises OSError where the process ends before it answers."""
        if self.ended:
            raise ConnectionResetError("the process has ended")
        if len(self._waiting) >= AT_ONCE:
            raise Overloaded(f"{AT_ONCE} images are being fetched already; try again later")
        number = next(self._numbers)
        answer: Future[Fetched] = asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        self._writer.write(framed(Wanted(number, address)))  # short, and AT_ONCE at most
        return await answer

    async def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        await asyncio.shield(self._listener)

    async def _listen(self) -> None:
        try:
            while True:
                fetched = _fetched.decode(await read_frame(self._reader, self._most))
                answer = self._waiting.pop(fetched.number, None)
                if answer is not None and not answer.done():
                    answer.set_result(fetched)
        except (OSError, EOFError, ProtocolError, msgspec.DecodeError) as error:
            self.ended = True
            for answer in self._waiting.values():
                if not answer.done():
                    answer.set_exception(ConnectionResetError(f"the process has ended: {error}"))
        finally:
            self._writer.close()
            await _end(self._process)


async def _start(program: tuple[str, ...], settings: Settings) -> _Child:
    """Ready for addresses. Raises InternalError."""
    ours, theirs = socket.socketpair()
    async with contextlib.AsyncExitStack() as undo:
        undo.callback(ours.close)
        try:
            with theirs:
                process = await asyncio.create_subprocess_exec(
                    sys.executable, *program, stdin=theirs.fileno()
                )
            undo.push_async_callback(_end, process)
            reader, writer = await asyncio.open_connection(sock=ours)
            undo.callback(writer.close)
            writer.write(framed(settings))
            async with asyncio.timeout(START_SECONDS):
                await read_frame(reader, HEAD)
        except (OSError, EOFError, TimeoutError, ProtocolError) as error:
            raise InternalError(f"the process that fetches images cannot be started: {error}") from error
        undo.pop_all()
    return _Child(process, reader, writer, settings.max_bytes + HEAD)


async def _end(process: Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.kill()
    await process.wait()


async def serve(channel: socket.socket) -> None:
    """The other end. Returns when the router closes its own."""
    reader, writer = await asyncio.open_connection(sock=channel)
    settings = _settings.decode(await read_frame(reader, 1 << 20))
    fetcher = ImageFetcher(settings.hosts, settings.max_bytes, settings.timeout)
    turn = asyncio.Lock()

    async def say(fetched: Fetched) -> None:
        async with turn:  # one image at a time beside the socket's buffer
            writer.write(framed(fetched))
            await writer.drain()

    async def answer(wanted: Wanted) -> None:
        try:
            fetched = Fetched(wanted.number, await fetcher.fetch(wanted.address))
        except InvalidRequest as error:
            fetched = Fetched(wanted.number, problem=str(error))
        except Exception:  # a defect of ours: the router should not wait for it
            fetched = Fetched(wanted.number, defect=traceback.format_exc()[-HEAD // 2 :])
        await say(fetched)

    await say(Fetched(0))
    try:
        async with asyncio.TaskGroup() as group:
            while True:
                group.create_task(answer(_wanted.decode(await read_frame(reader, HEAD))))
    except* (OSError, EOFError):  # and what is on its way is given up
        writer.close()


def main() -> None:
    confine(ADDRESS_SPACE, OPEN_FILES)
    asyncio.run(serve(socket.socket(fileno=0)))


if __name__ == "__main__":
    main()
