"""The page table of running requests."""

from __future__ import annotations

import pytest
import torch

from common.engine.kv_cache.request_table import RequestTable

CPU = torch.device("cpu")


def table(rows: int = 3, max_pages: int = 4) -> RequestTable:
    return RequestTable(rows, max_pages, CPU)


def test_row_0_is_padding() -> None:
    requests = table()
    assert sorted(requests.take_row() for _ in range(3)) == [1, 2, 3]
    assert requests.free_rows == 0
    with pytest.raises(IndexError):
        requests.take_row()
    assert requests.pages.shape == (4, 4)
    assert requests.pages.dtype == torch.int32
    assert not requests.pages.any()


def test_nothing_is_visible_before_flush() -> None:
    requests = table()
    row = requests.take_row()
    requests.append(row, 0, [7, 8])
    requests.append(row, 2, [9])
    assert not requests.pages.any()
    requests.flush()
    assert requests.pages[row].tolist() == [7, 8, 9, 0]
    requests.flush()  # nothing queued: nothing changes
    assert requests.pages.sum() == 24


def test_storage_never_moves() -> None:
    """Graphs bake the address in."""
    requests = table()
    address = requests.pages.data_ptr()
    requests.append(requests.take_row(), 0, [1, 2, 3])
    requests.flush()
    assert requests.pages.data_ptr() == address


def test_rows_come_back_oldest_first() -> None:
    requests = table()
    rows = [requests.take_row() for _ in range(3)]
    requests.give_row(rows[1])
    requests.give_row(rows[0])
    assert [requests.take_row(), requests.take_row()] == [rows[1], rows[0]]


@pytest.mark.parametrize("row", [0, -1, 4, 1])
def test_giving_back_what_was_not_taken(row: int) -> None:
    """Row 0 above all: a request that got it would write over the padding of every batch."""
    with pytest.raises(AssertionError):
        table().give_row(row)


def test_a_row_that_changes_hands_before_a_flush() -> None:
    """The last owner's pages count, in whatever order the device applies one indexed write."""
    requests = table(rows=1, max_pages=4096)
    for generation in range(1, 6):
        row = requests.take_row()
        requests.append(row, 0, [generation * 10_000 + page for page in range(4096)])
        requests.give_row(row)
    assert len(requests._pending) == 4096  # each cell is written once
    requests.flush()
    assert requests.pages[1].tolist() == [50_000 + page for page in range(4096)]


def test_rows_do_not_disturb_each_other() -> None:
    requests = table()
    first, second = requests.take_row(), requests.take_row()
    requests.append(first, 0, [1, 2])
    requests.append(second, 0, [3])
    requests.flush()
    requests.append(second, 1, [4])
    requests.flush()
    assert requests.pages.tolist() == [[0, 0, 0, 0], [1, 2, 0, 0], [3, 4, 0, 0], [0, 0, 0, 0]]


def test_pages_beyond_the_row_are_a_defect() -> None:
    requests = table(max_pages=2)
    requests.append(requests.take_row(), 1, [5, 6])
    with pytest.raises(IndexError):
        requests.flush()
