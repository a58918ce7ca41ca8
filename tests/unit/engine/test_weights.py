"""Weights from safetensors: sharded, in any float dtype, merged in place; everything else refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from common.engine.forward.model_runner import load_model
from common.engine.models.causal_lm import CausalLM
from common.engine.weights import resolve_dtype
from common.errors import ModelError
from tests.unit.engine import families


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return families.save(families.build("qwen3-layer-types-bias"), tmp_path / "model")


def tensors(model: CausalLM) -> dict[str, Tensor]:
    return {piece.name: piece.into for piece in model.pieces()}


def rewrite(path: Path, remove: str = "", **changes: Tensor) -> None:
    """Replace tensors of a single-file checkpoint; dots in names are written as two underscores."""
    file = path / "model.safetensors"
    content = {**load_file(file), **{name.replace("__", "."): value for name, value in changes.items()}}
    content.pop(remove, None)
    save_file(content, file)


@pytest.mark.parametrize("name", families.FAMILIES)
def test_every_tensor_of_a_checkpoint_arrives_unchanged(name: str, tmp_path: Path) -> None:
    path = families.save(families.build(name), tmp_path)
    stored = load_file(path / "model.safetensors")
    pieces = [each for piece in load_model(path)[0].pieces() for each in piece.stored_as(stored)]
    assert {piece.name for piece in pieces} == set(stored)
    assert sum(piece.into.numel() for piece in pieces) == sum(value.numel() for value in stored.values())
    for piece in pieces:
        assert torch.equal(piece.into, stored[piece.name][piece.block] + piece.plus), piece.name


def test_sharded_checkpoint_equals_the_single_file(path: Path, tmp_path: Path) -> None:
    sharded = families.save(
        families.build("qwen3-layer-types-bias"), tmp_path / "many", max_shard_size="30KB"
    )
    assert len(list(sharded.glob("*.safetensors"))) > 3
    one, many = tensors(load_model(path)[0]), tensors(load_model(sharded)[0])
    assert all(torch.equal(one[name], many[name]) for name in one)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_checkpoints(dtype: torch.dtype, tmp_path: Path) -> None:
    model = families.build("llama")
    path = families.save(model, tmp_path, dtype)
    wide, config = load_model(path)
    assert config.dtype == str(dtype).removeprefix("torch.")
    assert wide.lm_head.dense().dtype == torch.float32  # "auto" on the CPU
    assert torch.equal(wide.lm_head.dense(), model.lm_head.weight.float())
    narrow = load_model(path, dtype=config.dtype)[0]
    assert all(value.dtype == dtype for value in tensors(narrow).values())
    assert torch.equal(narrow.lm_head.dense(), model.lm_head.weight)


def test_dtype_auto() -> None:
    assert resolve_dtype("auto", "bfloat16", torch.device("cpu")) == torch.float32
    assert resolve_dtype("auto", "bfloat16", torch.device("cuda")) == torch.bfloat16
    assert resolve_dtype("float16", "bfloat16", torch.device("cuda")) == torch.float16
    with pytest.raises(ModelError, match="'int8' is not supported; supported are auto"):
        resolve_dtype("int8", "bfloat16", torch.device("cpu"))


def test_merged_products_are_views_of_one_matrix(path: Path) -> None:
    model = load_model(path)[0]
    named = tensors(model)
    layer: Any = model.get_submodule("layers.0")
    qkv = layer.mixer.qkv_proj.dense()
    parts = [named[f"model.layers.0.self_attn.{part}.weight"] for part in ("q_proj", "k_proj", "v_proj")]
    assert {part.untyped_storage().data_ptr() for part in parts} == {qkv.untyped_storage().data_ptr()}
    assert torch.equal(torch.cat(parts), qkv)


def test_progress_rises_to_the_total(path: Path) -> None:
    seen: list[tuple[int, int]] = []
    load_model(path, progress=lambda loaded, total: seen.append((loaded, total)))
    total = sum(value.numel() * 4 for value in load_file(path / "model.safetensors").values())
    assert seen[-1] == (total, total)
    assert [loaded for loaded, _ in seen] == sorted({loaded for loaded, _ in seen})


def test_harmless_tensors_are_ignored(tmp_path: Path) -> None:
    path = families.save(families.build("llama3-scaling-tied"), tmp_path)
    expected = tensors(load_model(path)[0])
    rewrite(
        path,
        model__layers__0__self_attn__rotary_emb__inv_freq=torch.ones(6),
        # A copy, as files of torch have it.
        lm_head__weight=expected["model.embed_tokens.weight"].clone(),
    )
    model = load_model(path)[0]
    assert all(torch.equal(value, expected[name]) for name, value in tensors(model).items())
    assert model.lm_head.dense() is model.embed_tokens.weight


def test_a_head_that_is_not_the_embedding_is_used_although_the_config_ties_them(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As transformers does since version 5; vLLM and SGLang ignore it."""
    path = families.save(families.build("llama3-scaling-tied"), tmp_path)
    head = torch.randn(96, 48, generator=torch.Generator().manual_seed(1))
    content = {**load_file(path / "model.safetensors"), "lm_head.weight": head}
    save_file(content, path / "model.safetensors", metadata={"format": "pt"})
    assert torch.equal(AutoModelForCausalLM.from_pretrained(path).lm_head.weight, head)
    caplog.clear()
    with caplog.at_level("WARNING", "tandem.weights"):
        model, config = load_model(path)
    assert not config.tie_word_embeddings
    assert torch.equal(model.lm_head.dense(), head)
    [record] = caplog.records
    assert record.fields == {"path": str(path), "tensor": "lm_head.weight"}  # type: ignore[attr-defined]


def test_missing_unexpected_and_wrongly_shaped_tensors_are_named_together(path: Path) -> None:
    rewrite(
        path,
        remove="model.layers.1.self_attn.k_norm.weight",
        model__norm__weight=torch.ones(47),
        model__layers__0__mlp__expert__weight=torch.ones(3),
        model__layers__0__mlp__up_proj__weight=torch.ones(80, 48, dtype=torch.int8),
    )
    with pytest.raises(ModelError) as refusal:
        load_model(path)
    text = str(refusal.value)
    assert "missing tensors: model.layers.1.self_attn.k_norm.weight" in text
    assert "unexpected tensors: model.layers.0.mlp.expert.weight" in text
    assert "wrongly shaped tensors: model.norm.weight [47] instead of [48]" in text
    assert "model.layers.0.mlp.up_proj.weight I8" in text


def test_an_untied_model_needs_its_lm_head(path: Path) -> None:
    rewrite(path, remove="lm_head.weight")
    with pytest.raises(ModelError, match=r"missing tensors: lm_head\.weight"):
        load_model(path)


def cut(data: bytes) -> bytes:
    return data[:-100]


def cut_header(data: bytes) -> bytes:
    return data[:50]


def garble_header(data: bytes) -> bytes:
    return data[:8] + b"x" * 40 + data[48:]


def append(data: bytes) -> bytes:
    return data + b"\0" * 8


@pytest.mark.parametrize("damage", [cut, cut_header, garble_header, append, lambda _data: b""])
def test_truncated_and_corrupt_files_are_named(damage: object, path: Path) -> None:
    assert callable(damage)
    file = path / "model.safetensors"
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(ModelError, match=r"model\.safetensors .*(truncated|corrupt|cut off)"):
        load_model(path)


def test_a_header_that_lies_about_its_tensors_is_refused(path: Path) -> None:
    """Shapes and sizes that our header check trusts are checked by safetensors itself."""
    file = path / "model.safetensors"
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    first, second = header["model.norm.weight"], header["model.layers.0.input_layernorm.weight"]
    first["data_offsets"] = second["data_offsets"]  # two tensors at the same place
    text = json.dumps(header).encode().ljust(length)
    file.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])
    with pytest.raises(ModelError, match=r"model\.safetensors"):
        load_model(path)


def test_only_safetensors_are_loaded(path: Path) -> None:
    (path / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"found no weights; supported weights are model\.safetensors"):
        load_model(path)
    (path / "pytorch_model.bin").write_bytes(b"pickle")
    (path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelError, match=r"found model\.gguf, pytorch_model\.bin; supported weights are"):
        load_model(path)


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        ({}, "has no weight_map"),
        ({"a": "../other/model.safetensors"}, "only \\*\\.safetensors files beside it"),
        ({"a": "pytorch_model.bin"}, "only \\*\\.safetensors files beside it"),
        ({"a": "model-00001-of-00002.safetensors"}, "which is not in"),
    ],
)
def test_index_files_that_point_elsewhere_are_refused(
    weight_map: dict[str, str], message: str, path: Path
) -> None:
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ModelError, match=message):
        load_model(path)


def test_a_tensor_in_two_shards_is_refused(path: Path) -> None:
    save_file({"lm_head.weight": torch.zeros(96, 48)}, path / "extra.safetensors")
    index = {"weight_map": {"lm_head.weight": "extra.safetensors", "model.norm.weight": "model.safetensors"}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match=r"lm_head\.weight is in both"):
        load_model(path)
