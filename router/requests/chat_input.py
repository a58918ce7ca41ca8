"""The input from which a chat's prompt is rendered, as it travels to the text workers, or the tokens of the prompt."""

from __future__ import annotations

from array import array
from typing import Any

import msgspec

from common.errors import InvalidRequest
from router.requests.json_body import whole_ids
from router.requests.openai_schema import ChatRequest, Message, packed_ids


class ChatInput(msgspec.Struct, frozen=True, array_like=True):
    """Messages, tools as templates print them, and variables that the client sets."""

    messages: list[Message]
    tools: list[dict[str, Any]] = []
    variables: dict[str, Any] = {}


def with_packed_input(request: ChatRequest) -> ChatRequest:
    """Return the request with its `input_ids` packed, because a garbage collection would visit the items of a list.

    Raises InvalidRequest if they are no integers.
    """
    if not request.input_ids:
        return request
    given = whole_ids(request.input_ids)
    if any(type(each) is not int for each in given):
        raise InvalidRequest("input_ids must be a list of token ids", param="input_ids")
    return msgspec.structs.replace(request, input_ids=[packed_ids(given)])


def input_tokens(request: ChatRequest) -> array[int] | None:
    """Return the tokens of a prompt that the client has made itself; None if messages are rendered."""
    if request.input_ids is None:
        return None
    tokens = array("i")
    for packed in request.input_ids:
        tokens.frombytes(packed)
    return tokens
