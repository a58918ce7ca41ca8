"""Every form of an LM head in a file whose config.json ties it to the embedding, compared with transformers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from common.checkpoint.draft_config import with_steps
from common.checkpoint.fp8_weights import BLOCK, CHANNEL, TENSOR, Fp8Scheme
from common.checkpoint.model_config import ModelConfig
from common.engine.forward.draft_runner import load_eagle, load_eagle3
from common.engine.forward.model_runner import load_model
from common.engine.forward.mtp_runner import load_mtp
from common.engine.models import mtp
from common.engine.models.model_registry import build_model
from common.errors import ModelError
from common.speculation.directory import load_draft_config
from tests.fakes.fp8_checkpoint import quantise, write_checkpoint
from tests.fakes.published_heads import FORMS, write_head, write_target
from tests.fakes.published_mtp import PUBLISHED, save
from tests.fakes.tiny_model import PLACEMENT
from tests.unit.engine import families

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
SHAPE = (96, 48)
BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128]}


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def quantised(kind: str, scales: str) -> dict[str, Tensor]:
    codes, found = quantise(drawn(*SHAPE), Fp8Scheme(kind))
    return {HEAD: codes, f"lm_head.{scales}": found}


def tied(path: Path, changes: dict[str, Tensor], remove: str = "", fp8: bool = False) -> Path:
    """Write a tied checkpoint with these tensors besides its own."""
    dense = families.save(families.build("llama3-scaling-tied"), path / "dense")
    made = write_checkpoint(dense, path / "fp8", BLOCKS) if fp8 else dense
    tensors = {**load_file(made / "model.safetensors"), **changes}
    tensors.pop(remove, None)
    save_file(tensors, made / "model.safetensors", metadata={"format": "pt"})
    return made


@pytest.mark.parametrize(
    ("changes", "remove"),
    [({}, ""), ({HEAD: drawn(*SHAPE)}, ""), ({HEAD: drawn(*SHAPE)}, EMBEDDING)],
    ids=["absent", "another", "only the head"],
)
def test_what_transformers_reads(changes: dict[str, Tensor], remove: str, tmp_path: Path) -> None:
    path = tied(tmp_path, changes, remove)
    theirs = AutoModelForCausalLM.from_pretrained(path)
    ours, config = load_model(path)
    assert torch.equal(ours.lm_head.dense(), theirs.lm_head.weight)
    assert torch.equal(ours.embed_tokens.weight, theirs.model.embed_tokens.weight)
    shared = theirs.lm_head.weight is theirs.model.embed_tokens.weight
    assert config.tie_word_embeddings == shared


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (quantised(BLOCK, "weight_scale_inv"), f"{HEAD} is in F8_E4M3 and lm_head.weight_scale_inv comes"),
        (quantised(TENSOR, "weight_scale"), f"{HEAD} is in F8_E4M3 and lm_head.weight_scale comes"),
        (quantised(CHANNEL, "weight_scale"), f"{HEAD} is in F8_E4M3 and lm_head.weight_scale comes"),
        ({HEAD: drawn(*SHAPE).to(torch.float8_e4m3fn)}, f"{HEAD} is in F8_E4M3: an LM head is read as one"),
        ({HEAD: drawn(*SHAPE).to(torch.int8)}, f"{HEAD} is in I8: "),
        ({HEAD: drawn(*SHAPE), "lm_head.bias": drawn(96)}, "lm_head.bias comes with it: "),
        ({HEAD: drawn(128, 48)}, f"{HEAD} has the shape [128, 48], but vocab_size and hidden_size of"),
        ({HEAD: drawn(96, 24)}, f"{HEAD} has the shape [96, 24], but vocab_size and hidden_size of"),
    ],
)
def test_what_is_refused_names_tensor_key_and_remedy(
    changes: dict[str, Tensor], words: str, fp8: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tied(tmp_path, changes, fp8=fp8)
    with pytest.raises(ModelError) as refusal:
        load_model(path)
    assert words in str(refusal.value)
    assert str(refusal.value).endswith(f"or remove it: {path / 'config.json'} has tie_word_embeddings true")
    assert not caplog.records, "no other head is used"


def test_an_untied_head_in_fp8_is_refused_as_well(tmp_path: Path) -> None:
    path = tied(tmp_path, quantised(BLOCK, "weight_scale_inv"))
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    with pytest.raises(
        ModelError, match=r"lm_head.weight is in F8_E4M3 and .*; store it so, without scales or bias$"
    ):
        load_model(path)


def with_tensors(directory: Path, changes: dict[str, Tensor]) -> Path:
    file = next(each for each in sorted(directory.glob("*.safetensors")))
    save_file({**load_file(file), **changes}, file, metadata={"format": "pt"})
    return directory


def test_draft_heads_with_an_lm_head_in_fp8(tmp_path: Path) -> None:
    """EAGLE uses the target's and never reads it; EAGLE-3 would use it."""
    target_config = ModelConfig.load(write_target(tmp_path / "target"))
    target = build_model(target_config, PLACEMENT).eval()
    eagle3 = next(name for name, form in FORMS.items() if form.eagle3 and form.own_head and not form.prefix)
    path = write_head(FORMS[eagle3], tmp_path / "eagle3")
    draft = load_draft_config(path, "eagle3", target_config)
    codes, scales = quantise(load_file(path / "model.safetensors")[HEAD], Fp8Scheme(TENSOR))
    with_tensors(path, {HEAD: codes, "lm_head.weight_scale": scales})
    with pytest.raises(
        ModelError, match="lm_head.weight is in F8_E4M3 and lm_head.weight_scale comes with it"
    ):
        load_eagle3(path, draft, target, PLACEMENT)
    eagle = next(name for name, form in FORMS.items() if not form.eagle3 and not form.prefix)
    path = write_head(FORMS[eagle], tmp_path / "eagle")
    draft = load_draft_config(path, "eagle", target_config)
    with_tensors(path, {HEAD: codes, "lm_head.weight_scale": scales})
    assert load_eagle(path, draft, target, PLACEMENT).lm_head is target.lm_head


def test_an_mtp_module_with_an_lm_head_in_fp8(tmp_path: Path) -> None:
    saved = save(PUBLISHED["glm-4.5-biases"], tmp_path)
    target = load_model(saved.target)[0]
    draft = with_steps(load_draft_config(saved.draft, "mtp", ModelConfig.load(saved.target)), 1)
    assert draft.mtp is not None
    name = f"{draft.mtp.prefix(0)}.{mtp.HEAD}"
    codes, scales = quantise(target.lm_head.dense().detach(), Fp8Scheme(TENSOR))
    with_tensors(saved.draft, {f"{name}.weight": codes, f"{name}.weight_scale": scales})
    with pytest.raises(ModelError) as refusal:
        load_mtp(saved.draft, draft, target, PLACEMENT)
    assert f"{name}.weight is in F8_E4M3 and {name}.weight_scale comes with it" in str(refusal.value)
