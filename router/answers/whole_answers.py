"""Builds the complete answer of a request that is not streamed, encoding it while tokens arrive.

An answer may have a hundred thousand tokens with twenty log-probabilities each: building all of it at the end would
block the event loop for seconds, and the objects take more memory than their JSON.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Protocol

import msgspec

from router.answers.openai_responses import AnswerPiece, Format, Usage, end_members

_NO_LISTS = (b"null",)
LARGE_TEXT = 1 << 16  # characters encoded in one turn of the event loop
_encode = msgspec.json.Encoder().encode


class AnswerChoice(Protocol):
    """One choice of a complete answer."""

    def add(self, piece: AnswerPiece) -> None:
        """Add a piece; they arrive in order."""
        ...

    @property
    def characters(self) -> int:
        """Number of characters of its text."""
        ...

    def parts(self) -> list[bytes]:
        """Return the choice as JSON. Nothing may be added afterwards."""
        ...


class WholeChoice:
    """One choice of the answer; `add` its pieces in order."""

    def __init__(self, form: Format, index: int) -> None:
        self._form = form
        self._index = index
        self._texts: list[str] = []
        self._columns: tuple[list[bytes], ...] = tuple([] for _ in form.columns) if form.columns else ()
        self._last: AnswerPiece | None = None

    def add(self, piece: AnswerPiece) -> None:
        self._texts.append(self._form.text_of(piece))
        if self._columns:
            for column, fragment in zip(self._columns, self._form.fragments(piece), strict=True):
                if fragment:
                    column.append(fragment)
        self._last = piece

    @property
    def characters(self) -> int:
        """Number of characters of its text."""
        return sum(map(len, self._texts))

    def parts(self) -> list[bytes]:
        """Return the choice as JSON. Nothing may be added afterwards."""
        form, last = self._form, self._last
        assert last is not None
        return [
            form.before_text(self._index),
            form.encoded_text(self._index, "".join(self._texts)),
            form.end_of_message(self._index),
            *(_object(form.columns, self._columns, form.constant_columns) if self._columns else _NO_LISTS),
            b',"finish_reason":',
            _encode(form.finish_reason(self._index, last.finish_reason)),
            end_members(last),
            b"}",
        ]


class WholeAnswer:
    """All choices of the answer; `add` pieces as they arrive."""

    def __init__(self, form: Format, choices: int) -> None:
        self._form = form
        self._choices = [WholeChoice(form, index) for index in range(choices)]

    def add(self, piece: AnswerPiece) -> None:
        self._choices[piece.index].add(piece)

    async def parts(self, usage: Usage) -> list[bytes]:
        """Return the body as consecutive parts."""
        return await whole_answer(self._form.before_choices(), self._choices, self._form.counted(usage))


async def whole_answer(head: bytes, choices: Sequence[AnswerChoice], usage: Usage) -> list[bytes]:
    """Return the body as consecutive parts, of which `head` ends where the choices begin.

    Long texts are encoded in separate turns of the event loop.
    """
    parts, since = [head], 0
    for number, choice in enumerate(choices):
        since += choice.characters
        if since > LARGE_TEXT:
            await asyncio.sleep(0)
            since = 0
        parts += [b",", *choice.parts()] if number else choice.parts()
    return [*parts, b'],"usage":', _encode(usage.report()), b"}"]


def _object(names: tuple[str, ...], columns: tuple[list[bytes], ...], constant: bytes) -> list[bytes]:
    """Build a JSON object of the named lists and the constant members."""
    parts: list[bytes] = []
    for name, fragments in zip(names, columns, strict=True):
        parts += [b',"' if parts else b'{"', name.encode(), b'":[']
        for number, fragment in enumerate(fragments):
            parts += [b",", fragment] if number else [fragment]
        parts.append(b"]")
    return [*parts, constant, b"}"]
