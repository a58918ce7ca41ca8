"""Decides whether a request ends with a token."""

from __future__ import annotations

from common.engine.sampling.sampling_plan import finish_reason
from common.grammar.token_rules import Follower
from common.messages.generation import FINISH_STOP, SamplingParams


def follow_token(
    token: int, output_tokens: int, sampling: SamplingParams, matcher: Follower | None
) -> str | None:
    """Return why a request ends with this token, its `output_tokens`-th; None if it goes on.

    If its parameters do not end it, `matcher` accepts the token, after which nothing may be left to follow. If the
    matcher cannot go on, its `failure` says why.
    """
    reason = finish_reason(token, output_tokens, sampling)
    if reason is None and matcher is not None and matcher.accept((token,)) and matcher.stopped:
        return FINISH_STOP
    return reason
