"""Streamed sums over ranks in Triton's interpreter: two ranks are processes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from common.engine.ops import peer_rows
from common.engine.ops.fp8_rows import quantize_rows_reference
from common.engine.ops.peer_memories import (
    COUNTS_OFFSET,
    ROW_BYTES,
    SENDER_BYTES,
    STREAM_OFFSET,
    WINDOW,
    RankMemories,
    peer_bytes,
)
from common.engine.ops.peer_reduce import (
    peer_sum_reference,
    peer_sum_rms_norm_reference,
    peer_sum_rms_norm_triton,
    peer_sum_triton,
)
from common.engine.ops.peer_rows import stream_sum
from common.engine.ops.triton_kernel import tl
from tests.cluster import fork_server
from tests.cluster.harness import ROOT
from tests.fakes.peer_row_ranks import EPS, RANKS, SIZE, rank_memories, shared_memory
from tests.fakes.waiting import PATIENCE

pytestmark = [
    pytest.mark.skipif(tl is None, reason="Triton is not installed"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="compiled kernels are tested in tests/gpu"),
]


def test_calls_of_several_sizes(tmp_path: Path) -> None:
    """Programs have one row or several, the last ones fewer; all places are used again."""
    calls = {str(i): torch.randn(RANKS + 1, rows, SIZE) for i, rows in enumerate((3, 16, 1, 9))}
    weight = torch.randn(SIZE)
    save_file({**calls, "weight": weight}, tmp_path / "given")
    shared_memory(tmp_path)
    program = "tests.fakes.peer_row_ranks"
    with open(2, "wb", closefd=False) as log:
        ranks = [
            fork_server.start([program, str(tmp_path), str(rank)], ROOT, dict(os.environ), log)
            for rank in range(RANKS)
        ]
    try:
        assert [rank.wait(PATIENCE) for rank in ranks] == [0] * RANKS
    finally:
        for each in ranks:
            each.kill()
    found = [load_file(tmp_path / str(rank)) for rank in range(RANKS)]
    for name, call in calls.items():
        parts = list(call[:RANKS])
        normed, total = peer_sum_rms_norm_reference(parts, call[RANKS], weight, EPS)
        codes, scales = quantize_rows_reference(normed, blocks=False)
        for results in found:
            assert torch.equal(results[name][0], peer_sum_reference(parts))
            torch.testing.assert_close(results[name][1], normed, atol=1e-5, rtol=1e-5)
            assert torch.equal(results[name][2], total)
            # Codes next to the border between two may be rounded in the other direction.
            torch.testing.assert_close(results[name][3], codes.float() * scales, atol=1e-3, rtol=0.13)
    assert all(results["host"].tolist() == [0, 0] for results in found)


def memory_of_two(polls: int = 3) -> tuple[RankMemories, torch.Tensor]:
    """Return the memory of rank 0 of two, and the bytes of both."""
    both = torch.zeros(2, peer_bytes(2), dtype=torch.uint8)
    return rank_memories(both, torch.zeros(2, dtype=torch.int32), 0, polls), both


def count_of(memory: torch.Tensor, sender: int) -> torch.Tensor:
    """Return the count of program 0 that a rank writes to this memory, [1] int32."""
    start = COUNTS_OFFSET + sender * SENDER_BYTES
    return memory[start : start + 4].view(torch.int32)


def places_of(memory: torch.Tensor, sender: int) -> torch.Tensor:
    """Return the places of program 0 to which a rank writes in this memory, [WINDOW, n] float32."""
    start = STREAM_OFFSET + sender * SENDER_BYTES
    return memory[start : start + WINDOW * ROW_BYTES].view(torch.float32).view(WINDOW, -1)


def test_a_row_goes_to_the_place_of_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_rows, "PROGRAMS", 1)
    memory, both = memory_of_two()
    count_of(both[0], 0)[0] = 6  # rows that this rank has sent before
    count_of(both[0], 1)[0] = 9  # rows that the other one has sent, all of this call included
    places_of(both[0], 1)[:, :SIZE] = torch.tensor([[20.0], [10.0], [30.0], [40.0]])
    x = torch.arange(1.0, 4.0)[:, None].expand(3, SIZE)
    out = torch.zeros(3, SIZE)
    stream_sum(x, out, memory)
    assert out[:, 0].tolist() == [31.0, 42.0, 23.0]  # of places 2, 3 and 0
    assert places_of(both[1], 0)[:, SIZE - 1].tolist() == [3.0, 0.0, 1.0, 2.0]
    assert count_of(both[0], 0).item() == count_of(both[1], 0).item() == 9
    assert memory.host.tolist() == [0, 0]


def test_counts_overflow(monkeypatch: pytest.MonkeyPatch) -> None:
    """The count after 2 ** 31 - 1 is - 2 ** 31."""
    monkeypatch.setattr(peer_rows, "PROGRAMS", 1)
    for sent, failed in ((2**31 - 1, 2), (-(2**31), 0)):
        memory, both = memory_of_two()
        count_of(both[0], 0)[0] = 2**31 - 1
        count_of(both[0], 1)[0] = sent
        places_of(both[0], 1)[3, :SIZE] = 5.0
        out = torch.zeros(1, SIZE)
        stream_sum(torch.ones(1, SIZE), out, memory)
        assert memory.host[0] == failed
        assert count_of(both[1], 0).item() == -(2**31)
        assert failed or torch.equal(out, torch.full((1, SIZE), 6.0))


def test_a_rank_that_does_not_come_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_rows, "PROGRAMS", 1)
    memory, both = memory_of_two()
    x = torch.ones(65, SIZE)
    peer_sum_rms_norm_triton(x, x, x[0], EPS, memory)
    assert memory.host.tolist() == [2, 0]
    assert count_of(both[1], 0).item() == 65  # it got the rows


def test_no_program_waits_for_a_rank_that_the_host_has_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RankMemories, "polls_per_look", 16)  # the interpreter is slow
    memory, _both = memory_of_two(polls=2**31 - 1)
    memory.host[1] = 2
    x = torch.ones(65, SIZE)
    peer_sum_triton(x, memory)  # or this would take an hour
    assert memory.host.tolist() == [2, 2]
    memory.host[1] = 0
    peer_sum_triton(x, memory)


def test_rows_that_are_too_wide_are_refused() -> None:
    memory, _ = memory_of_two()
    x = torch.ones(65, 8200)
    with pytest.raises(AssertionError, match="rows of 8200 do not fit"):
        stream_sum(x, torch.empty_like(x), memory)
