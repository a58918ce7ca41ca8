"""Every requirement has a test that names it, and the table lists it."""

from __future__ import annotations

import pytest

from tests.architecture.requirement_rows import ROWS, TESTS, by_row, rows_in, table
from tests.architecture.requirement_sentences import DEMANDS, WHAT


def test_every_row_has_a_test() -> None:
    assert [row for row, tests in by_row().items() if not tests] == []


def test_the_table_is_that_of_the_docstrings() -> None:
    assert (TESTS / "REQUIREMENTS.md").read_text() == table(), (
        "run: python -m tests.architecture.requirement_rows > tests/REQUIREMENTS.md"
    )


def test_every_row_says_what_it_demands() -> None:
    last = {"A": 12, "B": 13, "C": 5, "D": 10, "E": 5}
    assert list(DEMANDS) == [f"{letter}{number}" for letter in WHAT for number in range(1, last[letter] + 1)]
    assert all(demand.endswith(".") and "|" not in demand for demand in DEMANDS.values())
    assert len(set(DEMANDS.values())) == len(DEMANDS)


@pytest.mark.parametrize(
    ("text", "rows"),
    [
        ("Rows A1, A6, C3; issue 3: below", {"A1", "A6", "C3"}),
        ("Row C3's general rule", {"C3"}),
        ("Rows D1-D8 and A4: widths", {*(f"D{n}" for n in range(1, 9)), "A4"}),
        ("Row B4(f).", {"B4"}),
        ("Rows A10, L2 and L9: every key", {"A10"}),
        ("padding rows are zero; A1 is no row here", set()),
    ],
)
def test_rows_are_read_from_docstrings(text: str, rows: set[str]) -> None:
    assert rows_in(text) == rows
    assert rows <= set(ROWS)
