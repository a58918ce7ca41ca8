"""Language models that draft for a target with another vocabulary length, as Qwen2.5-0.5B does for the 7B model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from common.checkpoint.model_config import ModelConfig
from common.engine.forward.model_runner import load_model
from common.engine.models.causal_lm import CausalLM
from common.errors import ModelError
from common.node.loaded_draft import DraftParts, ModelDraft, load_language_model
from common.speculation.directory import compare_with_target, load_draft_config
from tests.unit.checkpoint.test_draft_config import MODELS, PLACEMENT, TARGET
from tests.unit.engine.paged_driver import Driver

VOCAB = 704
IDS = torch.tensor([5, 90, 703, 701, 12, 688, 3])


@pytest.fixture(scope="module")
def target() -> CausalLM:
    return load_model(TARGET)[0]


def draft_with(vocab: int, directory: Path) -> Path:
    """Copy the shipped language model with so many rows in its embedding and its head."""
    shutil.copytree(MODELS / "tiny-standalone", directory)
    config = json.loads((directory / "config.json").read_text()) | {"vocab_size": vocab}
    (directory / "config.json").write_text(json.dumps(config))
    tensors = load_file(directory / "model.safetensors")
    for name, value in tensors.items():
        if value.shape[0] == VOCAB:
            more = torch.full((max(vocab - VOCAB, 0), value.shape[1]), 9.0, dtype=value.dtype)
            tensors[name] = torch.cat((value[:vocab], more))
    save_file(tensors, directory / "model.safetensors")
    return directory


def logits_of(path: Path, target: CausalLM) -> torch.Tensor:
    config = load_draft_config(path, "standalone", target.config)
    compare_with_target(path, "standalone", TARGET)
    draft = load_language_model(DraftParts(path, config, target, PLACEMENT, topk=1))
    assert isinstance(draft, ModelDraft)
    return Driver(draft.model, [IDS], 16).run_all(3, [5])[0]


@pytest.mark.parametrize("vocab", [768, VOCAB, 700])
def test_ids_of_both_vocabularies_are_proposed(vocab: int, target: CausalLM, tmp_path: Path) -> None:
    """The draft's own padding has the highest logits here, and is never proposed."""
    found = logits_of(draft_with(vocab, tmp_path / "draft"), target)
    shared = min(vocab, VOCAB)
    assert found.shape == (len(IDS), shared)
    ids = torch.where(vocab > IDS, IDS, 0)
    model = load_model(MODELS / "tiny-standalone")[0]
    expected = Driver(model, [ids], 16).run_all(3, [5])[0][:, :shared]
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def change_token(path: Path, index: int, token: str) -> None:
    raw: dict[str, Any] = json.loads((path / "tokenizer.json").read_text())
    raw["added_tokens"] = [each for each in raw["added_tokens"] if each["id"] != index]
    raw["added_tokens"].append({"id": index, "content": token})
    (path / "tokenizer.json").write_text(json.dumps(raw))


def test_tokens_that_disagree_are_refused(tmp_path: Path) -> None:
    path = draft_with(768, tmp_path / "draft")
    compare_with_target(path, "standalone", TARGET)
    # Past the target's vocabulary nothing is compared.
    change_token(path, 710, "<other>")
    compare_with_target(path, "standalone", TARGET)
    change_token(path, 300, "<other>")
    with pytest.raises(
        ModelError, match=r"vocab_size is 768, the target has 704, and token 300 is '<other>', the target's"
    ):
        compare_with_target(path, "standalone", TARGET)
    (path / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match=r"has no tokenizer.json that shows whether ids agree"):
        compare_with_target(path, "standalone", TARGET)


def test_vocabularies_of_one_length_are_not_compared(tmp_path: Path) -> None:
    path = draft_with(VOCAB, tmp_path / "draft")
    (path / "tokenizer.json").unlink()
    compare_with_target(path, "standalone", TARGET)
    assert load_draft_config(path, "standalone", ModelConfig.load(TARGET)).model.vocab_size == VOCAB


def test_other_drafts_are_compared_when_their_config_is_read() -> None:
    compare_with_target(MODELS / "tiny-eagle", "eagle", TARGET)
