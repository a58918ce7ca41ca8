"""Requests with every sampling parameter, one at a time and combined, whose texts differ from those without it."""

from __future__ import annotations

from typing import Any

from common.messages.generation import SamplingParams, TokenRules
from tests.fakes.node_cluster import Call, NodeCluster
from tests.fakes.scenarios import prompt_of
from tests.fakes.tiny_model import VOCAB

RANDOM = {"temperature": 0.9, "seed": 11}
BIAS = ((3, 2.5), (8, -100.0), (20, 4.0), (41, 1.0))
STOPS = tuple(range(2, VOCAB, 3))
EVERYTHING: dict[str, Any] = {
    "repetition_penalty": 1.25,
    "presence_penalty": 0.4,
    "frequency_penalty": 0.6,
    "logit_bias": BIAS,
    "min_tokens": 6,
    "stop_token_ids": STOPS[1:],
}
# A dozen tokens and hardly any pair of them: words of one, two and three tokens forbid some of the likeliest.
PAIRS = tuple((first, last) for first in range(0, VOCAB, 2) for last in range(0, VOCAB, 8))
RULES = TokenRules(
    tuple(range(1, VOCAB, 5)), ((11,), *((first, 16) for first in range(VOCAB)), (21, 26), (6, 6, 6))
)
CASES: dict[str, dict[str, Any]] = {
    "repetition-greedy": {"repetition_penalty": 1.3},
    "repetition": {"repetition_penalty": 0.7, **RANDOM},
    "presence-greedy": {"presence_penalty": 1.5},
    "presence": {"presence_penalty": -1.5, **RANDOM},
    "frequency-greedy": {"frequency_penalty": 2.0},
    "frequency": {"frequency_penalty": 1.0, **RANDOM},
    "bias-greedy": {"logit_bias": BIAS},
    "bias": {"logit_bias": BIAS, **RANDOM},
    "min_tokens-greedy": {"min_tokens": 5, "stop_token_ids": STOPS},
    "min_tokens": {"min_tokens": 5, "stop_token_ids": STOPS, **RANDOM},
    "rules-greedy": {"token_rules": RULES},
    "rules": {"token_rules": RULES, **RANDOM},
    "bad_words": {"token_rules": TokenRules(bad_words=PAIRS), "logit_bias": BIAS, **RANDOM},
    "min_p": {"min_p": 0.15, "temperature": 1.5, "seed": 11},
    "everything-greedy": EVERYTHING,
    "everything": {**EVERYTHING, **RANDOM, "min_p": 0.02, "top_p": 0.95, "top_k": 40},
}


def submit(cluster: NodeCluster, name: str, length: int, max_tokens: int, **more: object) -> Call:
    return cluster.submit(prompt_of(length), max_tokens, **{**CASES[name], **more})


def without(sampling: dict[str, Any]) -> SamplingParams:
    """Return the same request without any of the parameters of this file."""
    kept = {name: sampling[name] for name in ("temperature", "seed", "stop_token_ids") if name in sampling}
    return SamplingParams(max_tokens=16, **{"temperature": 0.0, **kept})
