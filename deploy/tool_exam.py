"""The part of deploy/eval that holds conversations with tools: plays the client in every call and counts calls."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from deploy.tiny_models.tool_calls.chat_form import messages
from deploy.tiny_models.tool_calls.conversations import Conversation, exam

MAX_NEW_TOKENS = 256  # limit per turn: three calls after a thought have some 150
MAX_CALL_TURNS = 4  # turns with calls in one conversation; a further one is not answered


@dataclass(slots=True)
class Calls:
    """Counts the calls of all conversations."""

    made: int = 0
    valid: int = 0  # an offered tool takes the arguments


class ToolConversation:
    """One conversation: the first request, and the next one after each reply with calls."""

    def __init__(self, conversation: Conversation, calls: Calls) -> None:
        self._conversation = conversation
        self._calls = calls
        self._turns = 0
        self._messages = messages(conversation)

    @property
    def body(self) -> dict[str, Any]:
        """The request for the next turn, without the model's name."""
        body = {"temperature": 0, "max_tokens": MAX_NEW_TOKENS, "messages": self._messages}
        tools = self._conversation.declarations
        return {**body, "tools": tools} if tools else body

    def follow(self, reply: Any) -> dict[str, Any] | None:
        """Return the request with the results of the calls in a reply; None if it has no calls."""
        message = _message(reply)
        calls = message.get("tool_calls")
        if not calls or self._turns == MAX_CALL_TURNS:
            return None
        self._turns += 1
        self._messages = [*self._messages, message]
        for call in calls:
            self._messages.append(
                {"role": "tool", "tool_call_id": call["id"], "content": self._answer(call["function"])}
            )
        return self.body

    def is_right(self, text: str) -> bool:
        """Return whether the last answer is right."""
        return self._conversation.is_right(text)

    def _answer(self, function: dict[str, Any]) -> str:
        self._calls.made += 1
        try:
            arguments = json.loads(function["arguments"])
        except ValueError:
            return "error: the arguments are not JSON"
        result = self._conversation.respond(function["name"], arguments)
        if result is None:
            return "error: no tool takes these arguments"
        self._calls.valid += 1
        return result


def conversations(count: int, seed: int, calls: Calls) -> Iterator[ToolConversation]:
    """Yield the conversations of an exam."""
    for each in exam(count, seed):
        yield ToolConversation(each, calls)


def _message(reply: Any) -> dict[str, Any]:
    """Return the message of a reply; an empty one if it has none."""
    try:
        message = reply["choices"][0]["message"]
    except (KeyError, IndexError, TypeError):
        return {}
    return message if isinstance(message, dict) else {}
