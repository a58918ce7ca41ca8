"""Synthetic traces with the published statistics of Mooncake's conversation and agent traces.

    python -m tests.bench.placement_traces agents FILE [--rate 6.67] [--seconds 90] [--seed 1]

writes one for `deploy/bench URL --trace FILE`.

Conversation: 12,031 requests in 59 minutes, in bunches every 3 s; prompts of 12,035 tokens in the mean, 6,909 in the
median, 27,367 and 85,401 at the 90th and 99th percentile (a log-normal distribution has all four); answers of 343
tokens, 597 at the 90th percentile; 37 % of the tokens are in blocks that came before; half of the next turns come
within 114 s, 90 % within 519 s. Agents: 6.67 requests per second, 8,596 and 182 tokens. Of their reuse no statistics
are published with these: here 40 agents share long instructions, their steps follow each other within seconds, and 62 %
of the tokens come again, as in Alibaba's trace of an API.
"""

from __future__ import annotations

import argparse
import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from random import Random
from statistics import fmean, quantiles

import msgspec

from deploy.load_generator.trace import BLOCK_TOKENS, TraceRequest

SECONDS_PER_BUNCH = 3.0


@dataclass(frozen=True, slots=True)
class LogNormal:
    """A distribution given by its median and its 90th percentile."""

    median: float
    p90: float

    def draw(self, rng: Random) -> float:
        return self.median * math.exp(rng.gauss(0.0, math.log(self.p90 / self.median) / 1.2816))


@dataclass(frozen=True, slots=True)
class TraceShape:
    """The parameters of a synthetic trace."""

    name: str
    rate: float  # requests per second that the published trace has; one cluster size is one prefill node
    bunched: bool  # arrivals in bunches every 3 s; otherwise they are a Poisson process
    first: LogNormal  # tokens of a conversation's first prompt, after the shared instructions
    added: LogNormal  # tokens that a further turn adds to prompt and answer
    answer: LogNormal
    gap: LogNormal  # seconds from a request to the next one of its conversation
    continues: float  # probability that a request is followed by another one of its conversation
    instructions: tuple[int, int]  # least and most blocks that all conversations of one application share
    applications: int


CONVERSATION = TraceShape(
    name="conversation",
    rate=3.4,
    bunched=True,
    first=LogNormal(4300, 19_500),
    added=LogNormal(1900, 14_000),
    answer=LogNormal(295, 597),
    gap=LogNormal(114, 519),
    continues=0.37,
    instructions=(1, 1),
    applications=1,
)
AGENTS = TraceShape(
    name="agents",
    rate=6.67,
    bunched=False,
    first=LogNormal(2050, 7000),
    added=LogNormal(1600, 4900),
    answer=LogNormal(120, 390),
    gap=LogNormal(4, 15),
    continues=0.55,
    instructions=(2, 7),
    applications=40,
)
SHAPES = {shape.name: shape for shape in (CONVERSATION, AGENTS)}


class SessionRequest(TraceRequest, frozen=True):
    """A request of a synthetic trace, whose conversation is known."""

    conversation: int = 0


@dataclass(order=True, slots=True)
class _Turn:
    """The next request of a conversation."""

    due: float
    number: int
    blocks: list[int] = field(compare=False)  # of the prompt so far, whole ones
    tokens: int = field(compare=False)


def trace(shape: TraceShape, rate: float, seconds: float, seed: int) -> Iterator[SessionRequest]:
    """Yield the requests of a trace with a mean rate, ordered by time.

    The rate counts further turns too. Those that are due after the end are left out, as in a trace that is cut.
    """
    rng, ids, numbers = Random(seed), count(1), count()
    applications = [
        [next(ids) for _ in range(rng.randint(*shape.instructions))] for _ in range(shape.applications)
    ]
    popularity = [1.0 / (rank + 1) for rank in range(shape.applications)]
    turns: list[_Turn] = []
    now = 0.0
    while True:
        # Each conversation has 1 / (1 - continues) requests in the mean.
        now += rng.expovariate(rate * (1.0 - shape.continues))
        while turns and turns[0].due <= min(now, seconds):
            yield _request(shape, heapq.heappop(turns), turns, rng, ids)
        if now > seconds:
            return
        shared = rng.choices(applications, popularity)[0]
        tokens = len(shared) * BLOCK_TOKENS + int(shape.first.draw(rng))
        heapq.heappush(turns, _Turn(now, next(numbers), [*shared], tokens))


def _request(
    shape: TraceShape, turn: _Turn, turns: list[_Turn], rng: Random, ids: Iterator[int]
) -> SessionRequest:
    """Return the request of a turn, and schedule the next one of its conversation."""
    tokens = max(min(turn.tokens, 128_000), 16)
    whole = tokens // BLOCK_TOKENS
    blocks = [*turn.blocks[:whole], *(next(ids) for _ in range(whole - len(turn.blocks)))]
    answer = max(int(shape.answer.draw(rng)), 1)
    if rng.random() < shape.continues:
        added = answer + int(shape.added.draw(rng))
        following = _Turn(turn.due + shape.gap.draw(rng), turn.number, blocks, tokens + added)
        heapq.heappush(turns, following)
    due = turn.due // SECONDS_PER_BUNCH * SECONDS_PER_BUNCH if shape.bunched else turn.due
    partial = (next(ids),) if tokens % BLOCK_TOKENS else ()
    return SessionRequest(1000 * due, tokens, answer, (*blocks, *partial), turn.number)


def statistics(requests: Sequence[TraceRequest]) -> dict[str, float]:
    """Return the statistics by which published traces are described."""
    lengths = [each.input_length for each in requests]
    cuts = quantiles(lengths, n=100)
    seen: set[int] = set()
    again = total = 0
    uses: dict[int, int] = {}
    for each in requests:
        for block in each.hash_ids:
            total += 1
            again += block in seen
            seen.add(block)
            uses[block] = uses.get(block, 0) + 1
    return {
        "requests": len(requests),
        "input_mean": round(fmean(lengths)),
        "input_p50": round(cuts[49]),
        "input_p90": round(cuts[89]),
        "input_p99": round(cuts[98]),
        "output_mean": round(fmean(each.output_length for each in requests)),
        "blocks_used_once": round(sum(times == 1 for times in uses.values()) / len(uses), 3),
        "ideal_hit_rate": round(again / total, 3),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("shape", choices=sorted(SHAPES))
    parser.add_argument("file", type=Path)
    parser.add_argument(
        "--rate", type=float, help="requests per second; default: that of the published trace"
    )
    parser.add_argument("--seconds", type=float, default=90.0)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(arguments)
    shape = SHAPES[options.shape]
    requests = list(trace(shape, options.rate or shape.rate, options.seconds, options.seed))
    options.file.write_bytes(b"".join(msgspec.json.encode(each) + b"\n" for each in requests))
    print(statistics(requests))


if __name__ == "__main__":
    main()
