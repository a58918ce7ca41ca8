"""What ranks read of a checkpoint's files: their share, and of all values each at least once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

import common.engine.weights
from common.checkpoint.model_files import read_weight_files
from common.engine.forward.model_runner import load_model
from common.engine.layers.ranks import OneRank, divide_by_expert
from common.errors import ModelError
from common.kv_cache.shard import Shard
from tests.unit.engine import families

MODELS = Path(__file__).parents[3] / "deploy" / "tiny_models"
# What every rank has; the keys and values of two heads are on two ranks each if there are four.
REPLICATED = ("norm", "mlp.gate.weight", "shared_expert_gate")
KEYS = ("k_proj", "v_proj")


class CountedFile:
    """A safetensors file that counts how often each value of each tensor is read."""

    counts: dict[str, Tensor]

    def __init__(self, path: str, framework: str, device: str) -> None:
        self._file: Any = safe_open(path, framework=framework, device=device)

    def __enter__(self) -> CountedFile:
        self._file.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._file.__exit__(*error)

    def get_tensor(self, name: str) -> Tensor:
        self._count(name)[...] += 1
        return self._file.get_tensor(name)

    def get_slice(self, name: str) -> Any:
        return CountedSlice(self._file.get_slice(name), self._count(name))

    def _count(self, name: str) -> Tensor:
        shape = self._file.get_slice(name).get_shape()
        return self.counts.setdefault(name, torch.zeros(shape, dtype=torch.int64))


class CountedSlice:
    def __init__(self, given: Any, count: Tensor) -> None:
        self._given, self._counted = given, count

    def __getitem__(self, block: tuple[slice, ...]) -> Tensor:
        self._counted[block] += 1
        return self._given[block]


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("model", ["tiny-target", "tiny-moe", "tiny-hybrid", "tiny-tools"])
def test_ranks_read_their_share(model: str, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    counts: dict[str, Tensor] = {}
    monkeypatch.setattr(CountedFile, "counts", counts, raising=False)
    monkeypatch.setattr(common.engine.weights, "safe_open", CountedFile)
    for rank in range(size):
        load_model(MODELS / model, "float32", ranks=OneRank(Shard(rank, size)))
    stored = {name for file in read_weight_files(MODELS / model) for name in file.tensors}
    assert stored - counts.keys() <= {name for name in stored if name.startswith("mtp.")}
    for name, count in counts.items():
        times = size if any(part in name for part in REPLICATED) else 1
        if any(part in name for part in KEYS):
            times = max(size // 2, 1)
        assert (count == times).all(), (
            f"{name} is read {sorted(set(count.flatten().tolist()))} times, not {times}"
        )


@pytest.mark.parametrize("quantization", ["none", "fp8"])
def test_one_rank_reads_the_biases_of_sums(
    quantization: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other ranks expect them in the file, and name one that is missing."""
    families.save(families.build("llama-yarn-biases"), tmp_path)
    counts: dict[str, Tensor] = {}
    monkeypatch.setattr(CountedFile, "counts", counts, raising=False)
    monkeypatch.setattr(common.engine.weights, "safe_open", CountedFile)
    for rank in range(2):
        load_model(tmp_path, "float32", ranks=OneRank(Shard(rank, 2)), quantization=quantization)
    biases = {name: count for name, count in counts.items() if name.endswith(".bias")}
    assert len(biases) == 2 * 7
    assert all((count == 1).all() for count in biases.values())
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    missing = "model.layers.1.self_attn.o_proj.bias"
    del tensors[missing]
    save_file(tensors, file)
    with pytest.raises(ModelError, match=f"missing tensors: {missing}"):
        load_model(tmp_path, "float32", ranks=OneRank(Shard(1, 2)), quantization=quantization)


def test_ranks_with_whole_experts_read_a_checkpoint_with_a_matrix_per_expert(tmp_path: Path) -> None:
    """The tensors of other ranks' experts are expected, and missing ones are named on every rank."""
    families.save(families.build("glm4-moe-groups"), tmp_path)
    for rank in range(2):
        model, config = load_model(tmp_path, "float32", ranks=OneRank(Shard(rank, 2), divide_by_expert))
        assert config.experts is not None
        elsewhere = {piece.name for piece in model.pieces() if piece.elsewhere}
        assert any("shared_experts" in name for name in elsewhere) == (rank == 0)
