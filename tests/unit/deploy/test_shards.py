"""Files of a large checkpoint: the values that were made, in files of bounded size that the loader reads."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from common.checkpoint.model_files import read_weight_files
from deploy.tiny_models import shards
from deploy.tiny_models.shards import Stored, write_shards

CPU = torch.device("cpu")


def stored(name: str, values: Tensor, dtype: torch.dtype = torch.bfloat16) -> Stored:
    return Stored(name, tuple(values.shape), dtype, lambda: values)


def test_values_are_written_in_chunks_to_several_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shards, "CHUNK_BYTES", 100)  # divides neither the tensors nor their rows
    made = {f"layers.{index}": torch.randn(7, 11, 3) for index in range(5)}
    tensors = [stored(name, values) for name, values in made.items()]
    tensors.insert(2, stored("A_log", torch.randn(5), torch.float32))
    write_shards(tmp_path, tensors, CPU, most=1000)
    files = read_weight_files(tmp_path)
    assert [list(file.tensors) for file in files] == [
        ["layers.0", "layers.1", "A_log"],
        ["layers.2", "layers.3"],
        ["layers.4"],
    ]
    found = {name: value for file in files for name, value in load_file(file.path).items()}
    assert torch.equal(found.pop("A_log"), tensors[2].make())
    assert found.keys() == made.keys()
    assert all(torch.equal(value, made[name].to(torch.bfloat16)) for name, value in found.items())


def test_what_fails_in_a_thread_ends_the_writer(tmp_path: Path) -> None:
    def broken() -> Tensor:
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        write_shards(tmp_path, [Stored("a", (2,), torch.float32, broken)], CPU)
    assert not list(tmp_path.glob("*.json"))
