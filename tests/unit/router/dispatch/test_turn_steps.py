"""A turn of the event loop handles as many runs of tokens as cost about the same, whatever is in them."""

from __future__ import annotations

import pytest

from common.messages.generation import OutputToken, TokenLogprob
from common.messages.router_inbox import FirstToken, Goodbye, TokenRun
from router.dispatch.turn_steps import END_STEPS, STEPS_PER_TURN, runs_within, steps_of

PLAIN = OutputToken(7)
DETAILED = OutputToken(7, TokenLogprob(-1.0, (8, 9), (-1.0, -2.0)))


def run(tokens: int, token: OutputToken = PLAIN, finish: str | None = None) -> TokenRun:
    return TokenRun(1, 0, [token] * tokens, finish)


@pytest.mark.parametrize(
    ("each", "fit"),
    [
        (run(1), STEPS_PER_TURN),
        (run(0), STEPS_PER_TURN),
        (run(8), STEPS_PER_TURN // 2),
        (run(1, finish="stop"), STEPS_PER_TURN // END_STEPS),
        (run(1, DETAILED), STEPS_PER_TURN),
        (run(14, DETAILED), STEPS_PER_TURN // 8),
        (run(4000, DETAILED), 1),
    ],
)
def test_what_costs_more_counts_for_more(each: TokenRun, fit: int) -> None:
    count, steps = runs_within([each] * 1000, STEPS_PER_TURN)
    assert count == fit
    assert steps >= STEPS_PER_TURN
    assert runs_within([each] * (fit - 1), STEPS_PER_TURN)[0] == fit - 1
    assert runs_within([each] * 1000, 1)[0] == 1


def test_a_first_token_counts_like_an_end() -> None:
    first = FirstToken(room=1, token=OutputToken(7), finish_reason=None, cached_tokens=0)
    assert (steps_of(first), steps_of(Goodbye(incarnation="i"))) == (END_STEPS, 1)
