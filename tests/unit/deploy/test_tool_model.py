"""The training program of the model that calls tools on a CPU: a short run, configs of the drafts, the scores."""

from __future__ import annotations

import json
from itertools import count
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

from deploy.tiny_models.drafts.files import load_head, new_head
from deploy.tiny_models.drafts.measure import acceptance
from deploy.tiny_models.tool_calls import checkpoint, vocabulary
from deploy.tiny_models.tool_calls.chat_form import TEMPLATE
from deploy.tiny_models.tool_calls.checkpoint import SMOKE_SHAPE, Shape, eagle3_config, standalone_config
from deploy.tiny_models.tool_calls.conversations import exam
from deploy.tiny_models.tool_calls.documents import ConversationSource
from deploy.tiny_models.tool_calls.exam import evaluate
from deploy.tiny_models.tool_calls.run import EXAM_SEED
from deploy.tiny_models.tool_calls.train_tools import arguments
from deploy.tiny_models.trainer import train
from deploy.tiny_models.training_loop import Settings

pytestmark = pytest.mark.usefixtures("one_thread")

MODELS = Path(vocabulary.__file__).parents[1]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return vocabulary.build(sample=300)


def test_a_short_run_learns_and_its_checkpoint_holds_the_same_model(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    config = checkpoint.config_dict(SMOKE_SHAPE, tokenizer)
    model = checkpoint.new_model(config, seed=1)
    source = ConversationSource(tokenizer, seed=1)
    windows = (batch for batch in source.batches(1024) if batch.ids.shape[1] == 1025)
    clock = count(0.0, 0.05).__next__
    outcome = train(model, windows, Settings(1.0, lr=3e-3, device=torch.device("cpu"), clock=clock))
    assert outcome.loss < outcome.first_loss - 0.5
    checkpoint.save(tmp_path, model, config, tokenizer)
    again = checkpoint.load(tmp_path)
    assert not any(parameter.requires_grad for parameter in again.parameters())
    assert again.lm_head.weight is again.model.embed_tokens.weight
    for name, value in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], value.bfloat16().float()), name


def test_the_drafts_fit_the_model(tokenizer: Tokenizer) -> None:
    config = checkpoint.config_dict(Shape(), tokenizer)
    eagle3, standalone = eagle3_config(config), standalone_config(config)
    assert eagle3["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 3, 5]
    assert eagle3["target_hidden_size"] == Shape().hidden_size
    for each in (eagle3, standalone):
        assert each["vocab_size"] == config["vocab_size"]
        assert each["eos_token_id"] == config["eos_token_id"]
        parameters = sum(parameter.numel() for parameter in new_head(each, seed=1).parameters())
        assert parameters < 400_000


def test_the_checked_in_directories_are_those_of_the_program() -> None:
    """Configs have the default shapes, tensors are bf16, the template is the current one, and cards are complete."""
    stored = Tokenizer.from_file(str(MODELS / "tiny-tools" / "tokenizer.json"))
    config = checkpoint.config_dict(Shape(), stored)
    made = {"": config, "-eagle3": eagle3_config(config), "-standalone": standalone_config(config)}
    for suffix, wanted in made.items():
        directory = MODELS / f"tiny-tools{suffix}"
        assert json.loads((directory / "config.json").read_text()) == wanted
        floats = [
            value
            for value in load_file(directory / "model.safetensors").values()
            if value.is_floating_point()
        ]
        assert {value.dtype for value in floats} == {torch.bfloat16}
        card = (directory / "README.md").read_text()
        assert "tool_calls.train_tools" in card
        assert "not evaluated yet" not in card
        assert "not measured yet" not in card
        if suffix != "-eagle3":
            assert (directory / "chat_template.jinja").read_text() == TEMPLATE


def test_the_model_answers_conversations_and_its_drafts_are_accepted() -> None:
    """The measurement of the training program, on a few conversations that count for its card, too."""
    model = checkpoint.load(MODELS / "tiny-tools")
    stored = Tokenizer.from_file(str(MODELS / "tiny-tools" / "tokenizer.json"))
    asked = list(exam(5, EXAM_SEED))
    score = evaluate(model, stored, "tools", asked, thinks=True)
    assert score.right.total() == score.expected == len(asked)
    assert score.valid_calls == score.calls == sum(len(each.exchange.calls) for each in asked)
    assert len(score.answered) == len(asked) + sum(bool(each.exchange.calls) for each in asked)
    for kind in ("eagle3", "standalone"):
        _, head = load_head(MODELS / f"tiny-tools-{kind}")
        assert acceptance("tools", head, model, score.answered, 3).length > 2.5


def test_the_defaults() -> None:
    args = arguments(["--minutes", "2"])
    assert args.minutes == 2.0
    assert (args.out / "tiny-target").is_dir()
