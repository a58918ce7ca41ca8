"""Server-sent events."""

from __future__ import annotations

import asyncio

from aiohttp import HttpVersion11, web

from common.errors import ClientGone
from router.http.direct_answer import DirectStream, fits
from router.http.media_types import EVENTS

DONE = b"data: [DONE]\n\n"
EVENT_END = b"\n\n"
HEADERS = {
    "Content-Type": f"{EVENTS}; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}
# With fewer bytes than this in the socket's buffer a write cannot block; it blocks at twice as many.
UNWATCHED = 32 << 10


class SseWriter:
    """One stream. Every method that writes raises ClientGone when the client has disconnected or reads too slowly."""

    def __init__(self, request: web.Request) -> None:
        self._request = request
        self.response: web.StreamResponse | None = None  # once its head was made
        self.started = False
        self._chunked = False
        self._gathered: list[bytes] = []  # events that wait for the end of this turn
        self._transport: asyncio.Transport | None = None  # once the head of the answer was sent

    async def start(self, events: bytes) -> None:
        """Send the head of the answer and its first events, if there are any."""
        self.started = True
        request = self._request
        response: web.StreamResponse
        if fits(request):
            response = DirectStream(request, HEADERS)
        else:
            response = web.StreamResponse(headers=HEADERS)
            if request.version == HttpVersion11:
                response.enable_chunked_encoding()
            else:
                # Only the end of the connection tells such a client that the stream is complete.
                response.force_close()
        self.response = response
        try:
            await response.prepare(request)
            await response.write(events)
        except ConnectionError as error:
            raise _gone(error) from None
        self._transport = request.transport
        self._chunked = response.chunked

    def has_room(self) -> bool:
        """Return whether `write_now` may be called: events have been sent, and the client keeps up with them."""
        transport = self._transport
        return (
            transport is not None
            and not transport.is_closing()
            and transport.get_write_buffer_size() < UNWATCHED
        )

    @property
    def buffered(self) -> int:
        """Bytes of events that this process holds for the client."""
        return 0 if self._transport is None else self._transport.get_write_buffer_size()

    def write_now(self, events: bytes) -> None:
        """Write events without waiting; b"" writes nothing. Only while `has_room`, so the buffer stays bounded."""
        if events:
            assert self._transport is not None
            self._transport.write(b"%x\r\n%b\r\n" % (len(events), events) if self._chunked else events)

    def write_soon(self, events: bytes) -> None:
        """Write as `write_now`, but at the end of this turn of the event loop, in one write with others of the turn."""
        if events:
            if not self._gathered:
                asyncio.get_running_loop().call_soon(self._write_gathered)
            self._gathered.append(events)

    def _write_gathered(self) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self.write_now(self._after_gathered(b""))

    def _after_gathered(self, events: bytes) -> bytes:
        """Return events that wait for the end of the turn, followed by `events`."""
        if self._gathered:
            events = b"".join((*self._gathered, events))
            self._gathered.clear()
        return events

    async def send(self, events: bytes) -> None:
        """Send events in one write; b"" sends nothing."""
        events = self._after_gathered(events)
        if not events:
            return
        assert self.response is not None
        try:
            await self.response.write(events)
        except ConnectionError as error:
            raise _gone(error) from None

    async def finish(self, events: bytes) -> web.StreamResponse:
        """Send the last events and end the body."""
        assert self.response is not None
        try:
            await self.response.write_eof(self._after_gathered(events))
        except ConnectionError as error:
            raise _gone(error) from None
        return self.response

    def abandon(self) -> web.StreamResponse:
        """Abort the connection, so that the client does not take a partial answer for a complete one."""
        if self._request.transport is not None:
            self._request.transport.abort()
        return web.StreamResponse() if self.response is None else self.response


def _gone(error: ConnectionError) -> ClientGone:
    return ClientGone(f"the connection to the client has ended: {error}")
