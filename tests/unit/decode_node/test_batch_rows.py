"""Free rows of the batch, and what changes with the next plan."""

from __future__ import annotations

import pytest

from decode_node.batch_rows import BatchRows
from decode_node.step_plan import NO_MOVES, Load, Save


def test_row_0_is_padding() -> None:
    rows = BatchRows(3)
    assert sorted(rows.take() for _ in range(3)) == [1, 2, 3]
    assert rows.free == 0
    with pytest.raises(IndexError):
        rows.take()


def test_rows_come_back_oldest_first() -> None:
    rows = BatchRows(3)
    taken = [rows.take() for _ in range(3)]
    rows.give(taken[1])
    rows.give(taken[0])
    assert [rows.take(), rows.take()] == [taken[1], taken[0]]


@pytest.mark.parametrize("row", [0, -1, 4, 1])
def test_returning_a_row_that_was_not_taken_is_refused(row: int) -> None:
    """Above all row 0 must be refused: a request that got it would overwrite the padding of every batch."""
    with pytest.raises(AssertionError):
        BatchRows(3).give(row)


def test_moves_are_taken_once() -> None:
    rows = BatchRows(3)
    row = rows.take()
    rows.append(row, 0, [7, 8])
    rows.append(row, 2, [9])
    rows.save(Save(5, row, (7,)))
    rows.load(Load(6, row, 0, (8,)))
    rows.forget(6)
    moves = rows.take_moves()
    assert moves.cells == ((row, 0, 7), (row, 1, 8), (row, 2, 9))
    assert moves.saves == (Save(5, row, (7,)),)
    assert moves.loads == (Load(6, row, 0, (8,)),)
    assert moves.forget == (6,)
    assert rows.take_moves() == NO_MOVES
    assert not NO_MOVES


def test_a_row_that_changes_hands_before_a_plan() -> None:
    """Each cell is written once, with the last owner's page, in whatever order the device applies an indexed write."""
    rows = BatchRows(1)
    for generation in range(1, 6):
        row = rows.take()
        rows.append(row, 0, [generation * 10_000 + page for page in range(4096)])
        rows.give(row)
    assert rows.take_moves().cells == tuple((1, page, 50_000 + page) for page in range(4096))
