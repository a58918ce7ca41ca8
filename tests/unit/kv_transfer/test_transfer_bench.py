"""The benchmark of transfers with a model's per-request planes, between two processes of a CPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.bench import shapes, transfer
from tests.unit.speculative.test_constructed_shapes import HYBRID, MOE, small


def test_what_states_add_to_a_room(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(small(HYBRID)))
    spec = transfer.shape_spec(str(tmp_path))
    (row,) = transfer.run_state("shm", ("cpu", "cpu"), spec, [20], checksums=True)
    assert row["state_mib"] * (1 << 20) == spec.state_bytes > 0
    assert row["pages_mib"] * (1 << 20) == 2 * spec.page_bytes
    assert row["pages_us"] > 0 < row["room_us"]
    assert row["added_us"] == row["room_us"] - row["pages_us"]
    assert f"added {row['added_us']:.0f}" in transfer.line(row)


def test_the_published_state_has_64_megabytes_and_other_models_have_none() -> None:
    spec = transfer.shape_spec(HYBRID)
    assert spec.state_bytes == 30 * (49_152 + 2_097_152)
    assert shapes.config_at(shapes.config_of(MOE)).gated_delta is None
    with pytest.raises(SystemExit, match="keeps no state per request"):
        transfer.shape_spec(MOE)


def test_a_rank_sends_its_heads_to_a_whole_node() -> None:
    (row,) = transfer.run("shm", ("cpu", "cpu"), [32], checksums=True, ranks=(2, 1))
    assert row["mib"] * (1 << 20) == 2 * transfer.PAGE * 32 * 2 * 4 * 128 * 2
    assert row["write_us"] > 0
    with pytest.raises(SystemExit, match="as 2x1"):
        transfer.rank_sizes("3x1")
