"""Every error a client can see, in OpenAI's shape; details of defects stay in the log under the request id."""

from __future__ import annotations

import re
import secrets
from typing import Any

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from common.errors import InternalError, InvalidRequest, RequestError
from common.observability.logs import Log

REQUEST_ID = "X-Request-Id"
RETRY_AFTER_SECONDS = 1
_SAFE_ID = re.compile(r"[^A-Za-z0-9._:/+=-]")
request_id_key: web.RequestKey[str] = web.RequestKey("request_id", str)


def error_body(message: str, kind: str, param: str | None, code: int | str) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def body_of(error: RequestError) -> dict[str, Any]:
    return error_body(str(error), error.type, error.param, error.status if error.status < 500 else error.code)


def response_of(error: RequestError) -> web.Response:
    headers = {}
    if error.status == 503:
        headers = {"Retry-After": str(RETRY_AFTER_SECONDS), "x-should-retry": "true"}
    return json_response(body_of(error), error.status, headers)


def json_response(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(
        body=msgspec.json.encode(value), status=status, content_type="application/json", headers=headers
    )


def request_id(request: web.Request) -> str:
    """The client's X-Request-Id, cut and cleaned, or a fresh one."""
    given = _SAFE_ID.sub("", request.headers.get(REQUEST_ID, ""))[:128]
    return given or secrets.token_hex(12)


def error_middleware(log: Log) -> Middleware:
    """Gives each request its id and turns what handlers raise into answers."""

    @web.middleware
    async def handle(request: web.Request, handler: Handler) -> web.StreamResponse:
        identity = request_id(request)
        request[request_id_key] = identity
        try:
            response = await handler(request)
        except RequestError as error:
            response = response_of(error)
        except web.HTTPRequestEntityTooLarge:
            limit = request.client_max_size
            response = json_response(
                error_body(f"the body is larger than {limit} bytes", "invalid_request_error", None, 413), 413
            )
        except web.HTTPException as error:
            text = {404: "there is no such route", 405: f"{request.method} is not allowed here"}.get(
                error.status
            )
            body = error_body(text or error.reason, "invalid_request_error", None, error.status)
            response = json_response(
                body, error.status, {"Allow": error.headers["Allow"]} if error.status == 405 else None
            )
        except Exception:
            log.exception("a handler failed", request_id=identity, path=request.path)
            failure = InternalError(f"internal error; the log has the details under request id {identity}")
            response = response_of(failure)
        if not response.prepared:
            response.headers[REQUEST_ID] = identity
        return response

    return handle


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
