"""Published checkpoints load, or are refused with the sentence that docs/checkpoints.md says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from common.checkpoint.families import FAMILIES
from common.checkpoint.model_config import ModelConfig
from common.engine.forward.model_runner import load_model
from common.errors import ModelError
from tests.fakes.fp8_checkpoint import quantised_tensors
from tests.unit.checkpoint.published import PUBLISHED, Published, page
from tests.unit.checkpoint.published_tensors import shrink, tensors, write_zeros

LOADS = [each for each in PUBLISHED if not each.refused]
REFUSED = [each for each in PUBLISHED if each.refused]


def replica(row: Published, path: Path, small: bool) -> Path:
    """Write the config, and if `small` the tensors of a small form of it."""
    config = shrink(row.config) if small else row.config
    (path / "config.json").write_text(json.dumps({**config, "architectures": [row.architecture]}))
    if row.processor is not None and not small:
        (path / "preprocessor_config.json").write_text(json.dumps(row.processor))
    if small:
        write_zeros(tensors(row.architecture, config, row.modules), path / "model.safetensors")
        if "quantization_config" in config:
            dense = load_file(path / "model.safetensors")
            save_file(quantised_tensors(dense, config["quantization_config"]), path / "model.safetensors")
    return path


def test_the_page_says_what_the_rows_say() -> None:
    """If it fails: python -m tests.unit.checkpoint.published > docs/checkpoints.md."""
    assert (Path(__file__).parents[3] / "docs/checkpoints.md").read_text() == page()
    assert len({each.name for each in PUBLISHED}) == len(PUBLISHED) >= 25


@pytest.mark.parametrize("row", LOADS, ids=lambda row: row.name)
def test_it_loads(row: Published, tmp_path: Path) -> None:
    """The config of full size is read; the server's loader takes a small replica with the published names."""
    config = ModelConfig.load(replica(row, tmp_path, small=False))
    text = row.config.get("text_config", row.config)
    assert (config.num_layers, config.hidden_size) == (text["num_hidden_layers"], text["hidden_size"])
    assert (config.vision is None) == (row.processor is None)
    if row.architecture not in FAMILIES:  # not without its vision part
        return
    (tmp_path / "small").mkdir()
    model, small = load_model(replica(row, tmp_path / "small", small=True))
    assert small.architecture == row.architecture
    assert not model.embed(torch.arange(3)).any()


@pytest.mark.parametrize("row", REFUSED, ids=lambda row: row.name)
def test_it_is_refused(row: Published, tmp_path: Path) -> None:
    path = replica(row, tmp_path, small=False)
    with pytest.raises(ModelError) as refusal:
        ModelConfig.load(path)
    assert str(refusal.value).startswith(f"{path / 'config.json'}: {row.refused}")


def test_a_replica_with_another_name_is_refused(tmp_path: Path) -> None:
    path = replica(LOADS[0], tmp_path, small=True)
    found = load_file(path / "model.safetensors")
    found["model.layers.0.mlp.fc1.weight"] = found.pop("model.layers.0.mlp.up_proj.weight")
    save_file(found, path / "model.safetensors")
    with pytest.raises(ModelError, match=r"missing tensors: .*up_proj.weight; unexpected tensors: .*fc1"):
        load_model(path)
