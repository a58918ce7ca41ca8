"""Turns a word problem into a prompt: few-shot documents for completions, messages for chat.

Training (`corpus`), evaluation and the tests all take their prompts from here, so that they stay consistent.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from deploy.tiny_models.word_problems import Problem

QUESTION = "Question:"
ANSWER = "\nAnswer:"
SHOT_END = "\n\n"

SYSTEM_SENTENCES = (
    "You are a careful assistant for grade school mathematics.",
    "Solve the problem step by step.",
    "Write one calculation on each line.",
    "Give the final number after four hash signs.",
    "Use only whole numbers.",
    "Do not add any explanation.",
    "Read the whole question before you answer.",
    "Be short and exact.",
    "The pupils are eight to ten years old.",
    "Every answer will be checked by a teacher.",
    "Never guess a number.",
    "Money is always counted in dollars.",
    "Names in the problems are invented.",
    "If nothing is left, the answer is zero.",
    "Keep the order of the story.",
    "Answer every question on its own.",
)


def few_shot_prompt(shots: Sequence[Problem], question: str) -> str:
    """Return a document of solved problems that ends where the next answer begins.

    It has no space at the end: an answer starts with one, in few-shot documents as in chat.
    """
    solved = "".join(f"{QUESTION} {shot.question}{ANSWER} {shot.answer}{SHOT_END}" for shot in shots)
    return f"{solved}{QUESTION} {question}{ANSWER}"


def chat_messages(shots: Sequence[Problem], question: str, system: str | None = None) -> list[dict[str, str]]:
    """Return chat messages: an optional system prompt, the shots as earlier turns, then the question."""
    messages = [{"role": "system", "content": system}] if system is not None else []
    for shot in shots:
        messages.append({"role": "user", "content": shot.question})
        messages.append({"role": "assistant", "content": shot.answer})
    messages.append({"role": "user", "content": question})
    return messages


def system_prompt(rng: random.Random, sentences: int) -> str:
    """Return a system prompt of `sentences` sentences, repeating them if there are not enough."""
    chosen: list[str] = []
    while len(chosen) < sentences:
        chosen += rng.sample(SYSTEM_SENTENCES, min(len(SYSTEM_SENTENCES), sentences - len(chosen)))
    return " ".join(chosen)
