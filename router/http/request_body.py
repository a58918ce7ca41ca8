"""Reads the body of a POST request: it must be declared as JSON and complete within a deadline and a size limit."""

from __future__ import annotations

import asyncio
from codecs import BOM_UTF8
from types import TracebackType

from aiohttp import web

from common.errors import DeadlineExceeded, InvalidRequest, Overloaded, RequestTooLarge, UnsupportedMedia
from router.http.body_memory import BUSY, SMALL_BODY, BodyMemory, Reservation
from router.http.client import client_key
from router.http.direct_answer import ClientConnection
from router.http.media_types import JSON
from router.process.turns import Turns

READ_TIMEOUT = 30.0  # seconds from the head of a request to the end of its body
# Pieces of all bodies in one turn of the event loop. A piece has up to four thousand chunks, some 5 ms of work.
PIECES_PER_TURN = 4

memory_key: web.AppKey[BodyMemory] = web.AppKey("memory", BodyMemory)
pieces_key: web.AppKey[Turns] = web.AppKey("pieces", Turns)


class Received:
    """A body and the memory that is reserved for it."""

    def __init__(self, memory: BodyMemory, client: str, most: int) -> None:
        """`most` is the largest body that is accepted."""
        self._memory = memory
        self._client = client
        self._most = most
        self._small = 0
        self._reserved: Reservation | None = None
        self._raw = bytearray()
        self._limit: asyncio.Timeout | None = None
        self.waiting = False  # for memory
        self.revoked = False  # it has to end because other clients wait for the memory

    @property
    def limit(self) -> asyncio.Timeout:
        """The limit of the time until the body is complete. It is made when a body is waited for: few are."""
        if self._limit is None:
            self._limit = asyncio.timeout(READ_TIMEOUT)
        return self._limit

    async def expect(self, size: int | None) -> None:
        """Reserve memory for a body of `size` bytes; None if its size is unknown yet. Raises Overloaded."""
        if size is not None and size > SMALL_BODY:
            await self._reserve(size)

    def take_whole(self, raw: bytes) -> None:
        """Hold a small body of an allowed size that has arrived. Raises Overloaded."""
        self._memory.add_small(len(raw))
        self._small = len(raw)
        self._raw = bytearray(raw)

    async def add(self, piece: bytes) -> None:
        """Append a piece. Raises RequestTooLarge or Overloaded."""
        size = len(self._raw) + len(piece)
        if size > self._most:
            raise too_large(self._most)
        if self._reserved is None and size > SMALL_BODY:
            # Its size is not declared: it may become as large as any.
            await self._reserve(self._most)
        if self._reserved is None:
            self._memory.add_small(len(piece))
            self._small += len(piece)
        else:
            self._reserved.received = size
        self._raw += piece

    def completed(self) -> None:
        """Note that the whole body has arrived: its reservation stays until `release`."""
        if self._reserved is not None:
            self._reserved.revocable = False

    def take(self) -> bytearray:
        """Return the body, without a byte order mark, which some clients write before JSON.

        Its bytes are the caller's from here on; the memory stays reserved until `release`.
        """
        raw, self._raw = self._raw, bytearray()
        if raw.startswith(BOM_UTF8):
            del raw[: len(BOM_UTF8)]
        return raw

    def release(self) -> None:
        """Give the memory back: what was made of the body is small, or counted elsewhere."""
        if self._small:
            self._memory.add_small(-self._small)
            self._small = 0
        if self._reserved is not None:
            self._memory.release(self._reserved)
            self._reserved = None

    async def _reserve(self, size: int) -> None:
        self.waiting = True
        self._reserved = await self._memory.reserve(self._client, size, self._revoke)
        self.waiting = False

    def _revoke(self) -> None:
        self.revoked = True
        # One that has just expired cannot be rescheduled, and ends the upload anyway.
        if self._limit is not None and not self._limit.expired():
            self._limit.reschedule(asyncio.get_running_loop().time())


class received:
    """Read the body: `async with received(request) as memory`. Its memory is released at the end of the block.

    `request.read()` would keep the bytes until the answer is complete; here only the caller holds them.
    """

    def __init__(self, request: web.Request) -> None:
        self._request = request

    async def __aenter__(self) -> Received:
        """Receive the body.

        Raises UnsupportedMedia, InvalidRequest, RequestTooLarge, DeadlineExceeded or Overloaded.

        The content type is required because a web page cannot set it for another site without a CORS preflight.
        """
        request = self._request
        headers = request.headers
        if headers.get("Content-Encoding", "identity").lower() != "identity":
            raise UnsupportedMedia("compressed bodies are not supported; send plain JSON")
        kind = headers.get("Content-Type")
        if kind is None or (kind != JSON and request.content_type != JSON):
            raise UnsupportedMedia("send the body as JSON, with the header Content-Type: application/json")
        most = request.client_max_size
        declared, content = request.content_length, request.content
        if declared is not None and declared > most:
            raise too_large(most)
        asker = request.get(client_key)
        body = self._body = Received(request.app[memory_key], asker.name if asker is not None else "", most)
        try:
            if declared is not None and declared <= SMALL_BODY and content.is_eof():
                # It has arrived with the head: nothing has to be awaited, so no timer is needed. A body without a
                # declared length may have to wait for memory.
                body.take_whole(content.read_nowait())
            else:
                await _fill(body, request, declared)
        except BaseException:
            body.release()
            raise
        return body

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._body.release()


async def _fill(body: Received, request: web.Request, declared: int | None) -> None:
    turns, first = request.app[pieces_key], True
    try:
        async with body.limit:
            await body.expect(declared)
            async for piece in request.content.iter_any():
                if not first:
                    # What has arrived meanwhile is there at once: without this, it would be read without a pause.
                    await turns.wait()
                first = False
                await body.add(piece)
            _check_complete(request)
            body.completed()
    except TimeoutError:
        if body.waiting or body.revoked:
            raise Overloaded(BUSY) from None
        raise DeadlineExceeded(f"the body did not arrive within {READ_TIMEOUT:g} seconds") from None


def _check_complete(request: web.Request) -> None:
    """Refuse a body that has ended early."""
    connection = request.protocol
    if isinstance(connection, ClientConnection) and connection.broken_body is request.content:
        raise InvalidRequest("the body has a malformed chunk: this is not valid HTTP")


def too_large(most: int) -> RequestTooLarge:
    return RequestTooLarge(f"the body is larger than {most} bytes")
