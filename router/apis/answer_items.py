"""The items of an answer as they grow: reasoning, text and tool calls, in the order in which the model writes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from common.messages.generation import FINISH_LENGTH
from router.answers.openai_responses import AnswerPiece, ChatFormat
from router.apis.text_tokens import TextTokens
from router.chat.answer_events import CallArguments, CallOpened, Content, Reasoning, Span
from router.dispatch.generation import FINISH_ABORT


class ItemKind(Enum):
    REASONING = "reasoning"
    TEXT = "text"
    CALL = "call"


@dataclass(slots=True)
class Item:
    """One item. `added` holds its text, or the JSON text of a call's arguments, in pieces.

    `logprobs`: of the tokens of a text, each as JSON; empty if the request does not ask for them.
    """

    kind: ItemKind
    identity: str = ""  # the id of a call; "" for other items
    name: str = ""  # the called function
    added: list[str] = field(default_factory=list)
    logprobs: list[bytes] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self.added)


@dataclass(frozen=True, slots=True)
class Opened:
    """A new item begins, after the end of the one before it."""

    index: int
    item: Item


@dataclass(frozen=True, slots=True)
class Added:
    index: int
    item: Item
    text: str
    logprobs: list[bytes]  # of the tokens of `text`, as in Item


@dataclass(frozen=True, slots=True)
class Closed:
    index: int
    item: Item


Change = Opened | Added | Closed


class AnswerItems:
    """Follows one answer: `follow` its pieces in order."""

    def __init__(self, form: ChatFormat) -> None:
        self._form = form
        self._tokens = TextTokens() if form.lists_logprobs else None
        self.items: list[Item] = []
        self._open = False  # the last item
        self.prompt_cached = 0  # prompt tokens found in the prefix cache
        self.completion_tokens = 0
        self.finish_reason: str | None = None
        self.stop_string: str | None = None
        self.ends_whole = False  # the answer is over, and its last item was not cut off

    @property
    def reasoning_tokens(self) -> int:
        """Number of tokens between the markers of reasoning."""
        return self._form.reasoning_tokens or 0

    def follow(self, piece: AnswerPiece) -> list[Change]:
        """Return what a piece changes. The last piece closes the last item."""
        changes: list[Change] = []
        self.prompt_cached += piece.cached_tokens or 0
        self.completion_tokens += len(piece.tokens)
        if self._tokens is not None:
            self._tokens.add(piece)
        for event in self._form.parsed(piece):
            match event:
                case Content(text, spans):
                    self._add(changes, ItemKind.TEXT, text, self._logprobs(spans))
                case Reasoning(text):
                    self._add(changes, ItemKind.REASONING, text)
                case CallOpened(_, identity, name):
                    self._begin(changes, Item(ItemKind.CALL, identity, name))
                case CallArguments(_, text):
                    self._add(changes, ItemKind.CALL, text)
        if piece.finish_reason is not None:
            self.finish_reason = self._form.finish_reason(piece.index, piece.finish_reason)
            self.stop_string = piece.stop_reason if isinstance(piece.stop_reason, str) else None
            self.ends_whole = self._last_is_whole(piece.index)
            self._close(changes)
        return changes

    def _last_is_whole(self, index: int) -> bool:
        """Return whether the last item is complete. A stop string, too, may cut a call off."""
        if self.items and self.items[-1].kind is ItemKind.CALL:
            return not self._form.ends_in_call(index)
        return self.finish_reason not in (FINISH_LENGTH, FINISH_ABORT)

    def _logprobs(self, spans: Sequence[Span]) -> list[bytes]:
        """Return the log-probabilities of a text; none if the answer has none."""
        return [] if self._tokens is None else self._form.encoded_logprobs(self._tokens.of(spans))

    def _add(self, changes: list[Change], kind: ItemKind, text: str, logprobs: Sequence[bytes] = ()) -> None:
        if not self._open or self.items[-1].kind is not kind:
            self._begin(changes, Item(kind))
        self.items[-1].added.append(text)
        self.items[-1].logprobs += logprobs
        changes.append(Added(len(self.items) - 1, self.items[-1], text, [*logprobs]))

    def _begin(self, changes: list[Change], item: Item) -> None:
        self._close(changes)
        self.items.append(item)
        self._open = True
        changes.append(Opened(len(self.items) - 1, item))

    def _close(self, changes: list[Change]) -> None:
        if self._open:
            self._open = False
            changes.append(Closed(len(self.items) - 1, self.items[-1]))
