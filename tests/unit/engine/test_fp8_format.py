"""FP8 checkpoints of every published form, merged parts with their own scales, and weights quantised at load time."""

from __future__ import annotations

import itertools
import json
import re
from math import inf, nan
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from common.checkpoint.fp8_weights import BLOCK, EVERYTHING, ONLINE, TENSOR, Fp8Scheme, Fp8Weights
from common.checkpoint.model_config import ModelConfig, model_fingerprint
from common.checkpoint.model_files import read_weight_files
from common.engine.formats.dense import DenseLinear
from common.engine.formats.fp8 import Fp8Format, Fp8Linear
from common.engine.formats.fp8_experts import Fp8Experts
from common.engine.formats.mixed_format import MixedFormatLinear
from common.engine.forward.model_runner import load_model
from common.engine.layers.activations import Activations
from common.engine.layers.blocks import FeedForward
from common.engine.layers.linear import Linear
from common.engine.layers.parts import Columns, WeightBlock
from common.engine.layers.placement import Placement
from common.engine.models.causal_lm import CausalLM
from common.engine.ops.fp8_linear import values_of
from common.engine.ops.fp8_rows import quantize_rows
from common.engine.weights import load_weights
from common.errors import ConfigError, ModelError
from common.kv_cache.shard import WHOLE
from common.node.device_memory import bytes_not_held
from common.node.memory import weight_bytes
from tests.fakes.fp8_checkpoint import write_checkpoint
from tests.fakes.fp8_sections import BLOCKS, MODELOPT, MODELOPT_FILE, SECTIONS, TENSOR_STATIC
from tests.unit.engine import families
from tests.unit.engine.paged_driver import Driver

ATTENTION = "model.layers.1.self_attn"
FAMILIES = {
    "dense": "llama-yarn-biases",
    "experts": "qwen3-moe",
    "shared": "glm4-moe",
    "delta": "qwen3.5-moe-tied",
}
PLACEMENT = Placement(torch.float32, torch.device("cpu"))
WIDTH = Columns(256, 0, 256)
IDS = torch.arange(20) * 7 % 90


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Write a dense checkpoint of each family."""
    path = tmp_path_factory.mktemp("dense")
    # Rows of queries and gates alternate by heads, which blocks of scales must not cut.
    more = {"delta": {"head_dim": 128}}
    return {
        name: families.save(families.build(family, **more.get(name, {})), path / name)
        for name, family in FAMILIES.items()
    }


def logits(path: Path, chunk: int | None = None, quantization: str = "none") -> Tensor:
    model = load_model(path, quantization=quantization)[0]
    return Driver(model, [IDS], page_size=4).run_all(chunk, [14])[0]


def check_near(found: Tensor, expected: Tensor, most: float = 0.1) -> None:
    error = (found - expected).norm() / expected.norm()
    assert 0 <= error < most


@torch.inference_mode()
def check_blocks_near(model: CausalLM, dense: CausalLM) -> None:
    """Compare the blocks of every layer on the same inputs; whole random models amplify small differences."""
    x = torch.randn(7, model.config.hidden_size, generator=torch.Generator().manual_seed(1))
    for layer in range(model.config.num_layers):
        products = []
        for each in (model, dense):
            decoder_layer = each.get_submodule(f"layers.{layer}")
            name = "in_proj" if hasattr(decoder_layer.mixer, "in_proj") else "qkv_proj"
            projection = decoder_layer.get_submodule(f"mixer.{name}")
            assert isinstance(projection, Linear)
            feed_forward = decoder_layer.get_submodule("feed_forward")
            assert isinstance(feed_forward, FeedForward)
            products.append((projection.product(Activations(x)), feed_forward(Activations(x))))
        for found, expected in zip(*products, strict=True):
            check_near(found, expected)


@pytest.mark.parametrize("form", SECTIONS)
def test_published_forms_are_served(form: str, checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """Every part of a merged weight keeps its scales exactly."""
    path = write_checkpoint(checkpoints["dense"], tmp_path / form, SECTIONS[form], input_scale=0.05)
    stored = load_file(path / "model.safetensors")
    model, config = load_model(path)
    assert isinstance(config.weights, Fp8Weights)
    expected = []
    for part in "qkv":
        name = f"{ATTENTION}.{part}_proj"
        scheme = config.weights.scheme_of(name)
        assert scheme is not None
        scales = stored[f"{name}.{scheme.scale}"].float()
        if scheme.weights != BLOCK:
            scales = scales.view(-1).expand(len(stored[f"{name}.weight"]))
        expected.append(values_of(stored[f"{name}.weight"], scales))
    product = model.get_submodule("layers.1.mixer.qkv_proj")
    assert isinstance(product, Fp8Linear | MixedFormatLinear)
    assert torch.equal(product.dense(), torch.cat(expected))
    check_blocks_near(model, load_model(checkpoints["dense"])[0])
    torch.testing.assert_close(logits(path, chunk=3), logits(path), atol=0.05, rtol=0)


@pytest.mark.parametrize("form", ["blocks", "channel-dynamic", "compressed-static", "online"])
@pytest.mark.parametrize("family", ["shared", "delta"])
def test_experts_and_gated_delta_layers(
    family: str, form: str, checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    """Of the merged input projection of a gated delta layer, Qwen's files leave two parts dense."""
    path, online = checkpoints[family], form == "online"
    if not online:
        section = SECTIONS[form]
        key = "ignore" if "ignore" in section else "modules_to_not_convert"
        dense = ["lm_head", "re:.*in_proj_[ab]$"]
        path = write_checkpoint(path, tmp_path / form, {**section, key: dense}, input_scale=0.05)
    model = load_model(path, quantization="fp8" if online else "none")[0]
    check_blocks_near(model, load_model(checkpoints[family])[0])
    assert logits(path, quantization="fp8" if online else "none").isfinite().all()


def test_older_modelopt_files_are_beside_the_config(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """Its scales of keys and values are no part of the weights."""
    section = {**MODELOPT_FILE["quantization"], "quant_method": "modelopt"}
    path = write_checkpoint(checkpoints["dense"], tmp_path / "modelopt", section)
    stored = load_file(path / "model.safetensors")
    stored[f"{ATTENTION}.k_proj.k_scale"] = torch.tensor(1.0)
    save_file(stored, path / "model.safetensors")
    (path / "hf_quant_config.json").write_text(json.dumps(MODELOPT_FILE))
    config = json.loads((path / "config.json").read_text())
    del config["quantization_config"]
    (path / "config.json").write_text(json.dumps(config))
    loaded = load_model(path)[1].weights
    assert loaded.describe() == "fp8 (per tensor, static activations)"
    assert isinstance(loaded, Fp8Weights)
    assert loaded.scheme_of("lm_head") is None


def test_a_static_scale_of_merged_parts_is_the_largest(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    path = write_checkpoint(checkpoints["dense"], tmp_path / "static", TENSOR_STATIC)
    stored = load_file(path / "model.safetensors")
    stored[f"{ATTENTION}.k_proj.input_scale"] = torch.tensor([0.5])
    save_file(stored, path / "model.safetensors")
    product = load_model(path)[0].get_submodule("layers.1.mixer.qkv_proj")
    assert isinstance(product, Fp8Linear)
    assert product.input_scale is not None
    assert float(product.input_scale) == 0.5


@pytest.mark.parametrize("wrong", [nan, inf, -inf])
@pytest.mark.parametrize("form", ["blocks", "channel-dynamic", "tensor-static"])
@pytest.mark.parametrize("family", ["dense", "experts"])
def test_scales_of_weights_are_finite(
    family: str, form: str, wrong: float, checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    path = write_checkpoint(checkpoints[family], tmp_path / form, SECTIONS[form])
    stored = load_file(path / "model.safetensors")
    name = next(each for each in stored if "layers.1" in each and "weight_scale" in each and "down" in each)
    stored[name].view(-1)[-1] = wrong
    save_file(stored, path / "model.safetensors")
    with pytest.raises(
        ModelError, match=rf"{re.escape(name)}: 1 of \d+ scales .*not finite, such as {wrong};"
    ):
        load_model(path)


@pytest.mark.parametrize(
    ("family", "wrong"),
    [*itertools.product(("dense", "experts"), (nan, inf, -0.5)), ("dense", 0.0)],
)
def test_scales_of_inputs_are_positive(
    family: str, wrong: float, checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    path = write_checkpoint(checkpoints[family], tmp_path / "static", TENSOR_STATIC)
    stored = load_file(path / "model.safetensors")
    name = next(each for each in stored if "layers.1" in each and each.endswith("input_scale"))
    stored[name].fill_(wrong)
    save_file(stored, path / "model.safetensors")
    with pytest.raises(ModelError, match=rf"{re.escape(name)}: .*a positive number, found {wrong};"):
        load_model(path)


@pytest.mark.parametrize("matrix", ["gate_proj", "up_proj", "down_proj"])
def test_an_expert_that_the_calibration_left_out_has_the_scale_of_the_others(
    matrix: str, checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    """Its own is 0. All experts of a layer have one scale in any case, and without any the checkpoint is useless."""
    path = write_checkpoint(checkpoints["experts"], tmp_path / "static", TENSOR_STATIC)
    stored = load_file(path / "model.safetensors")
    parts = "down_proj" if matrix == "down_proj" else "(gate|up)_proj"
    names = [each for each in stored if re.search(rf"layers\.1\..*experts\.\d+\.{parts}\.input_scale", each)]
    for count, name in enumerate(names, 1):
        stored[name] = torch.tensor([count * 0.25])
    stored[next(each for each in names if matrix in each)].zero_()
    save_file(stored, path / "model.safetensors")
    experts = next(
        module
        for name, module in load_model(path)[0].named_modules()
        if "layers.1" in name and isinstance(module, Fp8Experts)
    )
    assert experts.input_scales is not None
    assert float(experts.input_scales[int(matrix == "down_proj")]) == len(names) * 0.25
    for name in names:
        stored[name].zero_()
    save_file(stored, path / "model.safetensors")
    with pytest.raises(ModelError, match=r"layers\.1.*input_scale: .* is 0, as for all other experts"):
        load_model(path)


def test_weights_are_quantised_at_load_time(checkpoints: dict[str, Path]) -> None:
    """Each row of a weight has its scale; embeddings, norms and the head stay dense."""
    path = checkpoints["dense"]
    stored = load_file(path / "model.safetensors")
    model, config = load_model(path, quantization="fp8")
    assert config.weights == ONLINE
    product = model.get_submodule("layers.1.mixer.qkv_proj")
    assert isinstance(product, Fp8Linear)
    for part, begin in (("q", 0), ("k", 48), ("v", 72)):
        codes, scales = quantize_rows(stored[f"{ATTENTION}.{part}_proj.weight"])
        assert torch.equal(product.codes[begin : begin + len(codes)].float(), codes.float())
        assert torch.equal(product.scales[begin : begin + len(codes)], scales[:, 0])
    assert isinstance(model.lm_head, DenseLinear)
    check_blocks_near(model, load_model(path)[0])


@pytest.mark.parametrize("form", ["online", "tensor-static"])
def test_the_memory_plan_counts_weights_as_they_are_held(
    form: str, checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    path, quantization = checkpoints["shared"], "fp8" if form == "online" else "none"
    if form != "online":
        path = write_checkpoint(path, tmp_path / form, SECTIONS[form])
    model, config = load_model(path, quantization=quantization)
    files = read_weight_files(path)
    planned = weight_bytes(files, torch.float32) - bytes_not_held(config, torch.float32, WHOLE)
    held = sum(each.nbytes for each in model.parameters())
    # A plan leaves out what is computed from other tensors: scales of rows that are quantised at load time.
    scales = sum(each.nbytes for name, each in model.named_parameters() if name.endswith("scales"))
    assert planned == pytest.approx(held - (scales if form == "online" else 0), rel=0.01)
    assert held < 0.5 * sum(each.nbytes for each in load_model(checkpoints["shared"])[0].parameters())


def test_nodes_of_other_formats_do_not_share_pages(checkpoints: dict[str, Path]) -> None:
    path = checkpoints["dense"]
    assert model_fingerprint(path) != model_fingerprint(path, quantization="fp8")


def test_quantised_checkpoints_are_not_quantised_again(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    path = write_checkpoint(checkpoints["dense"], tmp_path / "blocks", BLOCKS)
    with pytest.raises(
        ConfigError, match=r"model.quantization: .*this one has fp8 \(per block.*leave it out"
    ):
        ModelConfig.load(path).quantized("fp8")


def blocks_of(*rows: int, columns: Columns = WIDTH) -> list[WeightBlock]:
    return [WeightBlock(f"part{index}", size, 0, size, columns) for index, size in enumerate(rows)]


def stored_as(scheme: Fp8Scheme, *ignored: str) -> Fp8Format:
    return Fp8Format(Fp8Weights("fp8", ((EVERYTHING, scheme),), ignored), PLACEMENT)


def test_parts_that_begin_with_a_block_are_one_product(tmp_path: Path) -> None:
    """A part that begins inside a block of the merged weight is a product of its own."""
    made = stored_as(Fp8Scheme(BLOCK, scale="weight_scale_inv"))
    merged = made.make_linear(blocks_of(256, 128), bias=False)
    assert isinstance(merged, Fp8Linear)
    scales = {
        "part0.weight_scale_inv": torch.rand(2, 2).bfloat16(),
        "part1.weight_scale_inv": torch.rand(1, 2),
    }
    codes = {
        f"part{i}.weight": torch.randn(size, 256).to(torch.float8_e4m3fn) for i, size in ((0, 256), (1, 128))
    }
    save_file({**scales, **codes}, tmp_path / "model.safetensors")
    load_weights(tmp_path, merged.pieces())
    assert torch.equal(merged.scales, torch.cat([each.float() for each in scales.values()]))
    apart = made.make_linear(blocks_of(192, 128), bias=False)
    assert isinstance(apart, MixedFormatLinear)
    assert [part.dense().shape[0] for part in apart.parts if isinstance(part, Fp8Linear)] == [192, 128]


def test_dense_parts_of_a_merged_weight_stay_dense() -> None:
    mixed = stored_as(Fp8Scheme(TENSOR), "part1").make_linear(blocks_of(64, 32, 16), bias=True)
    assert isinstance(mixed, MixedFormatLinear)
    assert [type(part) for part in mixed.parts] == [Fp8Linear, DenseLinear, Fp8Linear]
    assert mixed.reads.dense
    for parameter in mixed.parameters():
        parameter.copy_(torch.rand(parameter.shape))
    x = torch.randn(3, 256)
    assert mixed.product(Activations(x)).shape == (3, 112)


def test_ranks_do_not_cut_through_blocks() -> None:
    made = stored_as(Fp8Scheme(BLOCK, scale="weight_scale_inv"))
    product = made.make_linear(blocks_of(128, columns=Columns(192, 192, 384)), bias=False)
    with pytest.raises(
        ModelError, match=r"part0.weight: .*begins at \[0, 192\] .*, inside a block.*fewer ranks"
    ):
        list(product.pieces())


def test_patterns_of_modelopt_have_wildcards(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    path = write_checkpoint(checkpoints["dense"], tmp_path / "modelopt", MODELOPT)
    model = load_model(path)[0]
    kinds = [type(model.get_submodule(f"layers.{layer}.mixer.qkv_proj")) for layer in (0, 1)]
    assert kinds == [DenseLinear, Fp8Linear]
