"""The all-reduce over peer memory in Triton's interpreter: ranks are processes that map each other's host memory."""

from __future__ import annotations

import pytest
import torch

from common.engine.ops import peer_reduce, peer_rows
from common.engine.ops.peer_memories import (
    DATA_OFFSET,
    MAX_ROWS,
    PLACE_BYTES,
    SENDER_BYTES,
    RankMemories,
    peer_bytes,
)
from common.engine.ops.peer_reduce import (
    peer_gather_triton,
    peer_sum_rms_norm_triton,
    peer_sum_triton,
)
from common.engine.ops.triton_kernel import next_power_of_2, tl
from tests.fakes.peer_processes import run_peers

pytestmark = [
    pytest.mark.skipif(tl is None, reason="Triton is not installed"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="compiled kernels are tested in tests/gpu"),
]


def test_sums_and_norms_of_ranks_in_processes() -> None:
    """Calls of different numbers of rows use the same places, and no rank reads what another one has overwritten."""
    assert run_peers(["cpu"] * 3, {"TRITON_INTERPRET": "1"}) == [0] * 3


def test_tensors_that_take_several_launches() -> None:
    """More rows than the memory holds, each longer than its rows; tests/gpu sums and gathers them over ranks."""
    own = torch.zeros(peer_bytes(1), dtype=torch.uint8)
    memory = RankMemories(torch.tensor([own.data_ptr()]), torch.zeros(2, dtype=torch.int32), 0, 3)
    x = torch.arange(65 * 8200, dtype=torch.float32).view(65, 8200)
    assert torch.equal(peer_sum_triton(x, memory), x)
    assert torch.equal(peer_gather_triton(x, memory)[0], x)
    odd = torch.arange(33, dtype=torch.float16).view(3, 11)
    assert torch.equal(peer_gather_triton(odd, memory)[0], odd)
    assert torch.equal(peer_sum_triton(odd, memory), odd)
    assert torch.equal(peer_sum_triton(odd[:, 1:9], memory), odd[:, 1:9])
    assert memory.host.tolist() == [0, 0]


def test_prompts_of_any_length_are_summed_by_two_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel is compiled for each block: one for few rows, which a first token compiles, and one for more."""
    blocks = []

    def noted(size: int) -> int:
        blocks.append(next_power_of_2(size))
        return blocks[-1]

    memory, _ = memory_of_two()
    for module in (peer_reduce, peer_rows):
        monkeypatch.setattr(module, "next_power_of_2", noted)
    for tokens in (1, 3, 65, 96, 100, 127, 130):
        peer_sum_triton(torch.ones(tokens, 256), memory)
    assert blocks == [256] * 7


def memory_of_two() -> tuple[RankMemories, torch.Tensor]:
    """Return the memory of rank 0 of two, and the bytes of both, with few polls."""
    both = torch.zeros(2, peer_bytes(2), dtype=torch.uint8)
    addresses = torch.tensor([each.data_ptr() for each in both])
    return RankMemories(addresses, torch.zeros(2, dtype=torch.int32), 0, 3), both


ONE = 0x3F800000  # the bits of 1.0


def words_of(memory: torch.Tensor, turn: int, sender: int) -> torch.Tensor:
    """Return the words of row 0 that a rank sends in a turn to this memory of two."""
    start = DATA_OFFSET + sender * SENDER_BYTES + turn % 2 * MAX_ROWS * PLACE_BYTES
    return memory[start : start + PLACE_BYTES].view(torch.int64)


def test_a_program_gives_up_on_a_rank_that_does_not_come() -> None:
    memory, both = memory_of_two()
    peer_sum_triton(torch.ones(2, 16), memory)
    assert memory.host.tolist() == [2, 0]  # 1 + the rank
    assert words_of(both[1], turn=1, sender=0)[:16].tolist() == [(1 << 32) | ONE] * 16  # it got the row


def test_turns_overflow() -> None:
    """The turn after 2 ** 31 - 1 is - 2 ** 31."""
    for sent, failed in ((2**31 - 1, 2), (-(2**31), 0), (1 - 2**31, 2)):
        memory, both = memory_of_two()
        both[0, :DATA_OFFSET].view(torch.int32)[0] = 2**31 - 1  # this rank's last turn of row 0
        words_of(both[0], 0, sender=1)[:16] = (sent << 32) | ONE
        found = peer_sum_triton(torch.ones(1, 16), memory)
        assert memory.host[0] == failed
        assert failed or torch.equal(found, torch.full((1, 16), 2.0))


def test_a_program_waits_for_every_word() -> None:
    """A row whose last word is of the turn before last has not arrived."""
    memory, both = memory_of_two()
    words = words_of(both[0], turn=1, sender=1)
    words[:15] = (1 << 32) | ONE
    words[15] = (-1 << 32) | ONE
    peer_sum_triton(torch.ones(1, 16), memory)
    assert memory.host.tolist() == [2, 0]


def test_rows_that_do_not_fit_are_refused() -> None:
    memory, _ = memory_of_two()
    x = torch.ones(1, 8200)
    with pytest.raises(AssertionError, match="rows of 8200 do not fit"):
        peer_sum_rms_norm_triton(x, x, x[0], 1e-5, memory)


def test_after_a_rank_is_missing_no_program_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step has many sums: only the first one that a lost rank does not take part in may take time."""
    monkeypatch.setattr(RankMemories, "polls_per_look", 16)  # the interpreter is slow
    memory, _both = memory_of_two()
    memory = memory._replace(polls=2**31 - 1)
    memory.host[1] = 2  # the host has noticed it
    peer_sum_triton(torch.ones(1, 16), memory)
    assert memory.host.tolist() == [2, 2]
    memory.host[1] = 0
    peer_gather_triton(torch.ones(1, 16), memory)  # or this would take an hour
