"""How many steps verified drafts of an answer, wherever it ends."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from router.dispatch.verified_steps import VerifiedSteps


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 6)), max_size=12), st.integers(0, 60))
def test_an_answer_that_ends_anywhere(runs: list[tuple[bool, int]], end: int) -> None:
    """Runs of tokens, each of a step that has verified drafts or has not."""
    steps, verified_by, at = VerifiedSteps(), list[int | None](), 0
    for number, (verified, tokens) in enumerate(runs):
        if verified:
            steps.add(at, tokens)
        verified_by += [number if verified else None] * tokens
        at += tokens
    for last in (end, end // 2):
        steps.end(last)
        shown = [each for each in verified_by[:last] if each is not None]
        count = len(set(shown))
        assert (steps.count, steps.accept_length) == (count, len(shown) / count if count else None)
