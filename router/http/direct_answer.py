"""Answers whose head is made at once: a small JSON answer, written in one piece, and a stream of events.

aiohttp builds the head of a response from objects, which costs as much as a tenth of a small request, and delays the
first token of a stream. These are for the case of almost all requests: HTTP/1.1, status 200, and the client lets the
connection stay open.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from aiohttp import HttpVersion11, StreamReader, web
from aiohttp.abc import AbstractStreamWriter
from aiohttp.helpers import rfc822_formatted_time
from multidict import CIMultiDict

from router.http.answer_headers import answer_headers
from router.http.media_types import JSON

_LINE = "%s: %s\r\n".__mod__  # of a name and a value
_HEAD = f"HTTP/1.1 200 OK\r\nContent-Type: {JSON}\r\n%sContent-Length: %d\r\nDate: %s\r\n\r\n"


class ClientConnection(web.RequestHandler):
    """The server's end of a connection, as far as answers depend on it."""

    __slots__ = ("broken_body", "leaving")
    leaving: bool  # it ends with its next answer: other processes have taken over the port
    broken_body: StreamReader | None  # a request's body that has ended early, in a malformed chunk


class _Direct(web.StreamResponse):
    """An answer of status 200 whose head its own `prepare` makes.

    Subclasses do not call the constructor of this class: it makes headers and cookies, which nobody reads.
    """

    _status, _reason = 200, "OK"
    _keep_alive = True
    _asked: web.Request

    @property
    def prepared(self) -> bool:
        """True: nobody can change its head."""
        return True


class DirectAnswer(_Direct):
    """An answer of status 200 with a JSON body, for a request that `fits`."""

    def __init__(self, request: web.Request, body: bytes) -> None:
        self._asked = request
        self._json = body

    async def prepare(self, request: web.BaseRequest) -> None:
        """Write the answer. Raises ConnectionResetError if the client has disconnected or does not read.

        The head is made here, where the quota of the request's key is charged for the answer.
        """
        transport = request.transport
        if transport is None or transport.is_closing():
            raise ConnectionResetError("the client disconnected")
        lines = "".join(map(_LINE, answer_headers(self._asked).items()))
        connection = request.protocol
        if isinstance(connection, ClientConnection) and connection.leaving:
            self._keep_alive = False
            lines += "Connection: close\r\n"
        head = _HEAD % (lines, len(self._json), rfc822_formatted_time())
        transport.write(head.encode("ascii") + self._json)
        if connection.writing_paused:
            # aiohttp handles the next request of the connection after this: without it, answers would pile up.
            await request.writer.drain()

    async def write_eof(self, data: Any = b"") -> None:
        """Do nothing: `prepare` has written everything."""


class DirectStream(_Direct):
    """A stream of status 200 without a declared length, for a request that fits. Its head leaves with the first bytes.

    Written and ended as any stream of aiohttp.
    """

    _chunked = True

    def __init__(self, request: web.Request, headers: Mapping[str, str]) -> None:
        self._asked = request
        self._own_headers = headers

    async def prepare(self, request: web.BaseRequest) -> AbstractStreamWriter | None:
        """Make the head; the next write sends it, also one of no bytes. The quota is charged as in DirectAnswer."""
        if self._eof_sent or self._payload_writer is not None:
            return self._payload_writer
        headers = CIMultiDict(self._own_headers)
        headers["Transfer-Encoding"] = "chunked"
        headers["Date"] = rfc822_formatted_time()
        connection = request.protocol
        if isinstance(connection, ClientConnection) and connection.leaving:
            self._keep_alive = False
            headers["Connection"] = "close"
        headers.update(answer_headers(self._asked))
        writer = self._payload_writer = request.writer
        writer.enable_chunking()
        await writer.write_headers("HTTP/1.1 200 OK", headers)
        return writer


def fits(request: web.Request) -> bool:
    """Return whether a request may be answered by a DirectAnswer or DirectStream."""
    return request.version == HttpVersion11 and request.keep_alive and request.method != "HEAD"
