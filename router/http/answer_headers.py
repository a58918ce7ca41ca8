"""The headers of every answer to a request, however it is written: whole, in pieces, as a stream, or an error."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from aiohttp import web

from router.http.errors import REQUEST_ID, SERVER, request_id_key
from router.http.messages_errors import ANTHROPIC_REQUEST_ID, is_messages

Headers = Callable[[web.Request], Mapping[str, str]]
# What the listener adds to its answers.
listener_headers_key: web.RequestKey[Headers] = web.RequestKey("listener_headers")


def answer_headers(request: web.Request) -> dict[str, str]:
    """Return the headers that do not depend on the answer. Called when its head is made, after the quota is charged."""
    headers = {"Server": SERVER}
    identity = request.get(request_id_key)
    if identity is not None:
        headers[REQUEST_ID] = identity
        if is_messages(request.path):
            headers[ANTHROPIC_REQUEST_ID] = identity
    extra = request.get(listener_headers_key)
    if extra is not None:
        headers.update(extra(request))
    return headers


async def add_answer_headers(request: web.Request, response: web.StreamResponse) -> None:
    """Add them to an answer whose head aiohttp makes. Registered in Application.on_response_prepare."""
    response.headers.update(answer_headers(request))
