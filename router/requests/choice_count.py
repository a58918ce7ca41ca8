"""The fields `n` and `best_of`: several answers to one prompt, drawn with different seeds."""

from __future__ import annotations

from msgspec.structs import replace

from common.errors import InvalidRequest
from common.messages.generation import SamplingParams
from router.requests.openai_schema import SharedFields

MAX_CHOICES = 8  # per prompt
SEEDS = 2**63


def choice_count(body: SharedFields) -> int:
    """Return how many answers to each prompt a request asks for. Raises InvalidRequest."""
    count = 1 if body.n is None else body.n
    if not 1 <= count <= MAX_CHOICES:
        raise InvalidRequest(f"n must be from 1 to {MAX_CHOICES}", param="n")
    if body.best_of not in (None, 1, count):
        raise InvalidRequest(
            "best_of is not supported, because answers are not ranked; leave it out or send the value of n",
            param="best_of",
        )
    return count


def samplings(first: SamplingParams, count: int) -> list[SamplingParams]:
    """Return the sampling of each choice: as in vLLM, choice i is drawn with seed + i. Raises InvalidRequest."""
    if count > 1 and first.greedy:
        raise InvalidRequest(
            "n must be 1 at temperature 0, where all choices would be equal; raise the temperature", param="n"
        )
    return [first, *(replace(first, seed=(first.seed + i) % SEEDS) for i in range(1, count))]
