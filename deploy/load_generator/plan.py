"""Plans of requests: when each is due, the segments of its prompt, and the length of its answer.

A plan is a function of its parameters and a seed, so several servers can be given the same one. A prompt is a sequence
of segments, and segments with equal keys have equal tokens: prompts that begin with the same segments share a prefix.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from common.errors import ConfigError
from deploy.load_generator.trace import BLOCK_TOKENS, TraceRequest

FIRST_ID = 3  # tokens below are special in most vocabularies
OWN, SHARED = 0, 1  # kinds of segments: of one request, and of several


@dataclass(frozen=True, slots=True)
class Segment:
    """Tokens of a prompt that are determined by a key."""

    key: tuple[int, int]  # kind, number
    length: int


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """One request of a plan."""

    due: float  # seconds after the start of the run; 0 in a closed loop, whose requests wait for each other
    segments: tuple[Segment, ...]
    output: int  # tokens of the answer

    @property
    def input(self) -> int:
        """The tokens of its prompt."""
        return sum(each.length for each in self.segments)


@dataclass(frozen=True, slots=True)
class PromptShape:
    """Lengths of synthetic requests. With `groups`, each prompt begins with the prefix of a random group."""

    input: int  # tokens of the prompt, prefix included
    output: int
    groups: int = 0  # number of shared prefixes; 0: every prompt is new
    prefix: int = 0  # tokens of each shared prefix

    def __post_init__(self) -> None:
        if self.groups and not 0 < self.prefix < self.input:
            raise ConfigError(
                "prefix", f"a prefix of {self.prefix} tokens must be shorter than the prompt of {self.input}"
            )

    def segments(self, number: int, rng: random.Random) -> tuple[Segment, ...]:
        """Return the prompt of request `number`."""
        if not self.groups:
            return (Segment((OWN, number), self.input),)
        group = rng.randrange(self.groups)
        return Segment((SHARED, group), self.prefix), Segment((OWN, number), self.input - self.prefix)


def poisson_plan(rate: float, seconds: float, shape: PromptShape, seed: int) -> list[PlannedRequest]:
    """Return requests that arrive at random, `rate` per second on average, for `seconds`."""
    rng = random.Random(seed)
    plan: list[PlannedRequest] = []
    due = rng.expovariate(rate)
    while due < seconds:
        plan.append(PlannedRequest(due, shape.segments(len(plan), rng), shape.output))
        due += rng.expovariate(rate)
    return plan


def closed_plan(count: int, shape: PromptShape, seed: int) -> list[PlannedRequest]:
    """Return `count` requests for a closed loop."""
    rng = random.Random(seed)
    return [PlannedRequest(0.0, shape.segments(number, rng), shape.output) for number in range(count)]


@dataclass(frozen=True, slots=True)
class Replay:
    """The options of replaying a trace."""

    speed: float = 1.0  # 2: twice as many requests per second
    length_scale: float = 1.0  # multiplies prompts, answers and blocks, so that shares of prefixes stay
    seconds: float | None = None  # leave out requests that are due later
    max_input: int | None = None  # leave out prompts with more tokens, after scaling


def trace_plan(trace: Iterable[TraceRequest], replay: Replay) -> list[PlannedRequest]:
    """Return the requests of a trace at its own times."""
    plan = []
    for request in trace:
        due = request.timestamp / 1000 / replay.speed
        if replay.seconds is not None and due >= replay.seconds:
            break
        planned = PlannedRequest(
            due,
            tuple(_blocks(request, replay.length_scale)),
            max(round(request.output_length * replay.length_scale), 1),
        )
        if replay.max_input is None or planned.input <= replay.max_input:
            plan.append(planned)
    return plan


def _blocks(request: TraceRequest, scale: float) -> Iterator[Segment]:
    """Yield the segments of a prompt. Ends are rounded, not lengths, so that errors do not add up."""
    for index, hash_id in enumerate(request.hash_ids):
        start = index * BLOCK_TOKENS
        end = min(start + BLOCK_TOKENS, request.input_length)
        length = max(round(end * scale) - round(start * scale), 0 if index else 1)
        if length:
            yield Segment((SHARED, hash_id), length)


@dataclass(frozen=True, slots=True)
class PromptTokens:
    """Makes the token ids of the prompts of one run.

    A new salt makes prompts that no server has in its prefix cache from an earlier measurement.
    """

    vocabulary: int  # ids are drawn below this
    salt: int
    run: tuple[int, int]  # number of the load, seed: a run shares no prompt with another one

    def of(self, request: PlannedRequest) -> list[int]:
        """Return the token ids of a prompt."""
        return [token for each in request.segments for token in self._segment(each)]

    def _segment(self, segment: Segment) -> Sequence[int]:
        rng = np.random.default_rng((self.salt, *self.run, *segment.key))
        tokens: list[int] = rng.integers(FIRST_ID, self.vocabulary, segment.length).tolist()
        return tokens
