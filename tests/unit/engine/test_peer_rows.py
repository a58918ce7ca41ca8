"""The candidate kernel of `tests/bench/peer_rows.py` in Triton's interpreter: two ranks are processes."""

from __future__ import annotations

import pytest
import torch
from torch.multiprocessing.spawn import spawn

from common.engine.ops.peer_reduce import peer_sum_rms_norm_reference
from common.engine.ops.triton_kernel import tl
from tests.bench import peer_rows
from tests.bench.peer_rows import RowMemories, peer_rows_norm
from tests.fakes.peer_row_ranks import EPS, MAX_ROWS, RANKS, SIZE, row_memories, sum_rows

pytestmark = [
    pytest.mark.skipif(tl is None, reason="Triton is not installed"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="it is measured by tests.bench.all_reduce"),
]


def shared_memory() -> torch.Tensor:
    nbytes = RowMemories.nbytes(RANKS, MAX_ROWS, SIZE, torch.float32)
    return torch.zeros(RANKS, nbytes, dtype=torch.uint8).share_memory_()


def test_calls_of_several_sizes() -> None:
    """Some programs have no row, some several; places are used again."""
    memory, host = shared_memory(), torch.zeros(1, dtype=torch.int32).share_memory_()
    calls = [torch.randn(RANKS + 1, rows, SIZE).share_memory_() for rows in (3, 16, 1, 9)]
    found = [torch.zeros(RANKS, 2, rows.shape[1], SIZE).share_memory_() for rows in calls]
    weight = torch.randn(SIZE).share_memory_()
    spawn(sum_rows, (memory, host, calls, weight, found), RANKS)
    for call, results in zip(calls, found, strict=True):
        expected = peer_sum_rms_norm_reference(list(call[:RANKS]), call[RANKS], weight, EPS)
        for rank in range(RANKS):
            torch.testing.assert_close(tuple(results[rank]), expected, atol=1e-5, rtol=1e-5)
    assert host.tolist() == [0]
    assert memory.any()


def test_a_rank_that_does_not_come_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_rows, "multiprocessors", lambda device: 1)
    memory, host = shared_memory(), torch.zeros(1, dtype=torch.int32)
    end = row_memories(memory, host, 0, 3)
    x = torch.ones(2, SIZE)
    peer_rows_norm(x, x, x[0], EPS, end)
    assert host.tolist() == [2]
