"""Explains a draw without a result: the request left no token to draw, or the model is at fault."""

from __future__ import annotations

import math

import numpy as np

from common.errors import InternalError, InvalidRequest, RequestError
from common.grammar.matcher import ALL, mask_width
from common.grammar.token_rules import Follower
from common.messages.generation import SamplingParams


def no_token(sampling: SamplingParams, said: int, follower: Follower | None, vocab_size: int) -> RequestError:
    """Return the error of a request for which no token could be drawn after `said` tokens of its answer.

    `follower` has accepted these tokens.
    """
    withheld = sampling.withheld if said < sampling.min_tokens else ()
    barred = {*withheld, *(token for token, bias in sampling.logit_bias if bias == -math.inf)}
    masks = np.full((1, mask_width(vocab_size)), ALL, dtype=np.int32)
    if follower is not None:
        follower.fill(masks, 0)
        if follower.failure is not None:
            return follower.failure
    allowed = np.unpackbits(masks.view(np.uint8), bitorder="little")[:vocab_size]
    allowed[list(barred)] = 0
    fields = _limiting_fields(sampling, bool(withheld))
    if fields and not allowed.any():
        return InvalidRequest(
            f"no token is left that could come next: {_listed(fields)} {'together ' * (len(fields) > 1)}forbid all of "
            "them",
            param=fields[0],
        )
    return InternalError("the model produced non-finite logits")


def _limiting_fields(sampling: SamplingParams, withholds: bool) -> list[str]:
    """Return the fields of a request that forbid tokens. `withholds`: its answer is shorter than `min_tokens`."""
    rules = sampling.token_rules
    used = {
        "allowed_token_ids": rules is not None and bool(rules.allowed),
        "bad_words": rules is not None and bool(rules.bad_words),
        "min_tokens": withholds,
        "logit_bias": any(bias == -math.inf for _, bias in sampling.logit_bias),
        "the grammar": bool(sampling.grammar),
    }
    return [name for name, limits in used.items() if limits]


def _listed(names: list[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]]) if len(names) > 1 else names[0]
