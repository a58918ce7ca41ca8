"""Blocks of weight files by way of a ring of buffers: the same as mapped tensors, for any size of block and buffer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from common.checkpoint.safetensors_header import WeightFile, read_header
from common.engine import weights
from common.engine.forward.model_runner import load_model
from common.engine.layers.piece import Piece
from common.engine.staged_reads import Read, StagedReads
from common.engine.weights import load_weights
from common.errors import ModelError
from common.observability.start_times import StartTimes
from tests.unit.engine import families

ALL = slice(None)
CPU = torch.device("cpu")
READS: list[Read] = [
    ("experts", (ALL, ALL, ALL)),
    ("experts", (slice(1, 3), slice(2, 5), ALL)),
    ("experts", (slice(0, 1), slice(1, 2), slice(3, 8))),
    ("rows", (slice(3, 30), ALL)),
    ("rows", (ALL, slice(5, 11))),
    ("scale", ()),
    ("one", (ALL,)),
    ("none", (ALL, ALL)),
    ("codes", (slice(2, 90),)),
]


@pytest.fixture
def file(tmp_path: Path) -> WeightFile:
    torch.manual_seed(0)
    content = {
        "experts": torch.randn(4, 6, 10).bfloat16(),
        "rows": torch.randn(33, 17),
        "scale": torch.tensor(0.5),
        "one": torch.tensor([2], dtype=torch.int64),
        "none": torch.zeros(0, 3),
        "codes": torch.randn(100).to(torch.float8_e4m3fn),
    }
    save_file(content, tmp_path / "model.safetensors")
    return read_header(tmp_path / "model.safetensors")


def bits(values: Tensor) -> bytes:
    return values.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("slot_bytes", [8, 50, 1 << 20])
@pytest.mark.parametrize("slots", [1, 3])
def test_blocks_equal_those_of_mapped_tensors(slot_bytes: int, slots: int, file: WeightFile) -> None:
    stored = load_file(file.path)
    with StagedReads(CPU, threads=2, slots=slots, slot_bytes=slot_bytes) as staged:
        for _ in range(2):
            found = list(staged.blocks(file, READS))
            for (name, block), values in zip(READS, found, strict=True):
                expected = stored[name][block] if block else stored[name]
                assert (values.dtype, values.shape) == (expected.dtype, expected.shape)
                assert bits(values) == bits(expected), (name, block)


def test_reads_that_are_given_up_leave_their_buffers_free(file: WeightFile) -> None:
    with StagedReads(CPU, threads=2, slots=2, slot_bytes=64) as staged:
        for _ in range(3):
            blocks = staged.blocks(file, READS)
            next(blocks)
            blocks.close()
        assert len(list(staged.blocks(file, READS))) == len(READS), "all buffers are free again"


def test_threads_of_a_gpu_wait_for_the_last_copy_from_a_buffer(
    file: WeightFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And they do so on the GPU of the weights, not on the first one, where they would open a context."""
    waits, current = [0], set[torch.device]()
    empty = torch.empty

    class Event:
        def record(self) -> None:
            """Record nothing."""

        def synchronize(self) -> None:
            waits[0] += 1

    def on_host(*size: Any, dtype: torch.dtype, **_: object) -> Tensor:
        return empty(*size, dtype=dtype)

    monkeypatch.setattr(torch, "empty", on_host)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "set_device", current.add)
    with StagedReads(torch.device("cuda", 1), threads=2, slots=2, slot_bytes=50) as staged:
        (found,) = staged.blocks(file, [("experts", (ALL, ALL, ALL))])
    assert torch.equal(found, load_file(file.path)["experts"])
    assert waits[0] == 4 * 3 - 2, "each of 4 experts of 120 bytes takes 3 parts; 2 buffers are new"
    assert current == {torch.device("cuda", 1)}


def test_a_file_that_has_changed_since_its_header_was_read_is_refused(file: WeightFile) -> None:
    file.path.write_bytes(file.path.read_bytes()[:-1])
    with (
        StagedReads(CPU, threads=1) as staged,
        pytest.raises(ModelError, match="cannot be read as safetensors: it has"),
    ):
        list(staged.blocks(file, READS))


@pytest.mark.parametrize("name", ["qwen3-layer-types-bias", "qwen3-moe"])
def test_models_are_filled_alike(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = families.save(families.build(name), tmp_path, max_shard_size="30KB")
    expected = load_model(path)[0].state_dict()
    monkeypatch.setattr(weights, "STAGED", "cpu")
    monkeypatch.setattr(weights, "safe_open", None)
    told: list[tuple[int, int]] = []
    times = StartTimes()
    with times.counting():
        found = load_model(path, progress=lambda *done: told.append(done))[0].state_dict()
    assert str(times.fields()["start_file_waits"]).startswith("1 in ")
    assert all(torch.equal(values, found[name]) for name, values in expected.items())
    assert told == sorted(told)
    assert told[-1][0] == told[-1][1]


def test_pieces_of_other_ranks_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_file({"a": torch.ones(2), "b": torch.ones(2)}, tmp_path / "model.safetensors")
    monkeypatch.setattr(weights, "STAGED", "cpu")
    one, other = torch.zeros(2), torch.zeros(2)
    pieces = [Piece.all_of("a", one)._replace(elsewhere=True), Piece.all_of("b", other)]
    load_weights(tmp_path, pieces)
    assert (one.tolist(), other.tolist()) == ([0, 0], [1, 1])
