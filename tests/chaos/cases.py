"""Requests with known answers: each is first sent to the undisturbed cluster."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from deploy.eval_cli import picture_body
from deploy.tiny_models.vision.questions import questions
from tests.cluster.harness import Client

VOCABULARY = range(8, 700)  # ids without a special meaning
UNDISTURBED_SECONDS = 240.0  # in which a cluster without faults answers all cases, on a busy machine, too
LOGPROB_TOLERANCE = 2e-3  # a continuation computes the same numbers in batches of another shape


class UndisturbedHang(AssertionError):
    """A request hung before any fault began: frames were lost because the machine was busy."""


@dataclass(frozen=True)
class Case:
    """One request; the body does not contain `stream`."""

    name: str
    body: dict[str, Any]
    path: str = "completions"


@dataclass(frozen=True)
class Expected:
    """The complete answer. `tokens` are texts as logprobs show them; empty if none were requested."""

    text: str
    tokens: list[str]
    logprobs: list[float]
    finish_reason: str


def make_cases(seed: int) -> list[Case]:
    """Build requests with prompts of 1 to 900 tokens and outputs of 1 to 160, and one output that outlasts a restart.

    They use every sampling feature that a continuation on another node must preserve.
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
        prompt = rng.choices(VOCABULARY, k=prompt_tokens)
        body = {"prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, **fields}
        body |= {"logprobs": 0, "skip_special_tokens": False}
        cases.append(Case(f"{name}-{prompt_tokens}-{max_tokens}", body))
    return cases


def picture_cases() -> list[Case]:
    """Chat requests with one and two pictures, greedy and sampled."""
    shown = {len(each.images): each for each in islice(questions(12, "heldout"), 16)}
    listed = {"logprobs": True, "max_tokens": 48, "ignore_eos": True, "skip_special_tokens": False}
    features: dict[str, dict[str, Any]] = {
        "greedy": {"temperature": 0},
        "seeded": {"temperature": 0.9, "seed": 5},
        "repetition": {"temperature": 0, "repetition_penalty": 1.3},
    }
    return [
        Case(
            f"pictures-{count}-{name}", {**picture_body(shown[count]), **listed, **fields}, "chat/completions"
        )
        for count in (1, 2)
        for name, fields in features.items()
    ]


async def learn_answers(client: Client, cases: Sequence[Case]) -> dict[str, Expected]:
    """Send all requests together. Raises UndisturbedHang if the undisturbed cluster does not answer in time."""
    try:
        async with asyncio.timeout(UNDISTURBED_SECONDS):
            answers = await asyncio.gather(*(_ask(client, case) for case in cases))
    except TimeoutError:
        raise UndisturbedHang(
            f"no answer within {UNDISTURBED_SECONDS:.0f} s, and no fault had begun"
        ) from None
    return {case.name: answer for case, answer in zip(cases, answers, strict=True)}


def with_stop_strings(cases: Sequence[Case], answers: dict[str, Expected]) -> list[Case]:
    """Return some of the cases again, with a stop string that their known answer contains."""
    made = []
    for case in cases[4:8]:
        tokens = answers[case.name].tokens
        stop = "".join(tokens[len(tokens) * 2 // 3 :][:3])
        if stop.strip():
            made.append(Case(f"stop-{case.name}", {**case.body, "stop": [stop]}))
    return made


async def _ask(client: Client, case: Case) -> Expected:
    async with client.session.post(f"/v1/{case.path}", json=case.body) as response:
        answer = await response.json()
        if response.status != 200:
            raise AssertionError(f"the undisturbed cluster answered {response.status}: {answer}")
    choice = answer["choices"][0]
    return Expected(*said(choice), choice["finish_reason"])


def said(choice: dict[str, Any]) -> tuple[str, list[str], list[float]]:
    """Return (text, tokens, logprobs) of a choice or a stream event, for completions and chat."""
    listed = choice.get("logprobs") or {}
    if "text" in choice:
        return choice["text"], listed.get("tokens", []), listed.get("token_logprobs", [])
    message = choice["delta"] if "delta" in choice else choice["message"]
    content = listed.get("content") or []
    return (
        message.get("content") or "",
        [each["token"] for each in content],
        [each["logprob"] for each in content],
    )
