"""The answers of chats and completions as OpenAI's API shows them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from router.answers.openai_responses import Format, Usage, error_event
from router.answers.whole_answers import WholeAnswer, WholeChoice
from router.http.sse import DONE


class OpenAiForm:
    """An `AnswerForm` of one of OpenAI's formats."""

    def __init__(self, form: Format, prompts: Sequence[object]) -> None:
        """`prompts`: not read here, since the usage counts their tokens; other forms show more of them."""
        self._form = form
        self.opening = form.opening
        self.events = form.events

    def ending(self, usage: Usage, with_usage: bool) -> Iterable[bytes]:
        return ((self._form.last_event(usage) if with_usage else b"") + DONE,)

    def failure(self, body: dict[str, Any], status: int) -> bytes:
        """Return an error event without [DONE]: the answer is incomplete."""
        return error_event(body)

    def collector(self, choices: int) -> WholeAnswer:
        return WholeAnswer(self._form, [WholeChoice(self._form, index) for index in range(choices)])
