"""The field `return_token_ids`, in the form of vLLM.

Every choice, complete or in a chunk, has its `token_ids`. The ids of the prompt are
`prompt_token_ids`: of the answer and its first chunks for a chat, of each choice and its first chunk for a completion.
What other requests send does not pass through this module.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from router.answer_form import AnswerForm, Collector
from router.openai_responses import Format, Piece, Usage
from router.whole_answers import AnswerChoice, WholeChoice, whole_answer

_encode = msgspec.json.Encoder().encode
_OPEN = b'"choices":['
_PREFIX, _END = b"data: ", b"\n\n"


class FormWithIds:
    """Adds token ids to the answers of OpenAI's API."""

    def __init__(self, shown: AnswerForm, form: Format, prompts: Sequence[Sequence[int]], chat: bool) -> None:
        """`shown` makes the events to extend, `form` the complete answer. `prompts`: token ids, per choice."""
        self._shown = shown
        self._form = form
        self._prompts = prompts
        self._chat = chat
        self._waiting: dict[int, list[int]] = {}  # choice -> ids of tokens whose event is still to come
        self._begun: set[int] = set()  # choices whose prompt ids were sent

    def opening(self, choices: int, usage: bytes) -> bytes:
        return b"".join(
            _event({**event, "prompt_token_ids": self._prompts[0]})
            for event in _events(self._shown.opening(choices, usage))
        )

    def events(self, piece: Piece, usage: bytes) -> bytes:
        """Return the events of a piece. Each token's id is in the first event of its choice from its piece on."""
        waiting = self._waiting.setdefault(piece.index, [])
        waiting += [token.id for token in piece.tokens]
        made = b""
        for event in _events(self._shown.events(piece, usage)):
            for choice in event["choices"]:
                choice["token_ids"] = list(waiting)
                waiting.clear()
                if not self._chat and piece.index not in self._begun:
                    self._begun.add(piece.index)
                    choice["prompt_token_ids"] = self._prompts[piece.index]
            made += _event(event)
        return made

    def ending(self, usage: Usage, with_usage: bool) -> bytes:
        return self._shown.ending(usage, with_usage)

    def failure(self, body: dict[str, Any]) -> bytes:
        return self._shown.failure(body)

    def collector(self, choices: int) -> Collector:
        return AnswerWithIds(self._form, self._prompts, self._chat)


class AnswerWithIds:
    """Builds a complete answer with token ids."""

    def __init__(self, form: Format, prompts: Sequence[Sequence[int]], chat: bool) -> None:
        self._head = form.before_choices()
        if chat:
            assert self._head.endswith(_OPEN)
            listed = b'"prompt_token_ids":%b,' % _encode(prompts[0])
            self._head = self._head[: -len(_OPEN)] + listed + _OPEN
        self._choices = [
            ChoiceWithIds(WholeChoice(form, index), None if chat else ids)
            for index, ids in enumerate(prompts)
        ]

    def add(self, piece: Piece) -> None:
        self._choices[piece.index].add(piece)

    async def parts(self, usage: Usage) -> list[bytes]:
        return await whole_answer(self._head, self._choices, usage)


class ChoiceWithIds:
    """Adds token ids to a choice of a complete answer."""

    def __init__(self, choice: AnswerChoice, prompt: Sequence[int] | None) -> None:
        """`prompt`: ids to list in the choice; None for a chat, whose answer lists them once."""
        self._choice = choice
        self._prompt = prompt
        self._ids: list[int] = []

    def add(self, piece: Piece) -> None:
        self._choice.add(piece)
        self._ids += [token.id for token in piece.tokens]

    @property
    def characters(self) -> int:
        return self._choice.characters

    def parts(self) -> list[bytes]:
        *parts, last = self._choice.parts()
        assert last.endswith(b"}")
        parts += [last[:-1], b',"token_ids":', _encode(self._ids)]
        if self._prompt is not None:
            parts += [b',"prompt_token_ids":', _encode(self._prompt)]
        return [*parts, b"}"]


def _events(sent: bytes) -> list[Any]:
    return [msgspec.json.decode(event[len(_PREFIX) :]) for event in sent.split(_END) if event]


def _event(event: Any) -> bytes:
    return _PREFIX + _encode(event) + _END
