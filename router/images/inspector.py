"""Decodes every image once in a child process, so that a malicious file can crash or exhaust only that process.

    python -m router.images.inspector      reads frames from standard input and writes verdicts to standard output

A request frame holds an `Inspection`, an answer an `ImageVerdict`. The first
`ImageVerdict` reports that the process is ready.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import traceback
from asyncio import StreamReader, StreamWriter
from collections.abc import AsyncIterator
from dataclasses import dataclass

import msgspec

from common.errors import InvalidRequest, Overloaded, ProtocolError
from common.image_files import decode_image
from common.messages.wire import InboxCodec
from common.process_entry import processor_seconds
from router.process.child_process import START_SECONDS, confine, framed, read_frame
from router.process.spawner import Child, Spawner

ADDRESS_SPACE = 2 << 30  # bytes
OPEN_FILES = 64
SECONDS = 3.0  # limit for decoding one image, without its wait for earlier ones
TURN_SECONDS = 30.0  # limit for that wait
VERDICT_BYTES = 1 << 16
PROGRAM = ("-m", "router.images.inspector")


class Inspection(msgspec.Struct, frozen=True, array_like=True):
    """One image as the client sent it."""

    media_type: str | None
    max_pixels: int
    data: bytes


class ImageVerdict(msgspec.Struct, frozen=True, array_like=True):
    """The result for one image: it decodes completely and within the limits unless `problem` or `defect` is set."""

    problem: str
    width: int = 0  # pixels, after EXIF rotation
    height: int = 0
    defect: str = ""  # a traceback of a bug of ours, for the log


_verdicts = InboxCodec[ImageVerdict](ImageVerdict, "verdicts")
_inspections = msgspec.msgpack.Decoder(Inspection)


@dataclass(frozen=True, slots=True)
class InspectorProcess:
    """A running inspection process and the channel to it."""

    child: Child
    reader: StreamReader
    writer: StreamWriter

    async def verdict(self) -> ImageVerdict:
        return _verdicts.decode(await read_frame(self.reader, VERDICT_BYTES))

    async def failure(self, error: Exception) -> str:
        """Return why it was not ready; it has ended then."""
        try:
            return await asyncio.shield(self.child.failure(error))
        finally:
            self.writer.close()


class _Killed(InvalidRequest):
    """SIGKILL has ended the process, which no image causes by itself."""


class _Starved(Overloaded):
    """The process had a processor for less than half of its time: it was stopped, or the host is overloaded."""


class ImageInspector:
    """The router's end. It handles one image at a time and starts the process when needed, and again if it died."""

    def __init__(self, spawner: Spawner, max_pixels: int, seconds: float = SECONDS) -> None:
        self._spawner = spawner
        self._max_pixels = max_pixels
        self.seconds = seconds
        self._process: InspectorProcess | None = None
        # Held by the check in progress.
        self.turn = asyncio.Lock()

    @property
    def pid(self) -> int | None:
        """The inspecting process; None while there is none."""
        return None if self._process is None else self._process.child.pid

    async def check(self, data: bytes, media_type: str | None) -> tuple[int, int]:
        """Return (width, height) in pixels.

        Raises InvalidRequest, which says what is wrong with the image, or Overloaded.
        """
        frame = framed(Inspection(media_type, self._max_pixels, data))
        async with self._next():
            try:
                verdict = await self._ask(frame)
            except (_Killed, _Starved):
                # Perhaps the host ran out of memory or time: once more, before the image is taken for the cause.
                verdict = await self._ask(frame)
        if verdict.defect:
            raise RuntimeError(f"the image inspection process failed:\n{verdict.defect}")
        if verdict.problem:
            raise InvalidRequest(verdict.problem)
        return verdict.width, verdict.height

    async def _ask(self, frame: bytes) -> ImageVerdict:
        """Return the verdict on one image.

        Raises InvalidRequest; _Killed if somebody killed the process meanwhile, _Starved if it could not run.
        """
        process = await self._running()
        used_before = processor_seconds(process.child.pid)
        try:
            async with asyncio.timeout(self.seconds):
                process.writer.write(frame)
                await process.writer.drain()
                return await process.verdict()
        except (OSError, EOFError, TimeoutError, ProtocolError) as error:
            late = isinstance(error, TimeoutError)
            ended = isinstance(error, OSError | EOFError) and not late
            used = processor_seconds(process.child.pid) - used_before
            code = await self._end()
            if late and used < self.seconds / 2:
                raise _Starved("the image decoder could not run; try again later") from error
            raise (_Killed if ended and code == -signal.SIGKILL else InvalidRequest)(
                "the image cannot be decoded: it took too much time or memory"
            ) from error
        except BaseException:
            # Cancelled: the verdict on this image must not be taken for that on the next one.
            await self._end()
            raise

    @contextlib.asynccontextmanager
    async def _next(self) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(TURN_SECONDS):
                await self.turn.acquire()
        except TimeoutError:
            raise Overloaded("the image decoder is busy with other requests; try again later") from None
        try:
            yield
        finally:
            self.turn.release()

    async def close(self) -> None:
        async with self.turn:
            await self._end()

    async def _running(self) -> InspectorProcess:
        """Return a process that is ready for an image.

        Raises Overloaded if none can be started, as for lack of memory, and RuntimeError, for the log, if it is not
        ready.
        """
        if self._process is None or self._process.child.returncode is not None:
            await self._end()
            self._process = await self._start()
            try:
                async with asyncio.timeout(START_SECONDS):
                    await self._process.verdict()
            except (OSError, EOFError, TimeoutError, ProtocolError) as error:
                process, self._process = self._process, None
                reason = await process.failure(error)
                raise RuntimeError(f"cannot start the image inspection process: {reason}") from error
            except BaseException:
                # Cancelled: its initial verdict must not be taken for that on an image.
                await self._end()
                raise
        return self._process

    async def _start(self) -> InspectorProcess:
        """Start a process. Raises Overloaded."""
        try:
            child, ours = await self._spawner.start(PROGRAM, answers=True)
            try:
                reader, writer = await asyncio.open_connection(sock=ours)
            except BaseException:
                ours.close()
                raise
        except OSError as error:
            raise Overloaded(
                f"the image cannot be checked now: its decoder cannot be started: {error}; try again later"
            ) from error
        return InspectorProcess(child, reader, writer)

    async def _end(self) -> int:
        """End the process if there is one. Return its exit code; -N if signal N has ended it."""
        process, self._process = self._process, None
        if process is None:
            return 0
        process.child.kill()
        process.writer.close()
        return await asyncio.shield(process.child.wait())


def serve() -> None:
    """Run the child's end of the channel. Returns when the router closes its end."""
    confine(ADDRESS_SPACE, OPEN_FILES)
    source, answers = sys.stdin.buffer, sys.stdout.buffer
    verdict = ImageVerdict("")
    while True:
        answers.write(framed(verdict))
        answers.flush()
        head = source.read(4)
        if not head:
            return
        verdict = inspect(_inspections.decode(source.read(int.from_bytes(head, "little"))))


def inspect(inspection: Inspection) -> ImageVerdict:
    """Return the verdict on one image, whatever the decoders raise."""
    try:
        image = decode_image(inspection.data, inspection.max_pixels, inspection.media_type)
    except InvalidRequest as error:
        return ImageVerdict(str(error))
    except MemoryError:
        return ImageVerdict("the image cannot be decoded: it takes too much memory")
    except Exception:  # a bug of ours: other requests must not wait for a new process
        return ImageVerdict("", defect=traceback.format_exc()[-VERDICT_BYTES // 2 :])
    return ImageVerdict("", image.width, image.height)


if __name__ == "__main__":
    serve()
