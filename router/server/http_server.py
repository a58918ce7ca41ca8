"""aiohttp's HTTP server, with its own errors answered in the JSON format of all other errors.

aiohttp has no hook for this: its protocol answers errors that precede a request object, and some requests are refused
before any middleware runs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from aiohttp import HttpVersion10, StreamReader, hdrs, web

from router.http.answer_headers import add_answer_headers
from router.http.body_memory import BodyMemory
from router.http.direct_answer import ClientConnection
from router.http.errors import broken_request, refused_connection
from router.http.request_body import PIECES_PER_TURN, memory_key, pieces_key
from router.process.turns import Turns
from router.server.connections import ConnectionLimit
from router.server.plain_routes import PlainRoutes
from router.server.sockets import peer_of

MAX_HEADER_BYTES = 16 << 10
MAX_HEADERS = 100
# Limits the time until the head of the next request is complete, measured from the start of the connection or from the
# previous answer: an idle client must not hold a file descriptor.
IDLE_SECONDS = 75.0
# Limits the time in one turn of the event loop for parsing received data and ending connections: parsing 64 KiB that
# are not HTTP takes half a millisecond.
EVENT_SECONDS = 0.004
# Bytes of a connection. In chunks of one byte they take 5 ms to parse and to read.
PARSED_AT_ONCE = 16 << 10
# Bytes of a body that a connection holds before its handler reads them. aiohttp stops reading at twice as many bytes,
# or at a quarter as many chunks: what a body of tiny chunks costs in one turn of the loop is proportional to this.
READ_BUFFER = 8 << 10
WRITE_TIMEOUT = 30.0  # seconds that a client may leave its socket full before it is disconnected
SHUTDOWN_SECONDS = 1.0  # for answers in progress when the server closes


def http_runner(
    app: web.Application, limit: ConnectionLimit | None = None, write_timeout: float = WRITE_TIMEOUT
) -> web.AppRunner:
    """Build the HTTP server of an application, with the limits that do not depend on handlers."""
    app.on_response_prepare.append(add_answer_headers)
    app[memory_key] = BodyMemory()
    app[pieces_key] = Turns(PIECES_PER_TURN)
    return _Runner(
        app,
        limit,
        write_timeout,
        # Without this, a client that disconnects before the first byte is noticed only at the end.
        handler_cancellation=True,
        access_log=None,
        shutdown_timeout=SHUTDOWN_SECONDS,
        keepalive_timeout=IDLE_SECONDS,
        max_field_size=MAX_HEADER_BYTES,
        max_line_size=MAX_HEADER_BYTES,
        max_headers=MAX_HEADERS,
        read_bufsize=READ_BUFFER,
        # A small compressed body must not become a large one.
        auto_decompress=False,
    )


def leave(runner: web.AppRunner) -> None:
    """End the connections of a runner, made by `http_runner`, with their next answers. Direct answers say so."""
    assert isinstance(runner.server, _Server)
    runner.server.leave()


class _Protocol(ClientConnection):
    __slots__ = ("_body", "_broken", "_deferred", "_held", "_stopped", "_turns", "_write_timeout", "limit")

    def __init__(
        self,
        *args: Any,
        limit: ConnectionLimit | None,
        turns: Turns,
        write_timeout: float,
        leaving: bool,
        **kwargs: Any,
    ) -> None:
        """`turns` spreads received data and closed connections over turns of the event loop."""
        super().__init__(*args, **kwargs)
        self.leaving = leaving
        self.broken_body = None
        self.limit = limit
        self._turns = turns
        self._write_timeout = write_timeout
        self._body: StreamReader | None = None  # of the latest request
        self._broken = False  # bytes have arrived that are not HTTP
        self._deferred = 0  # received pieces that wait to be parsed
        self._held = False  # the transport does not read because of them
        self._stopped = False  # a body has paused the parser, now or earlier

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        client = peer_of(transport)
        if client is not None and self.limit is not None and not self.limit.opened(client, self):
            self.force_close()

    def drop(self) -> None:
        """Close the connection at once, whatever is still to be sent."""
        transport = self.transport
        self.force_close()
        if transport is not None:
            transport.abort()

    def data_received(self, data: bytes) -> None:
        """Parse received data: at most a few pieces, over all connections, in one turn of the loop."""
        if not data:
            # aiohttp calls this to continue with what its parser already holds, and needs the result at once.
            self._feed(data)
            return
        for start in range(0, len(data), PARSED_AT_ONCE):
            piece = data[start : start + PARSED_AT_ONCE]
            if not self._turns.call(partial(self._parse, piece)):
                self._deferred += 1
        if self._deferred > 1 and not self._held:
            # More data could only be buffered until these pieces are parsed. One piece, as of a small request, is
            # about to be: to pause and to resume for it would take two system calls.
            self._held = True
            self._pause_transport_reading()

    def pause_reading(self) -> None:
        self._stopped = True
        super().pause_reading()

    def resume_reading(self, resume_parser: bool = True) -> None:
        """Continue to read and to parse. aiohttp calls this for every body, although few have stopped anything.

        The parser of a chunked body stops only at the next bytes of a body. They may arrive after `_reading_paused` has
        been reset, or belong to the next request. The parser does not tell, so on a connection whose parser has ever
        been paused, each call wakes it.
        """
        if self._stopped or self._buffer_paused:
            super().resume_reading(resume_parser)

    def _resume_transport_reading(self) -> None:
        """Read from the socket again, unless received pieces still wait: then `_parse` does so after the last one."""
        if not self._held:
            super()._resume_transport_reading()

    def _feed(self, data: bytes) -> None:
        """Give bytes to the parser, none after those that are not HTTP."""
        if self._broken:
            return
        super().data_received(data)
        if not self._messages:
            return
        message, body = self._messages[-1]
        error = getattr(message, "exc", None)
        if error is None:
            self._body = body
            return
        self._broken = True
        # Its traceback holds the frame that holds it, and its message quotes what the client sent: without this,
        # hundreds of KiB per connection would live until the next full garbage collection.
        error.__traceback__ = None
        self._end_body()

    def _end_body(self) -> None:
        """End the body that the parser was reading when it failed: aiohttp would let its reader wait for ever."""
        body = self._body
        if body is None or body.is_eof():
            return
        if len(self._messages) > 1:
            # The handler of its request has not begun: the error is the answer.
            del self._messages[-2]
        else:
            self.broken_body = body
            body.feed_eof()
            # Its answer is the last one: the error needs none of its own.
            self.close()

    def _parse(self, data: bytes) -> None:
        self._feed(data)
        if self._deferred:
            self._deferred -= 1
            if self._held and not self._deferred:
                self._held = False
                if not (self._reading_paused or self._buffer_paused):
                    self._resume_transport_reading()

    async def _drain_helper(self) -> None:
        """Wait until the client has read enough. aiohttp calls this during every answer.

        Raises ConnectionResetError if the client has disconnected, or does not read for too long. A timer is made only
        for a client whose socket is full: one per written token would cost more than the write.
        """
        transport = self.transport
        if transport is None or not self.writing_paused:
            await super()._drain_helper()
            return
        if transport.is_closing():
            raise ConnectionResetError("the client disconnected")
        try:
            async with asyncio.timeout(self._write_timeout):
                await super()._drain_helper()
        except TimeoutError:
            transport.abort()
            raise ConnectionResetError("the client does not read") from None

    def connection_lost(self, exc: BaseException | None) -> None:
        # Ending a connection cancels its request, which sends aborts to both nodes. A proxy that closes may drop a
        # thousand connections at once.
        self._turns.call(partial(self._end, exc))

    def _end(self, exc: BaseException | None) -> None:
        super().connection_lost(exc)
        # It refers to this connection.
        self._body = self.broken_body = None
        if self.limit is not None:
            self.limit.closed(self)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        if status >= 500:
            # logs the error; raises if the answer has started
            super().handle_error(request, status, exc, message)
        elif request.writer.output_size > 0:
            raise ConnectionError("the answer has started: an error cannot be sent any more")
        # Not logged: anybody can send invalid bytes.
        return broken_request(status, exc, MAX_HEADER_BYTES, MAX_HEADERS)


class _Server(web.Server):
    limit: ConnectionLimit | None = None
    turns: Turns
    write_timeout: float
    leaving = False

    def leave(self) -> None:
        self.leaving = True
        for connection in self.connections:
            assert isinstance(connection, ClientConnection)
            connection.leaving = True

    def __call__(self) -> web.RequestHandler:
        return _Protocol(
            self,
            loop=self._loop,
            limit=self.limit,
            turns=self.turns,
            write_timeout=self.write_timeout,
            leaving=self.leaving,
            **self._kwargs,
        )


def _checked(routes: PlainRoutes) -> Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]:
    """Apply the checks that hold for every request on any route."""

    async def handle(request: web.BaseRequest) -> web.StreamResponse:
        if request.version < HttpVersion10:
            return refused_connection(505, "send the request as HTTP/1.1")
        codings = request.headers.getall(hdrs.TRANSFER_ENCODING, [])
        if codings and [coding.strip().lower() for coding in codings] != ["chunked"]:
            # aiohttp would pass the encoded bytes on as the body.
            return refused_connection(501, "the only supported Transfer-Encoding is chunked")
        if codings and hdrs.CONTENT_LENGTH in request.headers:
            return refused_connection(400, "Transfer-Encoding and Content-Length cannot be combined")
        expected = request.headers.get(hdrs.EXPECT)
        if expected is not None and expected.lower() != "100-continue":
            return refused_connection(417, "the only supported Expect is 100-continue")
        protocol = request.protocol
        assert isinstance(request, web.Request)
        assert isinstance(protocol, _Protocol)
        handler = routes.handler(request) if expected is None else routes.otherwise
        limit = protocol.limit
        if limit is not None:
            limit.busy(protocol)
        try:
            response = await handler(request)
            if protocol.broken_body is not None and not response.prepared:
                response.force_close()
            return response
        finally:
            if limit is not None:
                limit.idle(protocol)

    return handle


class _Runner(web.AppRunner):
    def __init__(
        self, app: web.Application, limit: ConnectionLimit | None, write_timeout: float, **kwargs: Any
    ) -> None:
        super().__init__(app, **kwargs)
        self._limit = limit
        self._write_timeout = write_timeout

    async def _make_server(self) -> web.Server:
        made = await super()._make_server()
        server = _Server(
            _checked(PlainRoutes(self.app)),
            request_factory=made.request_factory,
            handler_cancellation=made.handler_cancellation,
            loop=made._loop,
            **made._kwargs,
        )
        server.limit = self._limit
        server.write_timeout = self._write_timeout
        server.turns = Turns(seconds=EVENT_SECONDS)
        return server
