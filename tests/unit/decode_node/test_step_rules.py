"""When a plain step verifies forced tokens, and how many tokens steps may write."""

from __future__ import annotations

import pytest

from decode_node.step_rules import StepRules

PLAIN = StepRules(forced_drafts=7, forced_width=7, forced_batch=32)


@pytest.mark.parametrize(
    ("forced", "verifies"),
    [
        ([], False),
        ([0, 0], False),
        ([1], True),
        ([1] + [0] * 7, True),
        ([1] + [0] * 8, False),
        ([4] + [0] * 31, True),
        ([3] + [0] * 31, False),
        ([7] * 32, True),
        ([7] * 33, False),
    ],
)
def test_forced_tokens_are_verified_where_they_gain_enough(forced: list[int], verifies: bool) -> None:
    """One token per eight requests, in batches that are captured."""
    assert PLAIN.verifies_forced(forced) is verifies


def test_without_forced_drafts_nothing_is_verified() -> None:
    assert not StepRules().verifies_forced([7, 7])
    assert not StepRules(tokens_per_step=4, forced_drafts=3).verifies_forced([3, 3]), (
        "each step can verify them"
    )


def test_only_steps_for_forced_tokens_write_more_than_one() -> None:
    assert (PLAIN.tokens_of(0), PLAIN.tokens_of(7), PLAIN.most_tokens) == (1, 8, 8)
    rounds = StepRules(tokens_per_step=4, forced_drafts=3)
    assert (rounds.tokens_of(3), rounds.tokens_of(1), rounds.most_tokens) == (4, 4, 4)
