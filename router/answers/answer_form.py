"""The interface of an API's answers: how pieces of generated text become JSON or server-sent events."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from router.answers.openai_responses import AnswerPiece, ChatFormat, CompletionFormat, Usage, error_event
from router.http.json_answer import BodyPart


class Collector(Protocol):
    """Builds a complete answer."""

    def add(self, piece: AnswerPiece) -> None:
        """Add a piece; those of one choice arrive in order."""
        ...

    async def parts(self, usage: Usage) -> Sequence[BodyPart]:
        """Return the body as consecutive parts. Called once, when all choices have finished."""
        ...


class AnswerForm(Protocol):
    """The answers of one API. A request is either streamed (the first four methods) or collected.

    Unless a form says otherwise, nothing precedes the first token, and errors are events in the format of OpenAI.
    """

    def opening(self, choices: int, usage: bytes) -> bytes:
        """Return the events before the first token. `usage` is the usage member of each event, for OpenAI's chunks."""
        return b""

    def events(self, piece: AnswerPiece, usage: bytes) -> bytes:
        """Return the events of a piece; b"" while its text is held back."""
        ...

    def ending(self, usage: Usage, with_usage: bool) -> Iterable[bytes]:
        """Return the events after the last piece, in parts that are made in turns of their own.

        `with_usage`: stream_options.include_usage asks for the token counts.
        """
        ...

    def failure(self, body: dict[str, Any], status: int) -> bytes:
        """Return the events that end an incomplete answer. `body`, `status`: the error as a response."""
        return error_event(body)

    def collector(self, choices: int) -> Collector: ...


# Make the form of another API around OpenAI's. The list has the number of prompt tokens of each choice, or for prompts
# that are no chats the tokens themselves.
ShowChat = Callable[[ChatFormat, Sequence[int]], AnswerForm]
ShowCompletion = Callable[[CompletionFormat, Sequence[Sequence[int]]], AnswerForm]
