"""Errors and the header of the request's id as Anthropic's clients read them."""

from __future__ import annotations

from typing import Any

MESSAGES = "/v1/messages"
ANTHROPIC_REQUEST_ID = "request-id"  # of these answers, beside X-Request-Id
_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
}


def is_messages(path: str) -> bool:
    """Return whether the answers of this path have Anthropic's form."""
    return path == MESSAGES or path.startswith(MESSAGES + "/")


def messages_error(error: dict[str, Any], status: int, identity: str) -> dict[str, Any]:
    """Convert the `error` of OpenAI's form. `identity`: the id of the request."""
    kind = _KINDS.get(status, "invalid_request_error" if status < 500 else "api_error")
    return {
        "type": "error",
        "error": {"type": kind, "message": error["message"], "param": error["param"]},
        "request_id": identity,
    }
