"""Requests whose answers are known: each is asked of the undisturbed cluster first, twice."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tests.cluster.harness import Client

VOCABULARY = 700
LOGPROB_TOLERANCE = 2e-3  # a continuation computes the same numbers in batches of another shape


@dataclass(frozen=True)
class Case:
    """A body without `stream`."""

    name: str
    body: dict[str, Any]


@dataclass(frozen=True)
class Expected:
    """The whole answer. `tokens` are texts as logprobs show them; empty where none were asked for."""

    text: str
    tokens: list[str]
    logprobs: list[float]
    finish_reason: str


def make_cases(seed: int) -> list[Case]:
    """Prompts of 1 to 900 tokens, outputs of 1 to 160 and one of 900, which outlasts the restart of a node.

    They use every sampling feature that a continuation on another node must keep.
    """
    rng = random.Random(seed)
    features: Sequence[tuple[str, dict[str, Any]]] = (
        ("greedy", {"temperature": 0}),
        ("greedy", {"temperature": 0}),
        ("seeded", {"temperature": 0.9, "seed": 7}),
        ("top-p", {"temperature": 1.1, "seed": 11, "top_p": 0.9, "top_k": 40}),
        ("penalties", {"temperature": 0, "frequency_penalty": 0.6, "presence_penalty": 0.4}),
        ("repetition", {"temperature": 0.7, "seed": 3, "repetition_penalty": 1.2}),
    )
    cases = []
    for index, (prompt_tokens, max_tokens) in enumerate(
        [
            (1, 24),
            (15, 60),
            (16, 90),
            (17, 120),
            (40, 160),
            (64, 40),
            (90, 100),
            (130, 160),
            (200, 1),
            (256, 80),
            (333, 150),
            (480, 30),
            (640, 120),
            (900, 60),
            (30, 900),
        ]
    ):
        name, fields = features[index % len(features)]
        prompt = [rng.randrange(3, VOCABULARY) for _ in range(prompt_tokens)]
        body = {"prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, **fields}
        body |= {"logprobs": 0, "skip_special_tokens": False}
        cases.append(Case(f"{name}-{prompt_tokens}-{max_tokens}", body))
    return cases


async def learn_answers(client: Client, cases: Sequence[Case]) -> dict[str, Expected]:
    """Ask each twice; AssertionError where the undisturbed cluster does not repeat itself."""
    answers: dict[str, Expected] = {}
    for case in cases:
        first, second = [await _ask(client, case.body) for _ in range(2)]
        assert (first.text, first.tokens) == (second.text, second.tokens), f"{case.name} is not repeatable"
        answers[case.name] = first
    return answers


def with_stop_strings(cases: Sequence[Case], answers: dict[str, Expected]) -> list[Case]:
    """Some of the cases again, ending at a string that their known answer contains."""
    made = []
    for case in cases[4:8]:
        tokens = answers[case.name].tokens
        stop = "".join(tokens[len(tokens) * 2 // 3 :][:3])
        if stop.strip():
            made.append(Case(f"stop-{case.name}", {**case.body, "stop": [stop]}))
    return made


async def _ask(client: Client, body: dict[str, Any]) -> Expected:
    async with client.session.post("/v1/completions", json=body) as response:
        answer = await response.json()
        if response.status != 200:
            raise AssertionError(f"the undisturbed cluster answered {response.status}: {answer}")
    return expected_of(answer["choices"][0])


def expected_of(choice: dict[str, Any]) -> Expected:
    listed = choice["logprobs"]
    return Expected(choice["text"], listed["tokens"], listed["token_logprobs"], choice["finish_reason"])
