"""Requests with random constraints, and what is right or wrong about the answers of a cluster."""

from __future__ import annotations

import asyncio
import json
import math
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

import aiohttp
import tokenizers

from deploy.tiny_models.prompts import few_shot_prompt
from deploy.tiny_models.word_problems import take
from tests.cluster.harness import Client
from tests.cluster.masked_reference import MaskedReference, Question
from tests.fakes.random_grammars import Case, schema_case, text_case

SAID = 80  # tokens per answer
FREE_SAID = 24
AT_ONCE = 24
BLOCK = 40  # more than are answered at once
Config = dict[str, Any]
Answered = tuple[int, Config]  # HTTP status and body


class Posted(Protocol):
    """A request."""

    async def post(self, session: aiohttp.ClientSession) -> Answered: ...


PostedT = TypeVar("PostedT", bound=Posted)


@dataclass(frozen=True)
class Asked:
    """A request and its name, `schema/17` or `text/3`, which `--only` takes; "" without a constraint."""

    name: str
    question: Question
    case: Case | None

    def body(self) -> Config:
        asked = self.question
        return {
            "prompt": asked.prompt,
            "max_tokens": asked.max_tokens,
            "temperature": asked.temperature,
            "seed": asked.seed,
            "return_token_ids": True,
            **asked.fields,
        }

    async def post(self, session: aiohttp.ClientSession) -> Answered:
        async with session.post("/v1/completions", json=self.body()) as response:
            return response.status, await response.json()


COUNTED = ("answers", "free", "tokens", "cut_off", "invalid", "wrong", "near_ties", "errors")


@dataclass
class Outcome:
    """What the answers of one cluster were."""

    counts: Counter[str] = field(default_factory=lambda: Counter(dict.fromkeys(COUNTED, 0)))
    first_problem: str = ""

    def problem(self, kind: str, asked: Asked, told: str) -> None:
        self.counts[kind] += 1
        if not self.first_problem:
            self.first_problem = f"{kind} {asked.name or 'free'} seed {asked.question.seed}: {told}"

    def judge(self, asked: Asked, choice: Config, reference: MaskedReference) -> None:
        """Count an answer."""
        ids, finish = choice["token_ids"], choice["finish_reason"]
        self.counts["tokens"] += len(ids)
        self.counts["answers" if asked.case is not None else "free"] += 1
        if asked.case is not None and finish == "length":
            self.counts["cut_off"] += 1
        elif asked.case is not None and not accepted(asked.case, choice["text"]):
            self.problem("invalid", asked, choice["text"])
        difference = reference.difference(asked.question, ids, finish)
        if difference is not None:
            self.problem("near_ties" if difference.near_tie else "wrong", asked, str(difference))


def accepted(case: Case, text: str) -> bool:
    try:
        return case.accepts(text)
    except ValueError:
        return False


class Questions:
    """Makes the requests of a run, always the same."""

    def __init__(self, directory: Path) -> None:
        self._encoder = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))

    def of(self, name: str) -> list[Asked]:
        """Return the greedy and the seeded request of a case."""
        kind, _, number = name.partition("/")
        case = (schema_case if kind == "schema" else text_case)(int(number))
        prompt, seed = self._prompt(name), random.Random(name).getrandbits(62)
        return [
            Asked(name, Question(prompt, case.fields, temperature, seed, SAID), case)
            for temperature in (0.0, 1.0)
        ]

    def free(self, number: int) -> Asked:
        prompt = self._prompt(f"free/{number}")
        return Asked("", Question(prompt, {}, float(number % 2), number, FREE_SAID), None)

    def all(self, names: Sequence[str]) -> list[Asked]:
        """Return the requests of the cases. In every second block of them, free ones are in between."""
        asked = [each for name in names for each in self.of(name)]
        block, mixed = min(BLOCK, len(asked) // 2), list[Asked]()
        for index, own in enumerate(asked):
            mixed += (own, self.free(index)) if index // block % 2 else (own,)
        return mixed

    def _prompt(self, name: str) -> list[int]:
        draw = random.Random(name)
        *shots, last = take(draw.randint(1, 4), draw.randrange(1000), "heldout")
        text = few_shot_prompt(shots, last.question) + draw.choice(("", " The answer in JSON: ", ' {"'))
        ids: list[int] = self._encoder.encode(text, add_special_tokens=False).ids
        return ids[-draw.randint(1, 160) :]


async def ask_all(
    client: Client, asked: Sequence[PostedT], seconds: float = math.inf
) -> list[tuple[PostedT, Answered]]:
    """Return the status and body of every answer, in order. No request is sent after `seconds`."""
    gate, deadline = asyncio.Semaphore(AT_ONCE), time.monotonic() + seconds

    async def one(each: PostedT) -> tuple[PostedT, Answered] | None:
        async with gate:
            if time.monotonic() > deadline:
                return None
            return each, await each.post(client.session)

    return [each for each in await asyncio.gather(*map(one, asked)) if each is not None]


def judged(answers: Sequence[tuple[Asked, Answered]], reference: MaskedReference) -> Outcome:
    """Compare every answer with the reference, and the constrained ones with their constraints."""
    outcome = Outcome()
    for each, (status, body) in answers:
        if status == 200:
            outcome.judge(each, body["choices"][0], reference)
        else:
            outcome.problem("errors", each, json.dumps(body)[:300])
    return outcome


async def expect_constrained(client: Client, asked: Sequence[Asked], reference: MaskedReference) -> None:
    """Ask everything at once and expect the reference's answers, some of which are complete."""
    outcome = judged(await ask_all(client, asked), reference)
    wrong = {name: outcome.counts[name] for name in ("invalid", "wrong", "errors") if outcome.counts[name]}
    assert not wrong, (wrong, outcome.first_problem)
    assert outcome.counts["cut_off"] < outcome.counts["answers"]
