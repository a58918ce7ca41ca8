"""When a plain step verifies forced tokens, and how many tokens steps may write."""

from __future__ import annotations

from dataclasses import replace

import pytest

from common.speculation.forced_widths import DRAFTED_WIDTHS, PLAIN_WIDTHS
from decode_node.forced_choice import ForcedGain, ForcedRow, ForcedStep
from decode_node.forced_steps import forced_steps
from decode_node.step_rules import FixedWidth, StepRules

PLAIN = StepRules(forced_steps=(ForcedStep(7, 32), ForcedStep(3, 64)))


def rows(*forced: int, constrained: bool = True) -> list[ForcedRow]:
    return [ForcedRow(count, constrained) for count in forced]


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
    assert PLAIN.forced_width(rows(*forced)) == width


def test_no_more_forced_tokens_are_looked_for_than_a_step_verifies() -> None:
    assert [PLAIN.most_forced(batch) for batch in (0, 1, 32, 33, 64, 65)] == [7, 7, 7, 3, 3, 0]
    assert StepRules(tokens_per_step=4, forced_drafts=3).most_forced(65) == 3
    assert StepRules().most_forced(1) == 0


def test_without_forced_drafts_nothing_is_verified() -> None:
    assert not StepRules().forced_width(rows(7, 7))
    assert not StepRules(tokens_per_step=4, forced_drafts=3).forced_width(rows(3, 3)), (
        "each step can verify them"
    )


@pytest.mark.parametrize(
    ("max_running", "steps"),
    [(4, [(7, 4)]), (32, [(7, 32)]), (33, [(7, 32), (3, 33)]), (99, [(7, 32), (3, 64)])],
)
def test_larger_batches_verify_fewer_forced_tokens(max_running: int, steps: list[tuple[int, int]]) -> None:
    assert list(forced_steps(max_running, PLAIN_WIDTHS)) == steps


def drafting(carried: int = 1, skipped: int = 0) -> tuple[StepRules, ForcedGain]:
    """Rules of rounds of 3 drafts, of which one in two requests with a grammar has its first one accepted."""
    choice = ForcedGain(3, carried, skipped)
    for _ in range(40):
        choice.observe(True, 3, [0, 1])
        choice.observe(False, 3, [3, 3])
    steps = forced_steps(64, DRAFTED_WIDTHS)
    rules = StepRules(4, widths=FixedWidth(3), forced_drafts=3, forced_steps=steps, carried=carried)
    return replace(rules, forced_choice=choice), choice


def test_a_round_that_drafts_nothing_is_left_for_enough_forced_tokens() -> None:
    """It saves no draft phase, and costs the requests without forced tokens no more than plain decoding."""
    _, choice = drafting(carried=1, skipped=4)
    assert not choice.gains(rows(1, *[0] * 15), 15, 0)
    assert choice.gains(rows(15, *[0] * 15), 15, 0)


@pytest.mark.parametrize(
    ("batch", "width"),
    [
        (rows(0, 0), 0),
        (rows(15), 15),
        # A usual round of as many forced tokens takes no longer, and drafts for the others.
        (rows(2, 0), 0),
        (rows(9, 0, 0), 15),
        ([*rows(15), *rows(0, 0, constrained=False)], 15),
        ([*rows(4), *rows(0, 0, constrained=False)], 0),
        (rows(*[9] * 17), 7),
        (rows(*[9] * 33), 0),
    ],
)
def test_with_a_draft_model_the_step_that_emits_more_is_taken(batch: list[ForcedRow], width: int) -> None:
    rules, _ = drafting()
    assert rules.forced_width(batch) == width


def test_a_step_for_forced_tokens_saves_the_drafts_time() -> None:
    batch = rows(3, 3, 0)
    assert [drafting(skipped=forwards)[0].forced_width(batch) for forwards in (0, 4)] == [0, 15]


def test_rare_drafts_are_not_waited_for() -> None:
    """What constrained requests accept decides for them, and not what free ones do."""
    rules, choice = drafting()
    batch = [*rows(5), *rows(0, 0, 0)]
    assert rules.forced_width(batch) == 15
    for _ in range(200):
        choice.observe(True, 3, [3, 3, 3])
    assert rules.forced_width(batch) == 0


def test_rounds_verify_what_fits_where_no_step_is_captured() -> None:
    rules, _ = drafting()
    assert [rules.most_forced(batch) for batch in (1, 16, 17, 32, 33)] == [15, 15, 7, 7, 3]
    assert (rules.tokens_of(3), rules.tokens_of(15), rules.most_tokens) == (4, 16, 16)


def test_only_steps_for_forced_tokens_write_more_than_one() -> None:
    assert (PLAIN.tokens_of(0), PLAIN.tokens_of(7), PLAIN.most_tokens) == (1, 8, 8)
    rounds = StepRules(tokens_per_step=4, forced_drafts=3)
    assert (rounds.tokens_of(3), rounds.tokens_of(1), rounds.most_tokens) == (4, 4, 4)
