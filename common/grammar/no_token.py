"""Explains a draw without a result: the request left no token to draw, or the model is at fault."""

from __future__ import annotations

import math

import numpy as np

from common.errors import InternalError, RequestError
from common.grammar.matcher import ALL, mask_width
from common.grammar.nothing_left import GRAMMAR, nothing_left
from common.grammar.token_rules import Follower, forbidding
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
    error = None if allowed.any() else nothing_left(_forbidding(sampling, bool(withheld)))
    return error or InternalError("the model produced non-finite logits")


def _forbidding(sampling: SamplingParams, withholds: bool) -> dict[str, bool]:
    """Say which fields of a request forbid tokens. `withholds`: its answer is shorter than `min_tokens`."""
    return {
        **forbidding(sampling.token_rules),
        "min_tokens": withholds,
        "logit_bias": any(bias == -math.inf for _, bias in sampling.logit_bias),
        GRAMMAR: bool(sampling.grammar),
    }
