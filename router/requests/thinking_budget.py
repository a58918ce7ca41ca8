"""The maximum number of reasoning tokens of a request, under the names of several APIs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from msgspec.structs import replace

from common.errors import InvalidRequest
from common.messages.generation import ThinkingLimit, TokenRules
from router.chat.answer_style import AnswerStyle
from router.grammar.constraint import Constraint
from router.requests.field_rules import RareFields
from router.requests.openai_schema import ChatRequest, CompletionRequest, SharedFields, TokenIds

NO_LIMIT = -1  # as in vLLM
MAX_BUDGET = (1 << 31) - 1
# Fields of a completions request that concern the reasoning of its answers.
REASONING_FIELDS = RareFields(
    "thinking_token_budget", "custom_params", "max_thinking_tokens", "require_reasoning"
)


class Budget(NamedTuple):
    """The maximum number of reasoning tokens, and the field that sets it."""

    tokens: int
    field: str


def asked_budget(request: SharedFields, style: AnswerStyle) -> Budget | None:
    """Return the lowest of the limits that a request sets; None without any.

    Raises InvalidRequest, which names the field, for a limit that cannot be enforced in answers of this style.
    """
    given = {"thinking_token_budget": request.thinking_token_budget}
    if request.custom_params is not None:
        given["custom_params.thinking_budget"] = request.custom_params.thinking_budget
    if isinstance(request, CompletionRequest):
        given["max_thinking_tokens"] = request.max_thinking_tokens
    if isinstance(request, ChatRequest):
        if request.reasoning is not None:
            given["reasoning.max_tokens"] = request.reasoning.max_tokens
        if request.thinking is not None:
            given["thinking.budget_tokens"] = request.thinking.budget_tokens
    budgets = list[Budget]()
    for field, tokens in given.items():
        if tokens is None or tokens == NO_LIMIT:
            continue
        if not 0 <= tokens <= MAX_BUDGET:
            raise InvalidRequest(f"{field} must be from 0 to {MAX_BUDGET}, or -1 for no limit", param=field)
        if style.think_markers is None:
            raise _unenforceable(field, style)
        budgets.append(Budget(tokens, field))
    return min(budgets, default=None)


def limit_reasoning(
    request: CompletionRequest, asked: Constraint | None, style: AnswerStyle, prompt: TokenIds
) -> tuple[Constraint | None, ThinkingLimit | None]:
    """Return the constraint and the limit of the answer to a prompt that is no chat.

    With a limit or require_reasoning the answer may begin with reasoning, and `asked` constrains what follows it.
    Raises InvalidRequest, which names the field. Without any of REASONING_FIELDS there is nothing to do.
    """
    budget = asked_budget(request, style)
    if budget is None and not request.require_reasoning:
        return asked, None
    if style.think_markers is None:
        raise _unenforceable("require_reasoning", style)
    thought = style.thought_of(prompt)
    constraint = None if asked is None else style.after_reasoning(asked, thought)
    return constraint, None if budget is None else style.thinking_limit(budget.tokens, prompt, thought)


def with_limit(rules: TokenRules | None, limit: ThinkingLimit) -> TokenRules:
    """Return rules with a limit of reasoning tokens. Raises InvalidRequest if they forbid the marker that ends it."""
    rules = TokenRules() if rules is None else rules
    field = None
    if rules.allowed and not set(limit.end) <= set(rules.allowed):
        field = "allowed_token_ids"
    elif any(_contains(limit.end, word) for word in rules.bad_words):
        field = "bad_words"
    if field is not None:
        ids = ", ".join(map(str, limit.end))
        raise InvalidRequest(
            f"{field} forbids the marker that ends the reasoning once it has as many tokens as the request allows; its "
            f"token ids: {ids}",
            param=field,
        )
    return replace(rules, thinking=limit)


def _unenforceable(field: str, style: AnswerStyle) -> InvalidRequest:
    obstacle = "the markers of this model's reasoning are not fixed texts"
    if style.template is None or not style.template.reasons:
        obstacle = "this model has no response template with reasoning (model.response_template)"
    return InvalidRequest(f"{field} cannot be enforced: {obstacle}; leave it out", param=field)


def _contains(tokens: Sequence[int], part: Sequence[int]) -> bool:
    return any(tuple(tokens[at : at + len(part)]) == tuple(part) for at in range(len(tokens)))
