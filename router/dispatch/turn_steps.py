"""Decides how many messages of nodes are handled in one turn of the event loop."""

from __future__ import annotations

from collections.abc import Sequence

from common.messages.router_inbox import FirstToken, RouterMessage, TokenRun

# Messages and token runs that are handled in one turn: each wakes a request, which then writes to its client. One frame
# can hold a decode step of a thousand requests.
STEPS_PER_TURN = 64
# Steps that the first token and the last run of an answer count for: each takes some 0.4 ms, and a step of a node may
# end many answers.
END_STEPS = 8
# Tokens of a run that count for a step: plain ones, and those with log-probabilities, 27 us each.
TOKENS_PER_STEP, DETAILED_PER_STEP = 8, 2


def steps_of(message: RouterMessage) -> int:
    """Return the steps that a message other than token runs counts for."""
    return END_STEPS if isinstance(message, FirstToken) else 1


def runs_within(runs: Sequence[TokenRun], left: int) -> tuple[int, int]:
    """Return how many of the first runs fit into the steps that are left, at least one, and their steps."""
    steps = 0
    for count, run in enumerate(runs):
        if steps >= left:
            return count, steps
        # A token of an answer that goes on: almost every run.
        plain = run.finish_reason is None and len(run.tokens) == 1
        steps += 1 if plain else _steps_of_run(run)
    return len(runs), steps


def _steps_of_run(run: TokenRun) -> int:
    steps = 1 if run.finish_reason is None else END_STEPS
    if (tokens := len(run.tokens)) > 1:
        detailed = run.tokens[0].logprob is not None
        steps += tokens // (DETAILED_PER_STEP if detailed else TOKENS_PER_STEP)
    return steps
