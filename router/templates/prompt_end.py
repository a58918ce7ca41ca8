"""The ends that a chat's prompt can have: `add_generation_prompt` and `continue_final_message`."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Any

from common.errors import InvalidRequest

Messages = Sequence[dict[str, Any]]


class PromptEnd(IntEnum):
    """The end of a rendered chat."""

    GENERATION_PROMPT = 0  # the beginning of a new message of the assistant
    LAST_MESSAGE = 1  # the last message, closed
    OPEN_MESSAGE = 2  # the last message, which the answer continues


def prompt_end(add_generation_prompt: bool | None, continue_final_message: bool | None) -> PromptEnd:
    """Read the two fields of a request. Raises InvalidRequest if both are true."""
    if not continue_final_message:
        return PromptEnd.LAST_MESSAGE if add_generation_prompt is False else PromptEnd.GENERATION_PROMPT
    if add_generation_prompt:
        raise InvalidRequest(
            "continue_final_message leaves no place for a generation prompt; send add_generation_prompt: false",
            param="continue_final_message",
        )
    return PromptEnd.OPEN_MESSAGE


def render_open(render: Callable[[Messages], str], messages: Messages) -> str:
    """Render messages and cut the text at the end of the last message's content.

    A random mark at the end of the content shows where the template puts it. Templates that strip the content also
    strip the space that follows the mark; then the content's own trailing space does not belong to the prompt either.
    """
    mark = f"[end-{secrets.token_hex(16)}]"
    *earlier, last = messages
    text = render([*earlier, {**last, "content": _marked(last["content"], mark + " ")}])
    at = text.rfind(mark)
    if at < 0:
        raise ValueError("the chat template does not print the last message, so it cannot be continued")
    stripped = not text.startswith(" ", at + len(mark))
    return text[:at].rstrip() if stripped else text[:at]


def _marked(content: Any, mark: str) -> Any:
    """Append the mark to the content, or to its last text part."""
    if isinstance(content, str):
        return content + mark
    for index in reversed(range(len(content))):
        if content[index].get("type") == "text":
            part = {**content[index], "text": content[index]["text"] + mark}
            return [*content[:index], part, *content[index + 1 :]]
    raise ValueError("the last message has no text to continue")
