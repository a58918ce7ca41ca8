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
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)
_ONE_KIND = bytes.maketrans(b"{}", b"[]")
_NO_BRACKET = bytes(set(range(256)) - set(b"[]{}"))
T = TypeVar("T")


async def read_json(request: web.Request, decoder: msgspec.json.Decoder[T]) -> T:
    """Raises InvalidRequest with the field's name, UnsupportedMedia, RequestTooLarge or DeadlineExceeded.

    The content type is required: a page in a browser cannot set it for another site without asking first.
    """
    if request.headers.get("Content-Encoding", "identity").lower() != "identity":
        raise UnsupportedMedia("compressed bodies are not taken; send the JSON as it is")
    if request.content_type != "application/json" or "Content-Type" not in request.headers:
        raise UnsupportedMedia("send the body as JSON, with the header Content-Type: application/json")
    try:
        async with asyncio.timeout(READ_TIMEOUT):
            raw = await request.read()
    except TimeoutError:
        raise DeadlineExceeded(f"the body did not arrive within {READ_TIMEOUT:g} seconds") from None
    except web.HTTPRequestEntityTooLarge:
        raise RequestTooLarge(f"the body is larger than {request.client_max_size} bytes") from None
    check_depth(raw)
    try:
        return decoder.decode(raw)
    except msgspec.MsgspecError as error:
        raise invalid_body(error) from error
    except (UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}") from error


def check_depth(raw: bytes) -> None:
    """Raises InvalidRequest where JSON nests deeper than MAX_DEPTH. What is no JSON may pass: decoders refuse it."""
    if raw.count(b"[") + raw.count(b"{") <= MAX_DEPTH:
        return
    rest = _STRING.sub(b"", raw).translate(_ONE_KIND, _NO_BRACKET)
    for _ in range(MAX_DEPTH):
        if not rest:
            return
        rest = rest.replace(b"[]", b"")  # the innermost ones of every place
    if b"[" in rest:
        raise InvalidRequest(f"the body nests more than {MAX_DEPTH} arrays and objects in each other")


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
