"""When a plain step verifies forced tokens, and how many tokens steps may write."""

from __future__ import annotations

import pytest

from decode_node.step_rules import ForcedStep, StepRules
from decode_node.steps import forced_steps

PLAIN = StepRules(forced_drafts=7, forced_steps=(ForcedStep(7, 32), ForcedStep(3, 64)))


@pytest.mark.parametrize(
    ("forced", "width"),
    [
        ([], 0),
        ([0, 0], 0),
        ([1], 7),
        ([1] + [0] * 7, 7),
        ([1] + [0] * 8, 0),
        ([4] + [0] * 31, 7),
        ([3] + [0] * 31, 0),
        ([7] * 32, 7),
        ([3] * 33, 3),
        ([3] * 64, 3),
        ([3, 3] + [0] * 62, 0),
        ([3] * 65, 0),
    ],
)
def test_forced_tokens_are_verified_where_they_gain_enough(forced: list[int], width: int) -> None:
    """One token per eight requests, in batches that are captured; fewer tokens per request in larger ones."""
    assert PLAIN.forced_width(forced) == width


def test_no_more_forced_tokens_are_looked_for_than_a_step_verifies() -> None:
    assert [PLAIN.most_forced(batch) for batch in (0, 1, 32, 33, 64, 65)] == [7, 7, 7, 3, 3, 0]
    assert StepRules(tokens_per_step=4, forced_drafts=3).most_forced(65) == 3
    assert StepRules().most_forced(1) == 0


def test_without_forced_drafts_nothing_is_verified() -> None:
    assert not StepRules().forced_width([7, 7])
    assert not StepRules(tokens_per_step=4, forced_drafts=3).forced_width([3, 3]), "each step can verify them"


@pytest.mark.parametrize(
    ("max_running", "steps"),
    [(4, [(7, 4)]), (32, [(7, 32)]), (33, [(7, 32), (3, 33)]), (99, [(7, 32), (3, 64)])],
)
def test_larger_batches_verify_fewer_forced_tokens(max_running: int, steps: list[tuple[int, int]]) -> None:
    assert list(forced_steps(max_running)) == steps


def test_only_steps_for_forced_tokens_write_more_than_one() -> None:
    assert (PLAIN.tokens_of(0), PLAIN.tokens_of(7), PLAIN.most_tokens) == (1, 8, 8)
    rounds = StepRules(tokens_per_step=4, forced_drafts=3)
    assert (rounds.tokens_of(3), rounds.tokens_of(1), rounds.most_tokens) == (4, 4, 4)
