"""Writes JSON answers of any size.

Large ones are written in pieces, so that no write blocks the event loop for long. Parts that take much more memory as
JSON are encoded while they are written.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import TypeGuard

from aiohttp import HttpVersion11, web

from router.http.direct_answer import DirectAnswer, fits
from router.http.media_types import JSON

PIECE = 1 << 17  # bytes per write; a smaller body is written at once
_MADE = frozenset((bytes, bytearray))
BodyPart = bytes | bytearray | Iterator[bytes]  # what an iterator yields is made in a turn of its own


async def send_json(request: web.Request, parts: Sequence[BodyPart]) -> web.StreamResponse:
    """Answer 200 with the concatenated `parts`. A client that leaves or stops reading is disconnected."""
    size: int | None = None
    if _are_made(parts):
        size = sum(map(len, parts))
        if size <= PIECE:
            body = b"".join(parts)
            return (
                DirectAnswer(request, body) if fits(request) else web.Response(body=body, content_type=JSON)
            )
    response = web.StreamResponse()
    response.content_type, response.content_length = JSON, size
    if size is None:
        if request.version == HttpVersion11:
            response.enable_chunked_encoding()
        else:
            # Only the end of the connection tells such a client that the answer is complete.
            response.force_close()
    try:
        await response.prepare(request)
        for piece in _pieces(parts):
            await response.write(piece)
            # If the socket accepts everything at once, `write` never yields to the event loop.
            await asyncio.sleep(0)
        await response.write_eof()
    except ConnectionError:
        if request.transport is not None:
            request.transport.abort()
    return response


def _are_made(parts: Sequence[BodyPart]) -> TypeGuard[Sequence[bytes | bytearray]]:
    return _MADE.issuperset(map(type, parts))


def _pieces(parts: Sequence[BodyPart]) -> Iterator[bytes | bytearray]:
    """Yield the same bytes in pieces of at most PIECE; small parts are joined."""
    held = bytearray()
    for part in chain.from_iterable(
        (part,) if isinstance(part, bytes | bytearray) else part for part in parts
    ):
        if len(held) + len(part) <= PIECE:
            held += part
            continue
        if held:
            yield held
        for start in range(0, len(part), PIECE):
            held = bytearray(part[start : start + PIECE])
            if len(held) == PIECE:
                yield held
                held = bytearray()
    if held:
        yield held
