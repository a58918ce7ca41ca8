"""Renders every error that a client can see in OpenAI's format. Details of bugs go to the log, under the request id."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable
from typing import Any

import msgspec
from aiohttp import web
from aiohttp.http_exceptions import BadHttpMessage, LineTooLong
from aiohttp.typedefs import Handler, Middleware

from common.errors import (
    ContextTooLong,
    InternalError,
    ModelNotFound,
    Overloaded,
    RateLimited,
    RequestError,
    Unauthorized,
)
from common.observability.logs import Log
from common.random_bytes import random_hex
from router.http.error_log import ErrorLog
from router.http.media_types import JSON
from router.http.messages_errors import is_messages, messages_error
from router.http.unknown_route import not_allowed, not_found

REQUEST_ID = "X-Request-Id"
SERVER = "tandem"  # the header Server of every answer; aiohttp would send its version
MAX_REQUEST_ID = 128
MAX_MESSAGE = 1000  # characters of an error message: long client input is not echoed
SHOULD_RETRY = "x-should-retry"
RETRY_AFTER_SECONDS = 1
TOO_MANY_HEADERS = "Too many headers received"  # as aiohttp's parser says it
_UNSAFE = re.compile(r"[^A-Za-z0-9._:/+=-]")
request_id_key: web.RequestKey[str] = web.RequestKey("request_id", str)
arrived_key: web.RequestKey[float] = web.RequestKey("arrived", float)  # monotonic seconds
Answered = Callable[[web.Request, web.StreamResponse], None]


def error_body(message: str, kind: str, param: str | None, code: int | str) -> dict[str, Any]:
    if len(message) > MAX_MESSAGE:
        message = message[:MAX_MESSAGE] + " ..."
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def body_of(error: RequestError) -> dict[str, Any]:
    """Return the body of an error. `code` is a name where clients compare it with one, otherwise the status."""
    named = error.status >= 500 or error.status in (401, 403, 429)
    named = named or isinstance(error, ContextTooLong | ModelNotFound)
    return error_body(str(error), error.type, error.param, error.code if named else error.status)


def response_of(error: RequestError) -> web.Response:
    """Answer with an error and the retry headers that OpenAI's clients obey.

    Without these headers they would also retry a 408 or 500, and the work would be done twice.
    """
    headers = {SHOULD_RETRY: "false"}
    if error.status == 503:
        headers = {SHOULD_RETRY: "true", "Retry-After": str(RETRY_AFTER_SECONDS)}
    if isinstance(error, RateLimited | Overloaded):
        headers = {SHOULD_RETRY: "true", "Retry-After": str(max(math.ceil(error.retry_after), 1))}
    elif isinstance(error, Unauthorized):
        headers["WWW-Authenticate"] = "Bearer"
    return json_response(body_of(error), error.status, headers)


def broken_request(status: int, error: BaseException | None, line_bytes: int, headers: int) -> web.Response:
    """Answer bytes that are not a valid HTTP request, or a failure of the server itself.

    `error` is what the parser raised; `line_bytes` and `headers` are its limits for a line and for their number.
    """
    if isinstance(error, LineTooLong):
        return refused_connection(
            431, f"the URL or a header of the request is longer than {line_bytes} bytes; send a shorter one"
        )
    if isinstance(error, BadHttpMessage) and error.message == TOO_MANY_HEADERS:
        return refused_connection(431, f"the request has more than {headers} headers; send fewer")
    if status < 500:
        return refused_connection(status, "this is not a valid HTTP request")
    return _closing(status, error_body("internal error", "server_error", None, InternalError.code))


def refused_connection(status: int, message: str) -> web.Response:
    """Answer a request that never reaches a handler, and close the connection: the client may be out of step."""
    return _closing(status, error_body(message, "invalid_request_error", None, status))


def _closing(status: int, body: dict[str, Any]) -> web.Response:
    headers = {SHOULD_RETRY: "false", REQUEST_ID: random_hex(12), "Connection": "close", "Server": SERVER}
    response = json_response(body, status, headers)
    response.force_close()
    return response


def json_response(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), status=status, content_type=JSON, headers=headers)


def defect(log: Log, request: web.Request) -> InternalError:
    """Log the exception that is being handled; return the error that the client may see."""
    identity = request[request_id_key]
    log.exception("a handler failed", request_id=identity, path=request.path)
    return InternalError(f"internal error; the log has the details under request id {identity}")


def request_id(request: web.Request) -> str:
    """Return the client's X-Request-Id, truncated and sanitized, or a new one."""
    given = request.headers.get(REQUEST_ID)
    return (given and clean_request_id(given)) or random_hex(12)


def clean_request_id(given: str) -> str:
    """Return a request id of a client, truncated and without characters that do not belong in logs and headers."""
    return _UNSAFE.sub("", given[: 8 * MAX_REQUEST_ID])[:MAX_REQUEST_ID]


def use_request_id(request: web.Request, rid: str | None, request_id: str | None = None) -> None:
    """Replace the id of a request by one in its body: SGLang's `rid`, or vLLM's `request_id` if no header has one."""
    given = clean_request_id(rid or "")
    if not given and not clean_request_id(request.headers.get(REQUEST_ID, "")):
        given = clean_request_id(request_id or "")
    if given:
        request[request_id_key] = given


def _http_text(request: web.Request, error: web.HTTPException) -> str:
    if isinstance(error, web.HTTPNotFound):
        return not_found(request)
    if isinstance(error, web.HTTPMethodNotAllowed):
        return not_allowed(request, error.headers.get("Allow", ""))
    return error.reason


def error_middleware(
    log: Log, errors: ErrorLog, answered: Answered = lambda request, response: None
) -> Middleware:
    """Return a middleware that assigns request ids and turns exceptions of handlers into error responses.

    `answered` is called with every request and its response, after the last byte of a stream.
    """

    @web.middleware
    async def handle(request: web.Request, handler: Handler) -> web.StreamResponse:
        request[arrived_key], request[request_id_key] = time.monotonic(), request_id(request)
        response: web.StreamResponse
        try:
            response = await handler(request)
        except Exception as error:
            response = _refusal(error, request, log, errors)
        answered(request, response)
        return response

    return handle


def _refusal(error: Exception, request: web.Request, log: Log, errors: ErrorLog) -> web.Response:
    """Return the answer to a request whose handler has raised `error`, in the form of the path's API."""
    identity = request[request_id_key]
    if isinstance(error, RequestError):
        response = response_of(error)
        errors.note(request, identity, error.status, error.param, str(error))
    elif isinstance(error, web.HTTPException):
        text = _http_text(request, error)
        kind = "invalid_request_error" if error.status < 500 else "server_error"
        allow = {"Allow": error.headers["Allow"]} if "Allow" in error.headers else {}
        headers = {SHOULD_RETRY: "false", **allow}
        response = json_response(error_body(text, kind, None, error.status), error.status, headers)
        errors.note(request, identity, error.status, None, text)
    else:
        response = response_of(defect(log, request))
    if is_messages(request.path):
        assert isinstance(response.body, bytes)
        given = msgspec.json.decode(response.body)["error"]
        response.body = msgspec.json.encode(messages_error(given, response.status, identity))
    return response
