"""Reads the body of a POST request: it must be declared as JSON and complete within a deadline and a size limit."""

from __future__ import annotations

import asyncio

from aiohttp import web

from common.errors import DeadlineExceeded, Overloaded, RequestTooLarge, UnsupportedMedia

READ_TIMEOUT = 30.0  # seconds from the head of a request to the end of its body
MAX_READING = 256 << 20  # bytes of all incompletely received bodies


class ReadingBytes:
    """Counts the bytes of all bodies that are being read, so that slow clients cannot fill the memory."""

    def __init__(self) -> None:
        self.count = 0

    def add(self, size: int) -> None:
        """Count `size` more bytes. Raises Overloaded; what was added before remains counted."""
        if self.count + size > MAX_READING:
            raise Overloaded("too many large bodies are being received; try again later")
        self.count += size


reading_key: web.AppKey[ReadingBytes] = web.AppKey("reading", ReadingBytes)


async def read_body(request: web.Request) -> bytearray:
    """Read the body. Raises UnsupportedMedia, RequestTooLarge, DeadlineExceeded or Overloaded.

    `request.read()` would keep the bytes until the answer is complete; here only the caller holds them. The content
    type is required because a web page cannot set it for another site without a CORS preflight.
    """
    if request.headers.get("Content-Encoding", "identity").lower() != "identity":
        raise UnsupportedMedia("compressed bodies are not supported; send plain JSON")
    if request.content_type != "application/json" or "Content-Type" not in request.headers:
        raise UnsupportedMedia("send the body as JSON, with the header Content-Type: application/json")
    most = request.client_max_size
    if (request.content_length or 0) > most:
        raise _too_large(most)
    body, reading = bytearray(), request.app[reading_key]
    try:
        async with asyncio.timeout(READ_TIMEOUT):
            async for piece in request.content.iter_any():
                if len(body) + len(piece) > most:
                    raise _too_large(most)
                reading.add(len(piece))
                body += piece
    except TimeoutError:
        raise DeadlineExceeded(f"the body did not arrive within {READ_TIMEOUT:g} seconds") from None
    finally:
        reading.count -= len(body)
    return body


def _too_large(most: int) -> RequestTooLarge:
    return RequestTooLarge(f"the body is larger than {most} bytes")
