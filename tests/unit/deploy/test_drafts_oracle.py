"""The acceptance oracle on scripted drafts, and against a real draft-and-verify loop."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from deploy.tiny_models.drafts.oracle import Round, accept_length, accepted_at, ok_matrix, perfect, walk

PROMPT = 3
IDS = torch.arange(100, 116)  # 3 prompt tokens and 13 of an answer, the first of which the prefill emits


def scripted(steps: int, wrong: set[tuple[int, int]]) -> Tensor:
    """Return proposals that are right except at (step, t)."""
    proposals = torch.stack([IDS + 2 + step for step in range(steps)])
    for step, at in wrong:
        proposals[step, at] = -1
    return proposals


def test_a_draft_that_is_always_right_is_cut_only_by_the_end() -> None:
    rounds = walk(ok_matrix(scripted(3, set()), IDS), PROMPT)
    assert [(one.at, one.accepted, one.emitted) for one in rounds] == [(2, 3, 4), (6, 3, 4), (10, 3, 4)]
    assert accept_length(rounds) == 4.0
    shorter = walk(ok_matrix(scripted(3, set())[:, :-1], IDS[:-1]), PROMPT)
    # its last draft ends the answer: no bonus token
    assert shorter[-1] == Round(at=10, accepted=3, emitted=3)
    assert sum(one.emitted for one in shorter) == len(IDS) - 1 - PROMPT - 1
    assert torch.equal(perfect(3, len(IDS)), ok_matrix(scripted(3, set()), IDS))


def test_a_draft_that_is_never_right_emits_only_the_bonus_token() -> None:
    rounds = walk(torch.zeros(3, len(IDS), dtype=torch.bool), PROMPT)
    assert len(rounds) == 12
    assert accept_length(rounds) == 1.0
    assert accepted_at(rounds, 3) == [0.0, 0.0, 0.0]


def test_a_refused_step_hides_the_later_ones_of_its_round() -> None:
    rounds = walk(ok_matrix(scripted(3, {(1, 2), (0, 4)}), IDS), PROMPT)
    assert [(one.at, one.accepted) for one in rounds] == [(2, 1), (4, 0), (5, 3), (9, 3), (13, 1)]
    assert [one.emitted for one in rounds] == [2, 1, 4, 4, 1]  # the last draft ends the answer
    assert accepted_at(rounds, 3) == pytest.approx([0.8, 0.4, 0.4])


def test_no_draft_past_the_end_counts_as_right() -> None:
    ok = ok_matrix(torch.zeros(2, 4, dtype=torch.int64), torch.zeros(4, dtype=torch.int64))
    assert ok.tolist() == [[True, True, False, False], [True, False, False, False]]
    assert walk(ok[:, :0], 0) == []


def test_shapes_that_do_not_belong_together_are_refused() -> None:
    with pytest.raises(ValueError, match="positions"):
        ok_matrix(torch.zeros(2, 5), torch.zeros(4))


@pytest.mark.parametrize("seed", range(5))
def test_the_walk_equals_a_loop_that_drafts_and_verifies(seed: int) -> None:
    """Proposals depend on the whole text before them, including the draft's own tokens, as those of a real draft do."""
    rng = random.Random(seed)
    steps, vocabulary = 3, 4
    ids = [rng.randrange(vocabulary) for _ in range(60)]

    def draft(text: list[int]) -> int:
        right = ids[len(text)] if len(text) < len(ids) else 0
        return right if random.Random(f"{seed}/{text}").random() < 0.7 else right + 1

    expected = []
    known = ids[: PROMPT + 1]
    while len(known) < len(ids):
        path: list[int] = []
        for _ in range(steps):
            path.append(draft(known + path))
        accepted = 0
        while accepted < steps and path[accepted : accepted + 1] == ids[len(known) + accepted :][:1]:
            accepted += 1
        emitted = min(accepted + 1, len(ids) - len(known))
        expected.append(Round(len(known) - 2, accepted, emitted))
        known = ids[: len(known) + emitted]

    forced = [[draft(ids[: at + 2 + step]) for at in range(len(ids))] for step in range(steps)]
    assert walk(ok_matrix(torch.tensor(forced), torch.tensor(ids)), PROMPT) == expected
