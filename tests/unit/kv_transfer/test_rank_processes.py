"""Ranks of unequal tensor-parallel sizes transfer between two processes: the prefill rank runs in a child."""

from __future__ import annotations

import pytest
import torch

from common.kv_cache.pool_layout import PlacedPlane
from tests.fakes.transfer_child import pattern
from tests.fakes.transfer_rig import SEED, Rig

SRC, DST = [3, 4, 5, 9, 1], [2, 3, 7, 6, 1]


def values(memory: torch.Tensor, placed: PlacedPlane) -> torch.Tensor:
    """Return the values of one plane, [pages, page_size, heads, head_dim]."""
    flat = memory[placed.offset : placed.offset + placed.nbytes].view(torch.int16)
    return flat.view(placed.items, -1, *placed.entry)


@pytest.mark.parametrize(
    ("transport", "ranks", "heads", "sent"),
    [
        ("tcp", ((0, 1), (1, 2)), 8, slice(4, 8)),
        ("shm", ((2, 4), (1, 2)), 2, slice(0, 1)),  # both hold the second of two heads
    ],
    ids=["tcp-1to2", "shm-4to2"],
)
def test_a_rank_in_another_process_writes_its_share(
    transport: str, ranks: tuple[tuple[int, int], tuple[int, int]], heads: int, sent: slice
) -> None:
    rig = Rig(transport, layers=[(heads, 16)] * 2, pages=(12, 10), page_size=4, ranks=ranks)
    try:
        room = rig.send_room(SRC, DST)
        assert room["lost"] == ""
        assert room["arrived"] is not None
        source = pattern(rig.src.total_bytes, SEED, "cpu")
        for theirs, ours in zip(rig.src.planes, rig.dst.planes, strict=True):
            found = values(rig.storage, ours)
            assert torch.equal(found[DST], values(source, theirs)[SRC][:, :, sent])
            assert not found[[0, 4, 5, 8, 9]].any()
    finally:
        rig.close()
