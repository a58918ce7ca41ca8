"""At start-up a supported draft checkpoint is read as it is published; any other is refused with a message.

Rows D1-D8 and A4: widths are computed from the config and compared with those of the real head.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from common.checkpoint.aux_layers import AuxLayers
from common.checkpoint.draft_config import DraftConfig, draft_fingerprint, hidden_size_for, target_width
from common.checkpoint.model_config import ModelConfig
from common.config import Cluster
from common.config.resolve_node import node_plan
from common.config.schema import Model, Speculation
from common.engine.forward.draft_runner import load_eagle, load_eagle3
from common.engine.forward.model_runner import load_model
from common.engine.layers.placement import Placement
from common.engine.models.eagle import EMBEDDING, Eagle3Head
from common.engine.state.draft_row import DraftRow, DraftShape
from common.engine.state.relay_state import RelayState, draft_rows, hidden_dtype
from common.errors import ModelError
from common.messages.generation import SamplingParams
from common.node.serving_model import load_serving_model
from common.observability.logs import Log
from common.observability.startup import StartupReporter
from common.speculation.directory import load_draft_config

MODELS = Path(__file__).resolve().parents[3] / "deploy" / "tiny_models"
TARGET = MODELS / "tiny-target"
PLACEMENT = Placement(torch.float32, torch.device("cpu"))


def copy_of(tmp_path: Path, name: str, **changes: Any) -> Path:
    directory = tmp_path / name
    shutil.copytree(MODELS / name, directory)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, **changes}))
    return directory


def config_of(path: Path, algorithm: str = "eagle3") -> DraftConfig:
    return load_draft_config(path, algorithm, ModelConfig.load(TARGET))


def test_the_shipped_heads() -> None:
    """The width functions give the widths of the shipped heads."""
    eagle3 = config_of(MODELS / "tiny-eagle3")
    assert (eagle3.aux_layers, target_width(eagle3), hidden_size_for(eagle3)) == ((2, 4, 7), 768, 256)
    eagle = config_of(MODELS / "tiny-eagle", "eagle")
    assert (eagle.aux_layers, target_width(eagle), hidden_size_for(eagle)) == ((), 256, 256)


@pytest.mark.parametrize(
    ("name", "algorithm", "changes", "sentence"),
    [
        ("tiny-eagle3", "eagle", {}, "is not a draft for eagle; set speculation.algorithm to eagle3"),
        ("tiny-eagle", "eagle3", {}, "is not a draft for eagle3; set speculation.algorithm to eagle"),
        ("tiny-target", "eagle3", {}, "is not a draft for eagle3; set speculation.algorithm to standalone"),
        ("tiny-mtp", "eagle3", {}, "is not a draft for eagle3; set speculation.algorithm to mtp"),
        ("tiny-eagle3", "mtp", {}, "is not a draft for mtp; set speculation.algorithm to eagle3"),
        ("tiny-target", "mtp", {}, "is not a draft for mtp; set speculation.algorithm to standalone"),
        ("tiny-mtp", "mtp", {"vocab_size": 700}, "vocab_size is 700, the target has 704"),
        (
            "tiny-mtp",
            "mtp",
            {"hidden_size": 128, "target_hidden_size": None},
            "hidden_size is 128, the target has 256",
        ),
        ("tiny-mtp", "mtp", {"target_hidden_size": 512}, "target_hidden_size is 512, the target has 256"),
        ("tiny-mtp", "mtp", {"num_nextn_predict_layers": 0}, "must be a positive integer"),
        ("tiny-mtp", "mtp", {"mtp_chain": 1}, "mtp_chain must be true or false"),
        ("tiny-eagle3", "eagle3", {"vocab_size": 700}, "vocab_size is 700, the target has 704"),
        (
            "tiny-eagle3",
            "eagle3",
            {"target_hidden_size": 512},
            "target_hidden_size is 512, the target has 256",
        ),
        ("tiny-eagle3", "eagle3", {"norm_before_fc": 1}, "norm_before_fc must be true or false, found 1"),
        (
            "tiny-eagle3",
            "eagle3",
            {"norm_before_fc": True, "fc_norm": True},
            "norm_before_fc and fc_norm norm the same values: set one of them",
        ),
        (
            "tiny-eagle3",
            "eagle3",
            {"num_aux_hidden_states": 4},
            r"num_aux_hidden_states is 4, but the aux layers are \[2, 4, 7\]",
        ),
        (
            "tiny-eagle3",
            "eagle3",
            {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [4, 2, 99]}},
            r"aux layers \[4, 2, 99\] are not ascending boundaries of 8 layers",
        ),
        ("tiny-eagle3", "eagle3", {"aux_layer_convention": "x"}, "it is boundary, output or auto"),
    ],
)
def test_what_does_not_fit_is_refused(
    name: str, algorithm: str, changes: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    """A wrong algorithm is an error at start-up rather than an accept length of 1.0."""
    with pytest.raises(ModelError, match=sentence):
        config_of(copy_of(tmp_path, name, **changes), algorithm)


@pytest.mark.parametrize(
    ("changes", "layers"),
    [
        (
            {"eagle_config": None, "aux_layer_convention": "auto"},
            AuxLayers((2, 4, 5), "boundary", "default"),
        ),
        (
            {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 5]}, "aux_layer_convention": "auto"},
            AuxLayers((2, 4, 6), "output", "guessed"),
        ),
        ({"aux_layer_convention": "auto"}, AuxLayers((2, 4, 7), "boundary", "guessed")),
        ({"aux_layer_convention": "output"}, AuxLayers((3, 5, 8), "output", "stated")),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3]}}, AuxLayers((1, 3))),
        ({"eagle_config": None, "eagle_aux_hidden_state_layer_ids": [3, 8]}, AuxLayers((3, 8))),
        ({"eagle_config": {"use_aux_hidden_state": False}}, AuxLayers()),
    ],
)
def test_aux_layers(changes: dict[str, Any], layers: AuxLayers, tmp_path: Path) -> None:
    """Aux layers count boundaries unless the file says, or (with a first layer of 1) suggests, that outputs are meant.

    Row D4: aux states are read by default; a file may say that the target's output is read instead.
    """
    assert config_of(copy_of(tmp_path, "tiny-eagle3", **changes)).aux == layers


def test_the_log_and_server_info_show_the_aux_layers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The log and /server_info name the aux layer convention, and whether it was guessed."""
    path = copy_of(tmp_path, "tiny-eagle3", aux_layer_convention="auto")
    speculation = Speculation(algorithm="eagle3", draft_model_path=str(path))
    cluster = Cluster(model=Model(path=str(TARGET)), speculation=speculation)
    plan, log = node_plan(cluster, "decode", "decode-0", TARGET, path), Log("test")
    with caplog.at_level("INFO", "tandem.test"):
        served = load_serving_model(plan, StartupReporter(None, log), log)
    told = {
        "draft": "eagle3",
        "draft_aux_layers": "2, 4, 7",
        "draft_aux_layer_convention": "boundary",
        "draft_aux_layer_source": "guessed",
    }
    (line,) = (record for record in caplog.records if record.message == "draft loaded")
    assert line.fields == {"path": str(path), **told}  # type: ignore[attr-defined]
    described = served.describe(0, "shm", 4)
    assert told.items() <= described.items()


@pytest.fixture(scope="module")
def target() -> Any:
    return load_model(TARGET)[0]


def test_weights_that_do_not_fit(target: Any, tmp_path: Path) -> None:
    path = copy_of(tmp_path, "tiny-eagle3")
    config, tensors = config_of(path), load_file(path / "model.safetensors")
    load_eagle3(path, config, target, PLACEMENT)
    save_file({**tensors, "d2t": tensors["d2t"] + 700}, path / "model.safetensors")
    with pytest.raises(ModelError, match="d2t does not map 256 drafts into the target's vocabulary"):
        load_eagle3(path, config, target, PLACEMENT)
    save_file({name: value for name, value in tensors.items() if name != "d2t"}, path / "model.safetensors")
    with pytest.raises(ModelError, match="the checkpoint has no d2t"):
        load_eagle3(path, config, target, PLACEMENT)
    save_file(
        {**tensors, "fc.weight": tensors["fc.weight"][:, :512].contiguous()}, path / "model.safetensors"
    )
    with pytest.raises(ModelError, match="wrongly shaped tensors"):
        load_eagle3(path, config, target, PLACEMENT)


def save_parts(path: Path, tensors: dict[str, Tensor], rename: Callable[[str], str] = str) -> None:
    save_file(
        {rename(name): value.contiguous() for name, value in tensors.items()}, path / "model.safetensors"
    )


def test_parts_of_its_own_and_those_of_the_target(target: Any, tmp_path: Path) -> None:
    """A head may have an embedding and an LM head of its own, as published heads of 70B models do."""
    path = copy_of(tmp_path, "tiny-eagle3", draft_vocab_size=None)
    tensors = load_file(path / "model.safetensors")
    del tensors["lm_head.weight"], tensors["d2t"]
    save_parts(path, tensors)
    shared = load_eagle3(path, config_of(path), target, PLACEMENT)
    assert shared.embed_tokens is target.embed_tokens
    assert shared.lm_head is target.lm_head
    own = {
        "embed_tokens.weight": torch.randn(704, 256),
        "lm_head.weight": torch.randn(704, 256),
    }
    save_parts(path, {**tensors, **own}, lambda name: f"model.{name}")  # some files use this prefix
    head = load_eagle3(path, config_of(path), target, PLACEMENT)
    assert torch.equal(head.embed_tokens.weight, own["embed_tokens.weight"])
    assert torch.equal(head.lm_head.dense(), own["lm_head.weight"])
    ids = torch.tensor([5, 700])
    assert torch.equal(head.target_ids(ids), ids)
    assert torch.equal(head.fc.dense(), shared.fc.dense())


def test_a_narrower_head_needs_parts_of_its_own(target: Any, tmp_path: Path) -> None:
    """A head whose target_hidden_size differs from its hidden_size cannot share parts of the target (rows D3, D7)."""
    path = copy_of(tmp_path, "tiny-eagle3", hidden_size=128, num_attention_heads=4, head_dim=64)
    config = config_of(path)
    assert (target_width(config), hidden_size_for(config)) == (768, 128)
    head = Eagle3Head(config, target, PLACEMENT, (EMBEDDING,))
    tensors = {piece.name: torch.randn(piece.whole) for piece in head.pieces()}
    tensors["d2t"] = load_file(MODELS / "tiny-eagle3" / "model.safetensors")["d2t"]
    save_parts(path, {name: value for name, value in tensors.items() if name != EMBEDDING})
    with pytest.raises(ModelError, match="hidden_size of 128 cannot share the target's embedding of 256"):
        load_eagle3(path, config, target, PLACEMENT)
    save_parts(path, tensors)
    loaded = load_eagle3(path, config, target, PLACEMENT)
    assert loaded.project(torch.randn(3, 768)).shape == (3, 128)
    assert loaded.embed(torch.tensor([7])).shape == (1, 128)


def test_an_embedding_of_its_own_reads_no_images(target: Any, tmp_path: Path) -> None:
    """A head with an embedding of its own cannot read image rows, which the target has embedded already (row C4)."""
    path = copy_of(tmp_path, "tiny-eagle3")
    save_parts(path, {**load_file(path / "model.safetensors"), EMBEDDING: torch.randn(704, 256)})
    load_eagle3(path, config_of(path), target, PLACEMENT)
    vision_model = SimpleNamespace(config=SimpleNamespace(hidden_size=256, vision=object()))
    with pytest.raises(ModelError, match="cannot read the images that the target embeds"):
        load_eagle3(path, config_of(path), vision_model, PLACEMENT)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["norm_output", "return_hidden_post_norm"])
def test_switches_of_nvidia_heads_are_in_eagle_config(name: str, tmp_path: Path) -> None:
    """Those of https://github.com/vllm-project/vllm/pull/42143. Unread, they would only lower the accept length."""
    section = {"norm_before_fc": True, "norm_before_residual": True, name: True}
    config = config_of(copy_of(tmp_path, "tiny-eagle3", eagle_config=section))
    assert config.fc_norms == ("input_norm",)
    assert (config.norm_before_residual, config.norm_output) == (True, True)
    off = copy_of(tmp_path / "off", "tiny-eagle3", eagle_config={"norm_output": False}, norm_output=True)
    assert not config_of(off).norm_output


@pytest.mark.parametrize(
    ("switch", "names"),
    [
        ("norm_before_fc", ["input_norm.weight"]),
        ("fc_norm", ["fc_norm.0.weight", "fc_norm.1.weight", "fc_norm.2.weight"]),
        ("fc_norm", ["aux_norm_low.weight", "aux_norm_mid.weight", "aux_norm_high.weight"]),
    ],
)
def test_norms_before_fc(switch: str, names: list[str], target: Any, tmp_path: Path) -> None:
    """Norms before the projection span the concatenation or each boundary; compared with plain torch."""
    path = copy_of(tmp_path, "tiny-eagle3", **{switch: True})
    tensors = load_file(path / "model.safetensors")
    width = 768 // len(names)
    norms = {name: torch.rand(width) + 0.5 for name in names}
    save_parts(path, {**tensors, **norms})
    head = load_eagle3(path, config_of(path), target, PLACEMENT)
    given = torch.randn(5, 768) * torch.tensor([1.0, 5.0, 20.0]).repeat_interleave(256)
    parts = given.split(width, dim=-1)
    eps = config_of(path).model.rms_norm_eps
    normed = [F.rms_norm(part, (width,), weight, eps) for part, weight in zip(parts, norms.values())]
    expected = torch.cat(normed, dim=-1) @ tensors["fc.weight"].float().T
    torch.testing.assert_close(head.project(given), expected, atol=1e-4, rtol=1e-4)
    save_parts(path, tensors)
    with pytest.raises(ModelError, match="missing tensors"):
        load_eagle3(path, config_of(path), target, PLACEMENT)


def test_copies_and_a_bias_in_an_eagle_file(target: Any, tmp_path: Path) -> None:
    """EAGLE-1 shares embedding and LM head if its file repeats them; some files have a bias in fc."""
    path = copy_of(tmp_path, "tiny-eagle")
    tensors = load_file(path / "model.safetensors")
    bias = torch.randn(256)
    copies = {EMBEDDING: target.embed_tokens.weight.clone(), "lm_head.weight": torch.zeros(704, 256)}
    save_parts(path, {**tensors, **copies, "fc.bias": bias})
    head = load_eagle(path, config_of(path, "eagle"), target, PLACEMENT)
    assert head.embed_tokens is target.embed_tokens
    assert head.lm_head is target.lm_head
    assert torch.equal(head.get_parameter("fc.bias"), bias)


@pytest.mark.parametrize("prefix", ["", "model."])
def test_an_eagle_head_uses_its_own_embedding_if_it_is_another(
    prefix: str, target: Any, tmp_path: Path
) -> None:
    """Its LM head is the target's in any case, whose normed hidden state it predicts."""
    path = copy_of(tmp_path, "tiny-eagle")
    own = torch.randn(704, 256)
    save_parts(path, {**load_file(path / "model.safetensors"), prefix + EMBEDDING: own})
    head = load_eagle(path, config_of(path, "eagle"), target, PLACEMENT)
    assert torch.equal(head.embed(torch.tensor([7]))[0], own[7])
    assert head.lm_head is target.lm_head


@pytest.mark.parametrize(
    "name", ["Eagle3LlamaForCausalLM", "Eagle3Qwen3ForCausalLM", "Qwen2ForCausalLMEagle3"]
)
def test_names_of_eagle3(name: str, tmp_path: Path) -> None:
    path = copy_of(tmp_path, "tiny-eagle3", architectures=[name])
    assert config_of(path) == config_of(MODELS / "tiny-eagle3")
    with pytest.raises(ModelError, match="is not a draft for eagle; set speculation.algorithm to eagle3"):
        config_of(path, "eagle")


def test_the_form_of_the_speculators_library(target: Any, tmp_path: Path) -> None:
    """In this format the layer's settings are a nested object, and tensor names have no prefix."""
    path = copy_of(tmp_path, "tiny-eagle3")
    flat = json.loads((path / "config.json").read_text())
    whole = {"draft_vocab_size", "norm_before_residual", "eagle_config", "aux_layer_convention", "dtype"}
    form = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_config": {"algorithm": "eagle3", "verifier": {"name_or_path": "x"}},
        "norm_before_residual": False,
        "transformer_layer_config": {name: value for name, value in flat.items() if name not in whole},
        **{name: flat[name] for name in whole if name in flat},
    }
    del form["transformer_layer_config"]["architectures"]
    (path / "config.json").write_text(json.dumps(form))
    assert config_of(path) == config_of(MODELS / "tiny-eagle3")
    load_eagle3(path, config_of(path), target, PLACEMENT)
    for changes, sentence in (
        ({"speculators_model_type": "mlp"}, "speculators_model_type is 'mlp'; eagle3 is supported"),
        ({"transformer_layer_config": 3}, "with a transformer_layer_config"),
    ):
        (path / "config.json").write_text(json.dumps({**form, **changes}))
        with pytest.raises(ModelError, match=sentence):
            config_of(path)
    del form["norm_before_residual"]
    (path / "config.json").write_text(json.dumps(form))
    with pytest.raises(ModelError, match="norm_before_residual is missing"):
        config_of(path)


def test_both_names_of_the_layer(target: Any, tmp_path: Path) -> None:
    path = copy_of(tmp_path, "tiny-eagle3")
    tensors = load_file(path / "model.safetensors")
    named = load_eagle3(path, config_of(path), target, PLACEMENT)
    renamed = {name.replace("midlayer.", "layers.0."): value for name, value in tensors.items()}
    save_file(renamed, path / "model.safetensors")
    other = load_eagle3(path, config_of(path), target, PLACEMENT)
    for one, two in zip(named.state_dict().values(), other.state_dict().values(), strict=True):
        assert torch.equal(one, two)


def test_nodes_with_other_drafting_do_not_match() -> None:
    """The fingerprint is part of the KV layout that both nodes compare before pages move."""
    path = MODELS / "tiny-eagle3"
    config = config_of(path)
    made = {draft_fingerprint(path, config, steps, 1) for steps in (3, 5)}
    made.add(draft_fingerprint(MODELS / "tiny-eagle", config_of(MODELS / "tiny-eagle", "eagle"), 3, 1))
    made.add(draft_fingerprint(path, config, 3, 2))  # a tree transfers other proposals
    assert len(made) == 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_draft_state_travels_bit_by_bit(dtype: torch.dtype) -> None:
    """The handoff record, the relay row and retraction carry the same bytes."""
    shape = DraftShape(2, 3, hidden_dtype(dtype), vocab=9)
    relay = RelayState.allocate(2, 64, torch.device("cpu"), shape)
    hidden = torch.tensor([1.5, -2.25, 1e-3], dtype=dtype)
    row = DraftRow((0.5, 0.25), (7, 8), hidden.view(torch.uint8).numpy().tobytes())
    assert row.fits(shape)
    relay.write_row(1, [1, 2, 3, 4, 5, 4], 1, SamplingParams(max_tokens=1), row)
    assert torch.equal(relay.draft.hidden[1], hidden)
    assert draft_rows(relay.draft_input(torch.tensor([1]))) == [row]
    for wrong in (DraftRow(), DraftRow((0.5, 0.25), (7, 9), row.hidden), DraftRow((0.5,), (7,), row.hidden)):
        assert not wrong.fits(shape)
    assert DraftRow().fits(DraftShape())
