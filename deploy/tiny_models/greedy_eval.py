"""Scores a model in this process: greedy answers to held-out problems."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from tokenizers import Tokenizer

from deploy.tiny_models import tokenizer as family
from deploy.tiny_models.generation import greedy
from deploy.tiny_models.language_model import LanguageModel
from deploy.tiny_models.prompts import few_shot_prompt
from deploy.tiny_models.word_problems import Problem, exam, is_right

MAX_NEW_TOKENS = 64  # the longest correct answer has 53
PROMPT_TOKENS_PER_BATCH = 100_000

Mode = Literal["chat", "completions"]


@dataclass(frozen=True, slots=True)
class Suite:
    """One row of the model card."""

    name: str
    mode: Mode
    shots: int
    count: int
    seed: int = 2_024


@dataclass(slots=True)
class Score:
    """Correct answers, in total and per template."""

    suite: Suite
    prompt_tokens: int  # mean
    asked: Counter[str] = field(default_factory=Counter)
    right: Counter[str] = field(default_factory=Counter)
    wrong: list[tuple[Problem, str]] = field(default_factory=list)

    @property
    def value(self) -> float:
        """The share of correct answers."""
        return self.right.total() / max(1, self.asked.total())


def prompts(suite: Suite) -> Iterator[tuple[Problem, str]]:
    """Yield problems with their prompt as text, special tokens included."""
    for shots, problem in exam(suite.count, suite.seed, suite.shots):
        if suite.mode == "completions":
            yield problem, family.BOS + few_shot_prompt(shots, problem.question)
        else:
            turns = [
                f"{family.USER} {shot.question}{family.END}\n{family.ASSISTANT} {shot.answer}{family.END}\n"
                for shot in shots
            ]
            last = f"{family.USER} {problem.question}{family.END}\n{family.ASSISTANT}"
            yield problem, f"{family.BOS}{''.join(turns)}{last}"


def evaluate(model: LanguageModel, tokenizer: Tokenizer, suite: Suite) -> Score:
    """Answer the whole suite greedily, sorted by length so that padding stays small."""
    asked = list(prompts(suite))
    ids = [tokenizer.encode(text, add_special_tokens=False).ids for _, text in asked]
    order = sorted(range(len(ids)), key=lambda index: len(ids[index]))
    pad, end = family.id_of(tokenizer, family.PAD), family.id_of(tokenizer, family.END)
    score = Score(suite, prompt_tokens=sum(map(len, ids)) // max(1, len(ids)))
    per_batch = max(1, PROMPT_TOKENS_PER_BATCH // max(map(len, ids)))
    for start in range(0, len(order), per_batch):
        chosen = order[start : start + per_batch]
        new = greedy(model, [ids[index] for index in chosen], pad, end, MAX_NEW_TOKENS)
        texts = tokenizer.decode_batch(new)
        for index, text in zip(chosen, texts, strict=True):
            problem = asked[index][0]
            score.asked[problem.template] += 1
            if is_right(problem, text):
                score.right[problem.template] += 1
            else:
                score.wrong.append((problem, text))
    return score
