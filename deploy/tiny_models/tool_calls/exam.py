"""Scores the model in this process: held-out conversations with real calls, results and answers, all greedy."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tokenizers import Tokenizer

from deploy.tiny_models.drafts.measure import Answered
from deploy.tiny_models.generation import greedy
from deploy.tiny_models.language_model import LanguageModel
from deploy.tiny_models.tokenizer import id_of
from deploy.tiny_models.tool_calls.chat_form import (
    CALL,
    CALL_END,
    END,
    FULL,
    PAD,
    START,
    THINK,
    THINK_END,
    Turns,
    results,
    segments,
)
from deploy.tiny_models.tool_calls.conversations import Conversation

MAX_NEW_TOKENS = 192
PROMPT_TOKENS_PER_BATCH = 100_000
EMPTY_THOUGHT = f"{THINK}\n\n{THINK_END}\n\n"
_CALL = re.compile(rf"{CALL}\s*(.*?)\s*{CALL_END}", re.DOTALL)


@dataclass(slots=True)
class ToolScore:
    """The result of an exam."""

    name: str
    asked: Counter[str] = field(default_factory=Counter)  # conversations per kind
    right: Counter[str] = field(default_factory=Counter)
    calls: int = 0
    valid_calls: int = 0
    expected: int = 0  # conversations whose calls are exactly the right ones
    wrong: list[tuple[Conversation, str]] = field(default_factory=list)
    answered: list[Answered] = field(default_factory=list)  # every turn, to measure drafts

    @property
    def value(self) -> float:
        """The share of conversations that end with the right answer."""
        return self.right.total() / max(1, self.asked.total())

    @property
    def valid(self) -> float:
        """The share of calls that a tool takes."""
        return self.valid_calls / max(1, self.calls)


@dataclass(slots=True)
class _Taken:
    """One conversation while it is held."""

    conversation: Conversation
    prompt: str
    said: str = ""

    def calls(self) -> list[Any]:
        return [_json(text) for text in _CALL.findall(self.said)]


def evaluate(
    model: LanguageModel, tokenizer: Tokenizer, name: str, asked: Sequence[Conversation], thinks: bool
) -> ToolScore:
    """Hold all conversations: at most one turn with calls, and the answer."""
    score = ToolScore(name)
    turns = Turns(thinks=thinks, first=True, second=True, keeps=thinks)
    taken = [_Taken(each, _prompt(each, turns)) for each in asked]
    _generate(model, tokenizer, taken, score)
    followed = []
    for one in taken:
        found = _results_of(one, score)
        if found is not None:
            before = one.prompt.removesuffix(EMPTY_THOUGHT)
            opened = "" if thinks else EMPTY_THOUGHT
            text = f"{before}{one.said}{END}\n{results(found)}{START}assistant\n{opened}"
            followed.append(_Taken(one.conversation, text))
        else:
            _mark(one, score)
    if followed:
        _generate(model, tokenizer, followed, score)
    for one in followed:
        _mark(one, score)
    return score


def _prompt(conversation: Conversation, turns: Turns) -> str:
    before = []
    for text, weight in segments(conversation, turns):
        if weight == FULL:
            break
        before.append(text)
    return "".join(before)


def _results_of(one: _Taken, score: ToolScore) -> list[str] | None:
    """Return what the tools answer; None if the turn has no calls or one that no tool takes."""
    found, calls = [], one.calls()
    for call in calls:
        result = None
        if isinstance(call, dict):
            result = one.conversation.respond(str(call.get("name")), call.get("arguments"))
        score.calls += 1
        score.valid_calls += result is not None
        found.append(result)
    wanted = [
        {"name": each.tool.name, "arguments": each.arguments} for each in one.conversation.exchange.calls
    ]
    score.expected += calls == wanted
    complete = [each for each in found if each is not None]
    return complete if complete and len(complete) == len(found) else None


def _mark(one: _Taken, score: ToolScore) -> None:
    kind = one.conversation.kind
    answer = one.said.rpartition(THINK_END)[2]
    right = CALL not in answer and one.conversation.is_right(answer)
    score.asked[kind] += 1
    score.right[kind] += right
    if not right:
        score.wrong.append((one.conversation, one.said))


def _generate(model: LanguageModel, tokenizer: Tokenizer, taken: Sequence[_Taken], score: ToolScore) -> None:
    pad, end = id_of(tokenizer, PAD), id_of(tokenizer, END)
    ids = [tokenizer.encode(each.prompt, add_special_tokens=False).ids for each in taken]
    order = sorted(range(len(taken)), key=lambda index: len(ids[index]))
    per_batch = max(1, PROMPT_TOKENS_PER_BATCH // (len(ids[order[-1]]) + MAX_NEW_TOKENS))
    for start in range(0, len(order), per_batch):
        chosen = order[start : start + per_batch]
        new = greedy(model, [ids[index] for index in chosen], pad, end, MAX_NEW_TOKENS)
        for index, tokens in zip(chosen, new, strict=True):
            taken[index].said = tokenizer.decode(tokens)
            score.answered.append(Answered([*ids[index], *tokens], len(ids[index])))


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None
