"""The candidate kernel of `tests/bench/peer_rows.py` in Triton's interpreter: two ranks are threads."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor

from common.engine.ops.peer_reduce import peer_sum_rms_norm_reference
from common.engine.ops.triton_kernel import tl
from tests.bench import peer_rows
from tests.bench.peer_rows import RowMemories, peer_rows_norm

pytestmark = [
    pytest.mark.skipif(tl is None, reason="Triton is not installed"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="it is measured by tests.bench.all_reduce"),
]
RANKS, MAX_ROWS, SIZE, EPS = 2, 16, 24, 1e-5
Parts = list[tuple[Tensor, Tensor]]


def memories(polls: int) -> tuple[list[RowMemories], Tensor]:
    nbytes = RowMemories.nbytes(RANKS, MAX_ROWS, SIZE, torch.float32)
    memory = torch.zeros(RANKS, nbytes, dtype=torch.uint8)
    addresses, host = torch.tensor([each.data_ptr() for each in memory]), torch.zeros(1, dtype=torch.int32)
    rest = MAX_ROWS, SIZE, torch.float32
    return [RowMemories(addresses, host, rank, polls, *rest) for rank in range(RANKS)], memory


def test_calls_of_several_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some programs have no row, some several; places are used again."""
    monkeypatch.setattr(peer_rows, "multiprocessors", lambda device: 2)
    sizes, found = (3, 16, 1, 9), [Parts(), Parts()]
    calls = [torch.randn(RANKS + 1, rows, SIZE) for rows in sizes]
    weight, (ranks, memory) = torch.randn(SIZE), memories(1 << 20)

    def run(rank: int) -> None:
        found[rank] += [peer_rows_norm(each[rank], each[RANKS], weight, EPS, ranks[rank]) for each in calls]

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(RANKS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not any(thread.is_alive() for thread in threads)
    for index, call in enumerate(calls):
        expected = peer_sum_rms_norm_reference(list(call[:RANKS]), call[RANKS], weight, EPS)
        for rank in range(RANKS):
            torch.testing.assert_close(found[rank][index], expected, atol=1e-5, rtol=1e-5)
    assert ranks[0].host.tolist() == [0]
    assert memory.any()


def test_a_rank_that_does_not_come_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_rows, "multiprocessors", lambda device: 1)
    ranks, _memory = memories(3)
    x = torch.ones(2, SIZE)
    peer_rows_norm(x, x, x[0], EPS, ranks[0])
    assert ranks[0].host.tolist() == [2]
