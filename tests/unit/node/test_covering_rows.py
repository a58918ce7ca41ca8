"""The rows of tests/cluster/check_ranks.py contain all pairs of values after a few draws."""

from __future__ import annotations

from tests.cluster.covering_rows import Covering

DIMENSIONS = {"a": ("1", "2", "3"), "b": ("x", "y"), "c": ("p", "q", "r")}


def test_rows_cover_all_pairs() -> None:
    covering = Covering(DIMENSIONS, seed=1)
    assert covering.all == len(covering.left) == 3 * 2 + 3 * 3 + 2 * 3
    drawn = 0
    while covering.left:
        row = covering.best({})
        assert covering.left
        covering.cover(row)
        drawn += 1
    assert 9 <= drawn <= 15, "each row covers one pair of a and c"


def test_a_row_keeps_what_is_fixed() -> None:
    assert covering_row() == covering_row()
    assert covering_row()["a"] == "2"


def test_a_row_takes_only_the_values_that_are_possible() -> None:
    covering = Covering(DIMENSIONS, seed=1)
    assert {covering.best({"a": "2"}, {"c": ("p", "q")})["c"] for _ in range(20)} == {"p", "q"}
    covering.cover({"a": "2", "c": "p"})
    assert covering.gain({"a": "2", "b": "x", "c": "p"}) == 2


def covering_row() -> dict[str, str]:
    return Covering(DIMENSIONS, seed=1).best({"a": "2"})
