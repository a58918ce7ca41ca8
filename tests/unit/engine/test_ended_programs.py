"""How the keys of a prompt are divided among programs, whose ends are counted."""

from __future__ import annotations

import pytest

from common.engine.ops.ended_programs import MAX_SPLITS, MAX_TILES, choose_splits


@pytest.mark.parametrize(
    ("tiles", "counts", "programs", "splits"),
    [
        (8, 8, 132, 16),
        (16, 16, 132, 8),
        (64, 64, 132, 2),
        (128, 128, 132, 1),
        (256, 256, 132, 1),
        (1, 1, 132, MAX_SPLITS),
        (32, MAX_TILES, 132, 4),
        (32, MAX_TILES + 1, 132, 1),
    ],
)
def test_parts_give_each_processor_work_if_their_tiles_can_be_counted(
    tiles: int, counts: int, programs: int, splits: int
) -> None:
    assert choose_splits(tiles, counts, programs) == splits
