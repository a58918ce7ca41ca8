"""The page tables of running requests on the device."""

from __future__ import annotations

import pytest
import torch

from decode_node.page_table import PageTable

CPU = torch.device("cpu")


def test_it_begins_with_padding() -> None:
    table = PageTable(3, 4, CPU)
    assert table.pages.shape == (4, 4)
    assert table.pages.dtype == torch.int32
    assert not table.pages.any()


def test_cells_are_set_and_others_are_unchanged() -> None:
    table = PageTable(3, 4, CPU)
    table.write([(1, 0, 1), (1, 1, 2), (2, 0, 3)])
    table.write([(2, 1, 4)])
    table.write([])
    assert table.pages.tolist() == [[0, 0, 0, 0], [1, 2, 0, 0], [3, 4, 0, 0], [0, 0, 0, 0]]


def test_storage_never_moves() -> None:
    """Graphs contain the address."""
    table = PageTable(3, 4, CPU)
    address = table.pages.data_ptr()
    table.write([(1, 0, 1), (1, 1, 2)])
    assert table.pages.data_ptr() == address


def test_pages_past_the_row_are_a_defect() -> None:
    with pytest.raises(IndexError):
        PageTable(3, 2, CPU).write([(1, 1, 5), (1, 2, 6)])
