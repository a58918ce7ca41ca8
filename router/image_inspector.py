"""Decodes every image once, in a process of its own: a file that makes a decoder crash or grow ends that one alone.

    python -m router.image_inspector      frames on standard input, verdicts on standard output, until it closes

A frame holds an `Inspection`, or as the answer a `Verdict`. A first `Verdict` says that the process has started.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import traceback
from asyncio.subprocess import Process
from collections.abc import AsyncIterator

import msgspec

from common.errors import InternalError, InvalidRequest, Overloaded, ProtocolError
from common.image_files import decode_image
from router.child_process import START_SECONDS, confine, framed, read_frame

ADDRESS_SPACE = 2 << 30  # bytes
OPEN_FILES = 64
SECONDS = 3.0  # for one image, waiting for those before it not counted; the others wait for it
TURN_SECONDS = 30.0  # that an image waits for those before it
VERDICT_BYTES = 1 << 16


class Inspection(msgspec.Struct, frozen=True, array_like=True):
    """One image as it came."""

    media_type: str | None
    max_pixels: int
    data: bytes


class Verdict(msgspec.Struct, frozen=True, array_like=True):
    """Without a problem it decodes to its end and keeps the limits."""

    problem: str
    width: int = 0  # pixels, turned as its EXIF says
    height: int = 0
    defect: str = ""  # of ours: a traceback for the log


_verdicts = msgspec.msgpack.Decoder(Verdict)
_inspections = msgspec.msgpack.Decoder(Inspection)


class ImageInspector:
    """The router's end. One image at a time; the process is started when it is needed and again when it died."""

    def __init__(self, max_pixels: int, seconds: float = SECONDS) -> None:
        self._max_pixels = max_pixels
        self._seconds = seconds
        self._process: Process | None = None
        self._turn = asyncio.Lock()

    async def check(self, data: bytes, media_type: str | None) -> tuple[int, int]:
        """(width, height) in pixels. Raises InvalidRequest with what is wrong with the image, or Overloaded."""
        frame = framed(Inspection(media_type, self._max_pixels, data))
        async with self._next():
            process = await self._running()
            assert process.stdin is not None
            try:
                async with asyncio.timeout(self._seconds):
                    process.stdin.write(frame)
                    await process.stdin.drain()
                    verdict = await _verdict(process)
            except (OSError, EOFError, TimeoutError, ProtocolError, msgspec.DecodeError) as error:
                await self._end()
                raise InvalidRequest(
                    "the image is broken: decoding it took too much time or memory"
                ) from error
            except (
                BaseException
            ):  # cancelled: the answer to this image must not be taken for that to the next
                await self._end()
                raise
        if verdict.defect:
            raise RuntimeError(f"the process that decodes images failed:\n{verdict.defect}")
        if verdict.problem:
            raise InvalidRequest(verdict.problem)
        return verdict.width, verdict.height

    @contextlib.asynccontextmanager
    async def _next(self) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(TURN_SECONDS):
                await self._turn.acquire()
        except TimeoutError:
            raise Overloaded("the images of other requests keep the decoder busy; try again later") from None
        try:
            yield
        finally:
            self._turn.release()

    async def close(self) -> None:
        async with self._turn:
            await self._end()

    async def _running(self) -> Process:
        """Ready for an image. Raises InternalError."""
        if self._process is None or self._process.returncode is not None:
            try:
                self._process = await asyncio.create_subprocess_exec(
                    sys.executable,
                    "-m",
                    "router.image_inspector",
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.PIPE,
                )
                async with asyncio.timeout(START_SECONDS):
                    await _verdict(self._process)
            except (OSError, EOFError, TimeoutError, ProtocolError, msgspec.DecodeError) as error:
                await self._end()
                raise InternalError(f"the image decoder cannot be started: {error}") from error
            except BaseException:  # cancelled: its first verdict must not be taken for that to an image
                await self._end()
                raise
        return self._process

    async def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None and process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await asyncio.shield(process.wait())


async def _verdict(process: Process) -> Verdict:
    assert process.stdout is not None
    return _verdicts.decode(await read_frame(process.stdout, VERDICT_BYTES))


def serve() -> None:
    """The other end. Returns when the router closes its pipe."""
    confine(ADDRESS_SPACE, OPEN_FILES)
    source, answers = sys.stdin.buffer, sys.stdout.buffer
    verdict = Verdict("")
    while True:
        answers.write(framed(verdict))
        answers.flush()
        head = source.read(4)
        if not head:
            return
        verdict = inspect(_inspections.decode(source.read(int.from_bytes(head, "little"))))


def inspect(inspection: Inspection) -> Verdict:
    """Whatever the decoders raise."""
    try:
        image = decode_image(inspection.data, inspection.max_pixels, inspection.media_type)
    except InvalidRequest as error:
        return Verdict(str(error))
    except MemoryError:
        return Verdict("the image is broken: decoding it takes too much memory")
    except Exception:  # a defect of ours: others should not wait for a new process
        return Verdict("", defect=traceback.format_exc()[-VERDICT_BYTES // 2 :])
    return Verdict("", image.width, image.height)


if __name__ == "__main__":
    serve()
