"""The body of a POST request: declared as JSON, and complete within a deadline and a size."""

from __future__ import annotations

import asyncio

from aiohttp import web

from common.errors import DeadlineExceeded, RequestTooLarge, UnsupportedMedia

READ_TIMEOUT = 30.0  # seconds from the head of a request to the end of its body


async def read_body(request: web.Request) -> bytearray:
    """Raises UnsupportedMedia, RequestTooLarge or DeadlineExceeded.

    `request.read()` would keep the bytes until the answer is complete; here only the caller holds them. The content
    type is required: a page in a browser cannot set it for another site without asking first.
    """
    if request.headers.get("Content-Encoding", "identity").lower() != "identity":
        raise UnsupportedMedia("compressed bodies are not taken; send the JSON as it is")
    if request.content_type != "application/json" or "Content-Type" not in request.headers:
        raise UnsupportedMedia("send the body as JSON, with the header Content-Type: application/json")
    most = request.client_max_size
    if (request.content_length or 0) > most:
        raise _too_large(most)
    body = bytearray()
    try:
        async with asyncio.timeout(READ_TIMEOUT):
            async for piece in request.content.iter_any():
                body += piece
                if len(body) > most:
                    raise _too_large(most)
    except TimeoutError:
        raise DeadlineExceeded(f"the body did not arrive within {READ_TIMEOUT:g} seconds") from None
    return body


def _too_large(most: int) -> RequestTooLarge:
    return RequestTooLarge(f"the body is larger than {most} bytes")
