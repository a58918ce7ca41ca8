"""The input from which a chat's prompt is rendered, as it travels to the text workers."""

from __future__ import annotations

from typing import Any

import msgspec

from router.requests.openai_schema import Message


class ChatInput(msgspec.Struct, frozen=True, array_like=True):
    """Messages, tools as templates print them, and variables that the client sets."""

    messages: list[Message]
    tools: list[dict[str, Any]] = []
    variables: dict[str, Any] = {}
