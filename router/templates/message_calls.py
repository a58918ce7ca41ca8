"""Tool calls in messages of the conversation, as chat templates expect them: arguments are objects, not JSON text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from common.errors import InvalidRequest
from router.requests.chat_fields import ToolCall
from router.requests.json_body import check_depth

_object = msgspec.json.Decoder(dict[str, Any])


def template_calls(calls: Sequence[ToolCall], where: str) -> list[dict[str, Any]]:
    """Convert the calls of one message. Raises InvalidRequest for arguments that are not a JSON object."""
    return [
        ({} if call.id is None else {"id": call.id})
        | {
            "type": "function",
            "function": {
                "name": call.function.name,
                "arguments": call_arguments(
                    call.function.arguments, f"{where}.tool_calls[{index}].function.arguments"
                ),
            },
        }
        for index, call in enumerate(calls)
    ]


def call_arguments(given: str | dict[str, Any] | None, where: str) -> dict[str, Any]:
    """Return the arguments of a call, which `where` names. Raises InvalidRequest if they are not a JSON object."""
    if not isinstance(given, str):
        return given or {}
    if not given.strip():
        return {}
    try:
        text = given.encode()
        check_depth(text)
        return _object.decode(text)
    except (msgspec.MsgspecError, UnicodeEncodeError, InvalidRequest) as error:
        raise InvalidRequest(
            f"{where} must be the JSON text of an object: {error}; send the arguments as the model wrote them, or {{}}",
            param=where,
        ) from error
