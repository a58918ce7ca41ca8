"""The integer inputs of a round, computed by kernels in Triton's interpreter, against their torch references."""

from __future__ import annotations

import pytest
import torch

from common.engine.ops.round_inputs import (
    gather_rows,
    gather_rows_triton,
    window_places,
    window_places_triton,
)
from common.engine.ops.triton_kernel import tl

pytestmark = [
    pytest.mark.skipif(tl is None, reason="Triton is not installed"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="compiled kernels are tested in tests/gpu"),
]


@pytest.mark.parametrize("width", [1, 7, 1500])
def test_gather_rows(width: int) -> None:
    """Pages that a request does not hold read as padding, whatever the table contains there."""
    state = (
        torch.randint(1 << 40, (6,)),
        torch.randint(1 << 20, (6,), dtype=torch.int32),
        -torch.randint(1 << 20, (6,)),
    )
    pages = torch.randint(1, 1 << 30, (6, width), dtype=torch.int32)
    wide = torch.tensor([[3, width, 9], [0, 0, 9], [5, width // 2, 9], [1, 1, 9]])
    placed = wide[:, :2]  # the host's tensor has more columns
    outputs = gather_rows_triton(placed, *state, pages)
    for actual, expected in zip(outputs, gather_rows(placed, *state, pages), strict=True):
        assert actual.dtype == expected.dtype
        assert torch.equal(actual, expected)
    assert not outputs[3][1].any()
    assert not outputs[3][3, 1:].any()
    assert [len(each) for each in gather_rows_triton(placed[:0], *state, pages)] == [0, 0, 0, 0]


@pytest.mark.parametrize("page_size", [1, 16, 24])
@pytest.mark.parametrize(("nodes", "first"), [(1, 0), (4, 0), (5, 10)])
def test_window_places(page_size: int, nodes: int, first: int) -> None:
    seq_len, delta = torch.tensor([0, 15, 16, 77]), torch.tensor([0, -3, 0, -70])
    table = torch.randint(1 << 20, (4, 100 // page_size + 1), dtype=torch.int32)
    trees = torch.randint(4, (4, nodes))
    level = torch.tensor(3).expand(4, nodes)  # as in a draft tree: without strides
    for depth in (trees, torch.arange(nodes).expand(4, -1), level):
        args = seq_len, delta, table, depth, first, page_size
        for actual, expected in zip(window_places_triton(*args), window_places(*args), strict=True):
            assert actual.dtype == expected.dtype
            assert torch.equal(actual, expected)
        positions, slots, lengths = window_places(*args)
        assert torch.equal(positions, (seq_len + delta)[:, None] + depth), (
            "rotary positions differ from places"
        )
        assert torch.equal(lengths, (seq_len + first + nodes).int())
        assert torch.equal(slots, window_places(seq_len, 0 * delta, *args[2:])[1]), (
            "only places determine where KV is written"
        )
    none = seq_len[:0], delta[:0], table[:0], trees[:0]
    positions, slots, lengths = window_places_triton(*none, first, page_size)
    assert positions.shape == slots.shape == (0, nodes)
    assert lengths.shape == (0,)


def test_launchers_refuse_another_layout() -> None:
    placed, column, pages = (
        torch.zeros(2, 2, dtype=torch.int64),
        torch.zeros(3, dtype=torch.int64),
        torch.zeros(3, 4),
    )
    with pytest.raises(AssertionError, match="adjacent"):
        gather_rows_triton(placed.t(), column, column.int(), column, pages.int())
    with pytest.raises(AssertionError, match="page table"):
        gather_rows_triton(placed, column, column.int(), column, pages.int().t())
    with pytest.raises(AssertionError, match="lengths for 3 requests"):
        window_places_triton(column[:2], column, pages.int(), torch.zeros(3, 2, dtype=torch.int64), 0, 16)
    with pytest.raises(AssertionError, match="deltas for 3 requests"):
        window_places_triton(column, column[:2], pages.int(), torch.zeros(3, 2, dtype=torch.int64), 0, 16)
