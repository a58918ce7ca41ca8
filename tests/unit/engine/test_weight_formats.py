"""Weight formats: chosen by the checkpoint's config, read in pieces, and mixed within a model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from common.checkpoint.model_config import ModelConfig, model_fingerprint
from common.checkpoint.model_files import read_weight_files
from common.checkpoint.weight_formats import DENSE, FORMATS
from common.engine.formats.dense import DenseLinear
from common.engine.forward.model_runner import load_model
from common.engine.layers.piece import Piece
from common.engine.weights import load_weights
from common.errors import ModelError
from common.node.memory import weight_bytes
from tests.fakes import int8_format
from tests.fakes.int8_format import Int8Linear
from tests.fakes.int8_record import METHOD, ROW, Int8Weights
from tests.unit.engine import families
from tests.unit.engine.paged_driver import Driver

IGNORED = ("lm_head", "model.layers.0.self_attn.o_proj", "model.layers.1.mlp.down_proj")


@pytest.fixture
def dense(tmp_path: Path) -> Path:
    return families.save(families.build("qwen3-layer-types-bias"), tmp_path / "dense")


@pytest.fixture
def path(dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write an 8-bit checkpoint with some dense products, and add the record that defines its format."""
    int8_format.write_checkpoint(dense, tmp_path / "int8", IGNORED)
    monkeypatch.setitem(FORMATS, METHOD, ROW)
    return tmp_path / "int8"


def test_the_config_chooses_the_format(dense: Path, path: Path) -> None:
    assert ModelConfig.load(dense).weights == DENSE
    assert ModelConfig.load(path).weights == Int8Weights(METHOD, IGNORED)
    kinds = {type(product) for product in load_model(path)[0].modules()}
    assert {DenseLinear, Int8Linear} <= kinds
    assert Int8Linear not in {type(product) for product in load_model(dense)[0].modules()}


def test_an_unknown_format_is_refused(path: Path) -> None:
    del FORMATS[METHOD]
    with pytest.raises(ModelError, match=r"quantization int8-rows is not supported; supported are float32"):
        ModelConfig.load(path)


def test_a_format_refuses_settings_that_it_does_not_know(path: Path) -> None:
    file = path / "config.json"
    config = json.loads(file.read_text())
    config["quantization_config"]["activation_bits"] = 4
    file.write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"config\.json: quantization_config: activation_bits must be 8"):
        ModelConfig.load(path)


def test_nodes_of_other_settings_do_not_share_pages(path: Path) -> None:
    before = model_fingerprint(path)
    file = path / "config.json"
    config = json.loads(file.read_text())
    config["quantization_config"]["ignore"].append("model.layers.2.mlp.down_proj")
    file.write_text(json.dumps(config))
    assert model_fingerprint(path) != before


def test_quantised_weights_are_loaded_as_they_are(path: Path) -> None:
    """The parts of a merged product are consecutive; `dense` returns them as floats."""
    stored = load_file(path / "model.safetensors")
    model, _ = load_model(path)
    name = "model.layers.1.self_attn"
    parts = [f"{name}.{part}_proj.weight" for part in "qkv"]
    product = model.get_submodule("layers.1.mixer.qkv_proj")
    assert isinstance(product, Int8Linear)
    assert torch.equal(product.codes, torch.cat([stored[part] for part in parts]))
    assert torch.equal(product.scales, torch.cat([stored[f"{part}_scale"] for part in parts]))
    expected = torch.cat([stored[part].float() * stored[f"{part}_scale"] for part in parts])
    assert torch.equal(product.dense(), expected)


@pytest.mark.parametrize("chunk", [None, 3])
def test_logits_are_near_those_of_the_dense_model(chunk: int | None, dense: Path, path: Path) -> None:
    ids = torch.arange(20) * 7 % 90
    found, expected = (
        Driver(load_model(each)[0], [ids], page_size=4).run_all(chunk, [14])[0] for each in (path, dense)
    )
    error = (found - expected).norm() / expected.norm()
    assert 0 < error < 0.1


def test_the_memory_plan_counts_bytes_as_they_are_loaded(dense: Path, path: Path) -> None:
    floats, quantised = (weight_bytes(read_weight_files(each), torch.float32) for each in (dense, path))
    model, _ = load_model(path)
    assert quantised == sum(parameter.nbytes for parameter in model.parameters())
    assert quantised < floats == sum(parameter.nbytes for parameter in load_model(dense)[0].parameters())


def test_pieces_of_one_tensor_fill_several_views(tmp_path: Path) -> None:
    whole = torch.arange(24.0).view(4, 6)
    save_file({"stack": whole}, tmp_path / "model.safetensors")
    first, second = torch.zeros(4, 2), torch.zeros(1, 6, dtype=torch.bfloat16)
    pieces = [Piece("stack", first, (4, 6), (0, 3)), Piece("stack", second, (4, 6), (2, 0))]
    load_weights(tmp_path, pieces)
    assert torch.equal(first, whole[:, 3:5])
    assert torch.equal(second, whole[2:3].bfloat16())


def test_pieces_of_a_tensor_of_another_shape_are_refused(tmp_path: Path) -> None:
    save_file({"stack": torch.zeros(4, 5)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"wrongly shaped tensors: stack \[4, 5\] instead of \[4, 6\]"):
        load_weights(tmp_path, [Piece("stack", torch.zeros(4, 2), (4, 6), (0, 3))])


@pytest.mark.parametrize(
    ("storage", "stored", "taken"),
    [
        (torch.int8, torch.int8, True),
        (torch.float8_e4m3fn, torch.float8_e4m3fn, True),
        (torch.int64, torch.int32, True),
        (torch.float32, torch.float16, True),
        (torch.float32, torch.float8_e4m3fn, False),
        (torch.int8, torch.uint8, False),
        (torch.uint8, torch.float32, False),
    ],
)
def test_storage_takes_its_own_dtype(
    storage: torch.dtype, stored: torch.dtype, taken: bool, tmp_path: Path
) -> None:
    """Floats are rounded to the dtype of the model; codes are never taken for values, nor the reverse."""
    values = torch.arange(6).to(stored)
    save_file({"part": values}, tmp_path / "model.safetensors")
    into = torch.zeros(6, dtype=storage)
    if taken:
        load_weights(tmp_path, [Piece.all_of("part", into)])
        assert torch.equal(into.float(), values.float())
    else:
        with pytest.raises(ModelError, match=r"unsupported dtype: part \w+ \(supported: "):
            load_weights(tmp_path, [Piece.all_of("part", into)])
