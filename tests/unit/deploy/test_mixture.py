"""The training program of the models with experts on a CPU: published form, MTP module, optimizer, a short run."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

from common.checkpoint.model_config import ModelConfig
from deploy.tiny_models import tokenizer
from deploy.tiny_models.checkpoint import MAX_FILE_BYTES
from deploy.tiny_models.corpus import DocumentSource, WindowKind
from deploy.tiny_models.drafts.features import Features, Shared, target_features
from deploy.tiny_models.mixture import checkpoint
from deploy.tiny_models.mixture.mtp_head import MtpHead
from deploy.tiny_models.mixture.shapes import FAMILIES, SMOKE_SHAPE, Shape, eagle3_config, new_model
from deploy.tiny_models.muon import is_matrix, orthogonalize
from deploy.tiny_models.trainer import train
from deploy.tiny_models.training_loop import Settings

pytestmark = pytest.mark.usefixtures("one_thread")

SHAPE = replace(SMOKE_SHAPE, num_hidden_layers=3, num_experts=3, moe_intermediate_size=32)
MODELS = Path(tokenizer.__file__).parent
HYBRID = FAMILIES["hybrid"]


@pytest.fixture(scope="module")
def vocabulary() -> Tokenizer:
    return tokenizer.build(sample=2000)


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_a_short_run_learns_and_its_checkpoint_holds_the_same_model(
    name: str, vocabulary: Tokenizer, tmp_path: Path
) -> None:
    family = FAMILIES[name]
    config = family.config(SHAPE, vocabulary)
    model = new_model(family, config, seed=1)
    kind = WindowKind(window=128, share=1.0, most_shots=2, many=0.2)
    batches = DocumentSource(vocabulary, seed=1).batches(512, (kind,))
    clock = count(0.0, 0.05).__next__
    outcome = train(model, batches, Settings(1.0, lr=3e-3, device=torch.device("cpu"), clock=clock))
    assert outcome.loss < outcome.first_loss - 0.5
    model.requires_grad_(False)
    checkpoint.round_as_stored(family, model)
    mtp = _new_mtp(config) if family.has_mtp else None
    checkpoint.save(tmp_path, family, config, model, mtp, vocabulary)
    again, module = checkpoint.load(tmp_path, family)
    ids = torch.arange(20)[None]
    assert torch.equal(again(input_ids=ids).logits, model(input_ids=ids).logits)
    assert (module is not None) == family.has_mtp


def test_a_hybrid_checkpoint_has_the_form_of_published_ones(vocabulary: Tokenizer, tmp_path: Path) -> None:
    config = HYBRID.config(SHAPE, vocabulary)
    model = new_model(HYBRID, config, seed=1)
    checkpoint.save(tmp_path, HYBRID, config, model, _new_mtp(config), vocabulary)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    tensors = {
        name: value for shard in checkpoint.SHARDS for name, value in load_file(tmp_path / shard).items()
    }
    assert {name: place for name, place in index.items() if name not in load_file(tmp_path / place)} == {}
    layer = "model.language_model.layers.0"
    assert tensors[f"{layer}.mlp.experts.gate_up_proj"].shape == (3, 64, 64)
    assert tensors[f"{layer}.linear_attn.A_log"].dtype == torch.float32
    assert tensors[f"{layer}.linear_attn.dt_bias"].dtype == torch.bfloat16
    assert tensors["mtp.fc.weight"].shape == (64, 128)
    assert "mtp.layers.0.mlp.experts.down_proj" in tensors
    assert set(index) == set(tensors)


def test_every_draft_step_of_the_module_continues_its_own_rows(vocabulary: Tokenizer) -> None:
    """Compared with running the module over the known rows and then over the rows that it has drafted itself."""
    config = HYBRID.config(SHAPE, vocabulary)
    model = new_model(HYBRID, config, seed=1).eval()
    mtp = _new_mtp(config)
    ids = torch.randint(7, 600, (1, 12))
    with torch.inference_mode():
        features, shared = target_features(model, ids), Shared.of(model)
        unrolled = mtp.unroll(shared, features, ids, 3)
        for row in range(8):
            hidden = features.last[:, : row + 1]
            for step in range(3):
                out = _plainly(mtp, features, hidden)
                expected = out[0, -1] @ shared.head.T
                torch.testing.assert_close(unrolled[step].logits[0, row], expected, rtol=1e-4, atol=1e-4)
                hidden = torch.cat((hidden, out[:, -1:]), dim=1)


def _plainly(mtp: MtpHead, features: Features, hidden: torch.Tensor) -> torch.Tensor:
    """Run the module once over rows that read `hidden` and the embedding of the token after each."""
    cut = Features(features.embeds[:, : hidden.size(1) + 1], (), hidden, features.logits)
    both = torch.cat((mtp.pre_fc_norm_embedding(cut.embeds[:, 1:]), mtp.pre_fc_norm_hidden(hidden)), dim=-1)
    out: torch.Tensor = mtp.norm(mtp.layers[0](mtp.fc(both), []))
    return out


def _new_mtp(config: dict[str, object]) -> MtpHead:
    torch.manual_seed(3)
    mtp = MtpHead(HYBRID.text(config))
    mtp.start(torch.zeros(SHAPE.hidden_size))
    return mtp.requires_grad_(False).eval()


def test_the_eagle3_head_reads_three_layers_of_the_target(vocabulary: Tokenizer) -> None:
    text = HYBRID.text(HYBRID.config(replace(SHAPE, num_hidden_layers=6), vocabulary))
    config = eagle3_config(text)
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 3, 5]
    assert config["target_hidden_size"] == SHAPE.hidden_size
    assert not any("expert" in key for key in config)


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_the_checked_in_directories_are_those_of_the_program(name: str) -> None:
    """The configs have the default shape, every tensor has its stored type, and files and cards are complete."""
    family = FAMILIES[name]
    directory, head = MODELS / family.directory, MODELS / f"{family.directory}-eagle3"
    config = json.loads((directory / "config.json").read_text())
    stored = Tokenizer.from_file(str(directory / "tokenizer.json"))
    assert config == family.config(Shape(), stored)
    assert json.loads((head / "config.json").read_text()) == eagle3_config(family.text(config))
    index = json.loads((directory / "model.safetensors.index.json").read_text())["weight_map"]
    tensors = {
        name: value for shard in checkpoint.SHARDS for name, value in load_file(directory / shard).items()
    }
    assert set(tensors) == set(index)
    for tensor, value in tensors.items():
        wide = bool(family.wide) and tensor.endswith(family.wide)
        assert value.dtype == (torch.float32 if wide else torch.bfloat16), tensor
    for each in (directory, head):
        card = (each / "README.md").read_text()
        assert f"train_mixture --family {name} " in card
        assert "not evaluated yet" not in card
        assert "not measured yet" not in card


def test_the_family_is_small() -> None:
    """Files of all tiny models together stay below 40 MB, and each below 8 MB."""
    sizes = [path.stat().st_size for each in MODELS.glob("tiny-*") for path in each.iterdir()]
    assert max(sizes) < MAX_FILE_BYTES
    assert sum(sizes) < 40_000_000


def test_muon_is_for_matrices_and_stacks_of_them() -> None:
    assert is_matrix(torch.empty(64, 32))
    assert is_matrix(torch.empty(3, 64, 32))
    assert not is_matrix(torch.empty(64, 1, 4)), "a depthwise convolution"
    assert not is_matrix(torch.empty(8, 192)), "a router of few experts"
    assert not is_matrix(torch.empty(192))
    torch.manual_seed(1)
    values = torch.linalg.svdvals(orthogonalize(torch.randn(2, 3, 32, 64), steps=8))
    assert values.min() > 0.4
    assert values.max() < 1.4


def test_both_models_are_readable_configs(vocabulary: Tokenizer, tmp_path: Path) -> None:
    family = FAMILIES["moe"]
    config = family.config(SHAPE, vocabulary)
    (tmp_path / "config.json").write_text(json.dumps(config))
    read = ModelConfig.load(tmp_path)
    assert read.experts is not None
    assert read.experts.count == SHAPE.num_experts
