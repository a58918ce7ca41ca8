"""aiohttp's server, except that what is no HTTP request gets its 400 in JSON, as every other error does.

aiohttp has no hook for that: errors before there is a request are answered by the protocol itself.
"""

from __future__ import annotations

from aiohttp import web

from router.http_errors import broken_request

MAX_HEADER_BYTES = 16 << 10
MAX_HEADERS = 100
# From the start, or the answer before, until the head of the next request is complete: a client that sends none must
# not keep a descriptor.
IDLE_SECONDS = 75.0
SHUTDOWN_SECONDS = 1.0  # for answers that are being written when the server closes


def http_runner(app: web.Application) -> web.AppRunner:
    """The HTTP server of an application, with the limits that hold before a handler is asked."""
    return _Runner(
        app,
        handler_cancellation=True,  # else a client that leaves before the first byte is noticed only at the end
        access_log=None,
        shutdown_timeout=SHUTDOWN_SECONDS,
        keepalive_timeout=IDLE_SECONDS,
        max_field_size=MAX_HEADER_BYTES,
        max_line_size=MAX_HEADER_BYTES,
        max_headers=MAX_HEADERS,
        auto_decompress=False,  # a small compressed body must not become a large one
    )


class _Protocol(web.RequestHandler):
    __slots__ = ()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        if status >= 500:
            super().handle_error(request, status, exc, message)  # logs it; raises if an answer has begun
        elif request.writer.output_size > 0:
            raise ConnectionError("an answer has begun: there can be no other one")
        return broken_request(status)  # anybody can send such bytes: they are no error of ours to log


class _Server(web.Server):
    def __call__(self) -> web.RequestHandler:
        return _Protocol(self, loop=self._loop, **self._kwargs)


class _Runner(web.AppRunner):
    async def _make_server(self) -> web.Server:
        made = await super()._make_server()
        return _Server(
            made.request_handler,
            request_factory=made.request_factory,
            handler_cancellation=made.handler_cancellation,
            loop=made._loop,
            **made._kwargs,
        )
