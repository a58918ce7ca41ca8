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


class Members(Protocol):
    """Further members at the end of a JSON object: of a choice, or of the answer."""

    def add(self, piece: AnswerPiece) -> None:
        """Add a piece; those of one choice arrive in order."""
        ...

    def parts(self) -> list[bytes]:
        """Return the members as JSON, each after a comma. Nothing may be added afterwards."""
        ...


class WholeChoice:
    """One choice of the answer; `add` its pieces in order."""

    def __init__(self, form: Format, index: int, further: Sequence[Members] = ()) -> None:
        """`further`: what follows the members that every choice has."""
        self._form = form
        self._index = index
        self._further = further
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
        for members in self._further:
            members.add(piece)

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
            *(part for members in self._further for part in members.parts()),
            b"}",
        ]


class WholeAnswer:
    """All choices of the answer; `add` pieces as they arrive."""

    def __init__(
        self,
        form: Format,
        choices: Sequence[WholeChoice],
        first: bytes = b"",
        last: Members | None = None,
    ) -> None:
        """
        Args:
            first: further members before the choices, each followed by a comma.
            last: further members at the end, made from the pieces of the first choice.
        """
        self._form = form
        self._choices = choices
        self._first = first
        self._last = last

    def add(self, piece: AnswerPiece) -> None:
        self._choices[piece.index].add(piece)
        if self._last is not None and piece.index == 0:
            self._last.add(piece)

    async def parts(self, usage: Usage) -> list[bytes]:
        """Return the body as consecutive parts. Long texts are encoded in separate turns of the event loop."""
        form = self._form
        parts, since = [form.before_choices(), self._first, b'"choices":['], 0
        for number, choice in enumerate(self._choices):
            since += choice.characters
            if since > LARGE_TEXT:
                await asyncio.sleep(0)
                since = 0
            parts += [b",", *choice.parts()] if number else choice.parts()
        last = [] if self._last is None else self._last.parts()
        return [*parts, b'],"usage":', _encode(form.counted(usage).report()), *last, b"}"]


def _object(names: tuple[str, ...], columns: tuple[list[bytes], ...], constant: bytes) -> list[bytes]:
    """Build a JSON object of the named lists and the constant members."""
    parts: list[bytes] = []
    for name, fragments in zip(names, columns, strict=True):
        parts += [b',"' if parts else b'{"', name.encode(), b'":[']
        for number, fragment in enumerate(fragments):
            parts += [b",", fragment] if number else [fragment]
        parts.append(b"]")
    return [*parts, constant, b"}"]
