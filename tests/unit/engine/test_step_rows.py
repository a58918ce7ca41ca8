"""Both ends of a decode step: the kernels in Triton's interpreter against their references."""

from __future__ import annotations

import pytest
import torch

from common.engine.ops.step_rows import (
    advance_rows,
    advance_rows_triton,
    step_rows,
    step_rows_reference,
    step_rows_triton,
)
from common.engine.ops.triton_kernel import tl

pytestmark = [
    pytest.mark.skipif(tl is None, reason="Triton is not installed"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="compiled kernels are tested in tests/gpu"),
]
PAGE = 16


@pytest.mark.parametrize("width", [1, 7, 1030])
@pytest.mark.parametrize("rows", [[3], [5, 1, 0, 4, 0], []])
def test_what_a_step_reads(width: int, rows: list[int]) -> None:
    """A step reads last token, rotary position, slot, length and pages; padding is a request of one token in page 0."""
    pages = torch.randint(1, 1 << 30, (6, width), dtype=torch.int32)
    seq_len = torch.randint(0, width * PAGE, (6,), dtype=torch.int32)
    last, delta = torch.randint(1 << 40, (6,)), -torch.randint(900, (6,))
    pages[0], seq_len[0], last[0], delta[0] = 0, 0, 0, 0
    chosen = torch.tensor(rows, dtype=torch.int64)
    found = step_rows_triton(chosen, last, seq_len, delta, pages, PAGE)
    for actual, expected in zip(
        found, step_rows_reference(chosen, last, seq_len, delta, pages, PAGE), strict=True
    ):
        assert actual.dtype == expected.dtype
        assert torch.equal(actual, expected)
    ids, positions, slots, lengths, table = step_rows(chosen, last, seq_len, delta, pages, PAGE)
    for index, row in enumerate(rows):
        place = int(seq_len[row])
        assert (ids[index], positions[index], lengths[index]) == (last[row], place + delta[row], place + 1)
        assert slots[index] == pages[row, place // PAGE].item() * PAGE + place % PAGE
        assert torch.equal(table[index], pages[row])


@pytest.mark.parametrize("rows", [[3], [5, 1, 0, 4, 0], [], [*range(7, 0, -1), 0, 0]])
def test_what_a_step_leaves(rows: list[int]) -> None:
    """Each row gets its token and length; row 0 and rows outside the batch are unchanged."""
    chosen = torch.tensor(rows, dtype=torch.int64)
    tokens, lengths = (
        torch.randint(1 << 40, (len(rows), 2))[:, 0],
        torch.randint(900, (len(rows),), dtype=torch.int32),
    )
    states = []
    for run in (advance_rows, advance_rows_triton):
        state = torch.arange(10, 18), torch.arange(20, 28, dtype=torch.int32)
        run(chosen, tokens, lengths, *state)
        states.append(state)
    expected_last, expected_len = list(range(10, 18)), list(range(20, 28))
    for index, row in enumerate(rows):
        if row:
            expected_last[row], expected_len[row] = int(tokens[index]), int(lengths[index])
    for last, length in states:
        assert last.tolist() == expected_last
        assert length.tolist() == expected_len


def test_row_indices_may_be_a_column_of_a_wider_tensor() -> None:
    placed = torch.tensor([[2, 9], [1, 8]])
    last, length = torch.zeros(3, dtype=torch.int64), torch.zeros(3, dtype=torch.int32)
    advance_rows_triton(
        placed[:, 0], torch.tensor([7, 6]), torch.tensor([5, 4], dtype=torch.int32), last, length
    )
    assert (last.tolist(), length.tolist()) == ([0, 6, 7], [0, 4, 5])
