"""Constrains, decodes, parses and formats the answer of one chat."""

from __future__ import annotations

from collections.abc import Sequence

from common.errors import InvalidRequest
from common.messages.generation import ThinkingLimit
from router.answers.assistant_format import AnswerHead, AssistantFormat, Shown
from router.answers.openai_responses import ChatFormat
from router.chat.answer_parser import AnswerParser
from router.chat.answer_style import AnswerStyle
from router.chat.call_grammar import Thought
from router.grammar.constraint import Constraint, JsonSchema
from router.requests.chat_rules import ChatRules
from router.requests.openai_schema import Message
from router.tokens.tokenizer import Tokenizer


def assistant_text(last: Message) -> str:
    """Return the text of a chat's last message if it is the assistant's."""
    if last.role != "assistant" or last.content is None:
        return ""
    if isinstance(last.content, str):
        return last.content
    return "".join(part.plain_text or "" for part in last.content)


class ChatAnswer:
    """Handles one answer, by the request's fields, the model and the prompt. Uses a parser only where one is needed."""

    def __init__(
        self, rules: ChatRules, style: AnswerStyle, prompt: Sequence[int], tokenizer: Tokenizer
    ) -> None:
        self._rules = rules
        self._style = style
        self._prompt = prompt
        self._prefix = ""
        if rules.parsed or rules.reasoning.expected:
            self._prefix = style.prefix(prompt, lambda ids: tokenizer.decode(ids, skip_special_tokens=False))

    @property
    def kept(self) -> frozenset[int]:
        """Special tokens that must be decoded, because markers consist of them."""
        return self._style.kept if self._rules.parsed else frozenset()

    def constraint(self, asked: Constraint | None) -> Constraint | None:
        """Return what the answer must match; `asked` is what the fields for structured output ask for.

        As in OpenAI's API, response_format concerns text: an answer may call tools instead, and a forced call is no
        text. Where no marker tells calls from text, an answer that is not forced to call has that format. Raises
        InvalidRequest if both tools and another `asked` constrain the answer.
        """
        if asked is not None and asked.field.startswith("response_format"):
            if self._rules.calls.forced:
                asked = None
            elif self._style.calls is None or self._style.calls.trigger is None:
                return self._after_reasoning(asked)
            elif self._rules.calls.tools and isinstance(asked.form, JsonSchema):
                # A marker tells calls from JSON.
                either = self._rules.calls_or_json(self._style, self._prefix, asked.form.schema)
                return Constraint(asked.field, either)
        calls = self._rules.call_grammar(self._style, self._prefix)
        if calls is None:
            return asked if asked is None else self._after_reasoning(asked)
        field, grammar = calls
        if asked is not None:
            raise InvalidRequest(
                f"{field} and {asked.field} both constrain the answer; send only one", param=asked.field
            )
        # What may not compile is the schema of a tool.
        return Constraint("tools", grammar)

    def thinking_limit(self) -> ThinkingLimit | None:
        """Return the limit of reasoning tokens; None without one, or if the prompt is past the reasoning."""
        budget = self._rules.reasoning.budget
        if budget is None:
            return None
        thought = self._style.thought(self._prefix)
        if thought is Thought.NONE:
            return None
        return self._style.thinking_limit(budget.tokens, self._prompt, thought)

    def format(self, head: AnswerHead, choices: int) -> ChatFormat:
        """Return the format of the answer."""
        rules, style = self._rules, self._style
        if not rules.parsed:
            return ChatFormat(*head)
        assert style.template is not None
        parsers = [
            AnswerParser(
                style.template, self._prefix, rules.calls.tools, rules.reasoning.separated, style.new_id
            )
            for _ in range(choices)
        ]
        shown = Shown(
            style.reasoning_fields if rules.reasoning.shown else (),
            rules.calls.parallel,
            "stop" if rules.calls.named else "tool_calls",
            rules.reasoning.streamed,
            rules.reasoning.separated,
        )
        return AssistantFormat(head, parsers, shown)

    def _after_reasoning(self, asked: Constraint) -> Constraint:
        """Constrain what follows the model's reasoning."""
        reasons = self._rules.parsed or self._rules.reasoning.expected
        return self._style.after_reasoning(
            asked, self._style.thought(self._prefix) if reasons else Thought.NONE
        )
