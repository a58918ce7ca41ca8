"""The body of a POST request: declared as JSON, whole within a deadline, decoded into one typed struct."""

from __future__ import annotations

import asyncio
import re
from typing import TypeVar

import msgspec
from aiohttp import web

from common.errors import DeadlineExceeded, InvalidRequest, RequestTooLarge, UnsupportedMedia

READ_TIMEOUT = 30.0  # seconds from the head of a request to the end of its body
MAX_DEPTH = 64  # of arrays and objects in each other
PIECE = 1 << 16  # bytes looked at before others get their turn
_ONE_KIND = bytes.maketrans(b"{}", b"[]")
_NO_MARK = bytes(set(range(256)) - set(b'[]{}"'))
_QUOTE, _OPENS = b'"['
T = TypeVar("T")


async def read_json(request: web.Request, decoder: msgspec.json.Decoder[T]) -> T:
    """Raises InvalidRequest with the field's name, UnsupportedMedia, RequestTooLarge or DeadlineExceeded.

    Only what is decoded stays: `request.read()` would keep the bytes until the answer is whole. The content type is
    required: a page in a browser cannot set it for another site without asking first.
    """
    if request.headers.get("Content-Encoding", "identity").lower() != "identity":
        raise UnsupportedMedia("compressed bodies are not taken; send the JSON as it is")
    if request.content_type != "application/json" or "Content-Type" not in request.headers:
        raise UnsupportedMedia("send the body as JSON, with the header Content-Type: application/json")
    most = request.client_max_size
    if (request.content_length or 0) > most:
        raise _too_large(most)
    try:
        async with asyncio.timeout(READ_TIMEOUT):
            raw = await _whole(request, most)
    except TimeoutError:
        raise DeadlineExceeded(f"the body did not arrive within {READ_TIMEOUT:g} seconds") from None
    await check_depth(raw)
    try:
        return decoder.decode(raw)
    except msgspec.MsgspecError as error:
        raise invalid_body(error) from error
    except (UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}") from error


async def _whole(request: web.Request, most: int) -> bytes:
    body = bytearray()
    async for piece in request.content.iter_any():
        body += piece
        if len(body) > most:
            raise _too_large(most)
    return bytes(body)


def _too_large(most: int) -> RequestTooLarge:
    return RequestTooLarge(f"the body is larger than {most} bytes")


async def check_depth(raw: bytes) -> None:
    """Raises InvalidRequest where JSON nests deeper than MAX_DEPTH. What is no JSON may pass: decoders refuse it.

    One pass, whatever the body is made of, and others get their turn every PIECE bytes.
    """
    if not _many_brackets(raw):
        return
    depth, inside, start = 0, False, 0
    while start < len(raw):
        end = start + PIECE
        piece = raw[start:end]
        if (len(piece) - len(piece.rstrip(b"\\"))) % 2:  # what it escapes belongs to it
            piece, end = raw[start : end + 1], end + 1
        start = end
        marks = piece.replace(rb"\\", b"").replace(rb"\"", b"").translate(_ONE_KIND, _NO_MARK)
        for mark in marks.replace(b'""', b""):  # two in a row change nothing, whatever they stand between
            if mark == _QUOTE:
                inside = not inside
            elif not inside:
                depth += 1 if mark == _OPENS else -1
                if depth > MAX_DEPTH:
                    raise InvalidRequest(
                        f"the body nests more than {MAX_DEPTH} arrays and objects in each other"
                    )
        await asyncio.sleep(0)


def _many_brackets(raw: bytes) -> bool:
    """Whether so many open that they could nest too deep. Looks no further than that; a large image passes at once."""
    for bracket in (b"[", b"{"):
        place = -1
        for _ in range(MAX_DEPTH // 2 + 1):
            place = raw.find(bracket, place + 1)
            if place < 0:
                break
        else:
            return True
    return False


def invalid_body(error: msgspec.MsgspecError) -> InvalidRequest:
    """A body that does not fit the schema, with the field's name."""
    text, _, path = str(error).partition(" - at `$")
    field = path.rstrip("`").lstrip(".")
    missing = re.search(r"required field `(\w+)`", text)
    if missing:
        field = f"{field}.{missing[1]}" if field else missing[1]
    return InvalidRequest(
        f"{field}: {text}" if field else f"the body is not valid: {text}", param=field or None
    )
