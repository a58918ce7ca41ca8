"""Finds out, when the router starts, how the served model marks reasoning and tool calls."""

from __future__ import annotations

import secrets
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from common.checkpoint.chat_template_file import find_chat_template
from common.checkpoint.model_directory import MAX_TOKENIZER_CONFIG_BYTES
from common.checkpoint.model_files import read_json
from common.checkpoint.tokenizer_config import read_tokenizer_config
from common.errors import InternalError, ModelError
from common.grammar.token_marker import SymbolsOf, TokenMarker
from common.messages.generation import ThinkingLimit
from router.chat.answer_parser import AnswerParser
from router.chat.call_formats import CallFormat, CallSupport
from router.chat.call_grammar import Thought
from router.chat.families import BY_NAME, ChatFamily, family_of
from router.chat.reasoning_counter import ReasoningCounter
from router.chat.response_template import REASONING, ResponseTemplate, compile_template
from router.grammar.constraint import Constraint, End

AUTO, NONE = "auto", "none"
# tokens at the end of a prompt in which the beginning of the answer's message is searched
TAIL_TOKENS = (64, 4096)
_LETTERS = string.ascii_letters + string.digits


@dataclass(frozen=True, slots=True)
class AnswerStyle:
    """The router's knowledge about the form of the model's answers.

    Attributes:
        template: None if the model's formats are not known: answers are plain text.
        short_ids: call ids have nine letters and digits.
        special: ids of the added tokens that markers consist of: the parser must see them, and grammars name their ids.
        template_variables: variables of the chat template that clients may set.
        reasoning_fields: names under which answers show reasoning.
        calls: how calls are written, where a grammar can force them.
        think_markers: what opens and closes reasoning, if its tokens can be limited.
    """

    template: ResponseTemplate | None = None
    short_ids: bool = False
    special: Mapping[str, int] = field(default_factory=dict)
    template_variables: frozenset[str] = frozenset()
    reasoning_fields: tuple[str, ...] = ("reasoning_content",)
    calls: CallFormat | None = None
    think_markers: tuple[TokenMarker, TokenMarker] | None = None

    @property
    def kept(self) -> frozenset[int]:
        """Added tokens that the parser must see."""
        return frozenset(self.special.values())

    @property
    def call_support(self) -> CallSupport:
        return CallSupport(
            read=self.template is not None and self.template.calls,
            forced=self.calls is not None,
            told_apart=self.calls is not None and self.calls.told_apart,
        )

    @property
    def think(self) -> tuple[str, str] | None:
        """The markers around reasoning, if both are one literal."""
        for region in self.template.regions if self.template is not None else ():
            if region.name in REASONING and region.open is not None and region.close is not None:
                begin, end = region.open.only, region.close.only
                return None if begin is None or end is None else (begin, end)
        return None

    def thinking_limit(self, tokens: int, prompt: Sequence[int], thought: Thought) -> ThinkingLimit:
        """Return a limit of reasoning tokens, of which the prompt may have some."""
        assert self.think_markers is not None
        begin, end = self.think_markers
        spent = (begin.tokens_since(prompt) or 0) if thought is Thought.OPEN else None
        return ThinkingLimit(tokens, begin.tokens, end.tokens, spent)

    def reasoning_counter(self, prompt: Sequence[int], symbols_of: SymbolsOf) -> ReasoningCounter | None:
        """Return what counts the tokens of reasoning in the answer to a prompt that is no chat.

        None if this model's reasoning is not marked with fixed texts.
        """
        if self.think_markers is None:
            return None
        begin, end = self.think_markers
        opened = self.thought_of(prompt) is Thought.OPEN
        return ReasoningCounter(begin.tokens, end.tokens, symbols_of, opened)

    def after_reasoning(self, asked: Constraint, thought: Thought) -> Constraint:
        """Return the constraint that asks the same of what follows the reasoning."""
        if thought is Thought.NONE or self.think is None:
            return asked
        begin, end = self.think
        special = {text: token for text, token in self.special.items() if text in f"{begin}{end}"}
        return replace(asked, after=End(end, begin if thought is Thought.POSSIBLE else None, special))

    def thought_of(self, prompt: Sequence[int]) -> Thought:
        """Return where the answer to a prompt that is no chat begins: inside reasoning if the last marker opens it."""
        assert self.think_markers is not None
        opened, closed = (marker.tokens_since(prompt) for marker in self.think_markers)
        is_open = opened is not None and (closed is None or opened < closed)
        return Thought.OPEN if is_open else Thought.POSSIBLE

    def thought(self, prefix: str) -> Thought:
        """Return where the answer's message is after `prefix`."""
        if self.template is None or not self.template.reasons:
            return Thought.NONE
        parser = AnswerParser(self.template, prefix, [], True, self.new_id)
        if parser.reasoning_is_open:
            return Thought.OPEN
        return Thought.NONE if prefix.strip() else Thought.POSSIBLE

    def new_id(self) -> str:
        """Make the id of a tool call."""
        if self.short_ids:
            return "".join(secrets.choice(_LETTERS) for _ in range(9))
        return f"call_{secrets.token_hex(12)}"

    def prefix(self, prompt: Sequence[int], decode: Callable[[Sequence[int]], str]) -> str:
        """Return what the prompt holds of the answer's message; "" if its beginning is not found.

        Raises InternalError if the template's pattern takes too long.
        """
        assert self.template is not None
        for count in TAIL_TOKENS:
            text = decode(prompt[-count:])
            try:
                end = max((match.end() for match in self.template.anchors(text)), default=None)
            except TimeoutError as error:
                raise InternalError(
                    "the start anchor of the model's response template takes too long; set model.response_template"
                ) from error
            if end is not None:
                return text[end:]
            if count >= len(prompt):
                break
        return ""


PLAIN = AnswerStyle()


def find_template(
    model: Path, chat_template: Path | None, wanted: str, relative: Callable[[str], Path]
) -> tuple[ResponseTemplate | None, ChatFamily | None]:
    """Return the response template of a model and the family that it belongs to.

    Args:
        wanted: `model.response_template`: auto, none, the name of a family, or a JSON file.
        relative: resolves the path of a file.

    Raises:
        ModelError: the template cannot be read or is not valid.
    """
    if wanted == NONE:
        return None, None
    if wanted == AUTO:
        source = find_chat_template(model, chat_template)
        family = None if source is None else family_of(source.all_text)
        own = _own_template(model)
        if own is not None:
            return compile_template(own, f"{model}/tokenizer_config.json", trusted=False), family
    elif wanted in BY_NAME:
        family = BY_NAME[wanted]
    else:
        return _from_file(relative(wanted)), None
    if family is None:
        return None, None
    return compile_template(dict(family.template), family.name, True, family.tag_end), family


def _own_template(model: Path) -> dict[str, Any] | None:
    found = read_tokenizer_config(model).get("response_template")
    return found if isinstance(found, dict) else None


def _from_file(file: Path) -> ResponseTemplate:
    if not file.is_file():
        names = ", ".join((AUTO, NONE, *BY_NAME))
        raise ModelError(
            f"model.response_template: there is no file {file}; set one of {names}, or a JSON file"
        )
    return compile_template(read_json(file, MAX_TOKENIZER_CONFIG_BYTES), str(file), trusted=True)
