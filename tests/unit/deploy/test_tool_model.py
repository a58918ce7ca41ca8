"""The training program of the model that calls tools on a CPU: a short run, configs of the drafts, the scores."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from deploy.tiny_models.drafts.files import new_head
from deploy.tiny_models.tool_calls import checkpoint, vocabulary
from deploy.tiny_models.tool_calls.checkpoint import SMOKE_SHAPE, Shape, eagle3_config, standalone_config
from deploy.tiny_models.tool_calls.documents import ConversationSource
from deploy.tiny_models.tool_calls.train_tools import arguments
from deploy.tiny_models.trainer import train
from deploy.tiny_models.training_loop import Settings


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return vocabulary.build(sample=300)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


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


def test_the_defaults() -> None:
    args = arguments(["--minutes", "2"])
    assert args.minutes == 2.0
    assert (args.out / "tiny-target").is_dir()
