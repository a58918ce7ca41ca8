"""The parts of the training program on a CPU: schedule, optimizer, replayed data, checkpoint, evaluation."""

from __future__ import annotations

import json
from itertools import count
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, GenerationConfig, LlamaForCausalLM

from deploy.tiny_models import checkpoint, tokenizer
from deploy.tiny_models.corpus import DocumentSource, WindowKind, Windows
from deploy.tiny_models.greedy_eval import Suite, evaluate
from deploy.tiny_models.model_card import Card
from deploy.tiny_models.model_card import write as write_card
from deploy.tiny_models.muon import orthogonalize
from deploy.tiny_models.train_target import arguments, suites
from deploy.tiny_models.trainer import Replay, train
from deploy.tiny_models.training_loop import Outcome, Settings, rate_at
from deploy.tiny_models.training_options import shown_command, training_of

pytestmark = pytest.mark.usefixtures("one_thread")

SHAPE = checkpoint.Shape(
    hidden_size=64,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=32,
    intermediate_size=64,
)


def test_the_rate_warms_up_and_ends_at_zero() -> None:
    assert rate_at(0.0) == 0.0
    assert rate_at(0.01) == pytest.approx(0.5)
    assert rate_at(0.1) == 1.0
    assert rate_at(1.0) == 0.0
    assert rate_at(2.0) == 0.0
    assert all(rate_at(p / 100) >= rate_at((p + 1) / 100) for p in range(15, 100))


@pytest.mark.parametrize("shape", [(3, 32, 64), (2, 64, 32), (1, 48, 48)])
def test_orthogonalized_matrices_have_singular_values_near_one(shape: tuple[int, int, int]) -> None:
    torch.manual_seed(1)
    values = torch.linalg.svdvals(orthogonalize(torch.randn(shape), steps=8))
    assert values.min() > 0.4
    assert values.max() < 1.4


def test_replay_repeats_only_when_nothing_fresh_has_come() -> None:
    def windows(mark: int) -> Windows:
        return Windows(np.full((1, 2), mark, np.uint16), np.ones((1, 2), np.uint8))

    replay = Replay(iter([windows(1), None, windows(2), None, None]), seed=1)
    marks = [int(batch.ids[0, 0]) for batch in replay]
    assert marks[:3] == [1, 1, 2]
    assert set(marks[3:]) <= {1, 2}
    assert (replay.fresh, replay.again) == (2, 3)


def test_training_saving_and_scoring(tmp_path: Path) -> None:
    vocabulary = tokenizer.build(sample=2000)
    config = checkpoint.config_dict(SHAPE, vocabulary)
    model = checkpoint.new_model(config, seed=1)
    kind = WindowKind(window=128, share=1.0, most_shots=2, many=0.2)
    batches = DocumentSource(vocabulary, seed=1).batches(1024, (kind,))
    outcome = train(
        model, batches, Settings(1.0, lr=3e-3, device=torch.device("cpu"), clock=count(0.0, 0.01).__next__)
    )
    assert outcome.steps > 3
    assert outcome.loss < outcome.first_loss - 1

    checkpoint.round_to_bf16(model)
    checkpoint.save(tmp_path, model, config, vocabulary)
    score = evaluate(model, vocabulary, Suite("chat", "chat", shots=0, count=4))
    assert score.asked.total() == 4
    assert len(score.wrong) + score.right.total() == 4
    write_card(tmp_path, Card(1, outcome, "test", "command"), [score])
    assert {path.name for path in tmp_path.iterdir()} == {
        "README.md",
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "special_tokens_map.json",
        "tokenizer.json",
        "tokenizer_config.json",
    }

    loaded = LlamaForCausalLM.from_pretrained(tmp_path)
    assert loaded.dtype == torch.bfloat16
    for name, value in loaded.state_dict().items():
        assert torch.equal(value.float(), model.state_dict()[name]), name
    assert loaded.config.head_dim == SHAPE.head_dim
    assert not loaded.config.tie_word_embeddings
    assert GenerationConfig.from_pretrained(tmp_path).eos_token_id == [2]
    assert AutoTokenizer.from_pretrained(tmp_path).eos_token_id == 2


def test_the_target_fits_its_file() -> None:
    vocabulary = tokenizer.build(sample=500)
    with torch.device("meta"):
        model = checkpoint.new_model(checkpoint.config_dict(checkpoint.Shape(), vocabulary), seed=1)
    size = 2 * sum(p.numel() for p in model.parameters())
    assert size + 20_000 < checkpoint.MAX_FILE_BYTES


def test_a_diverged_run_raises_an_error() -> None:
    vocabulary = tokenizer.build(sample=500)
    model = checkpoint.new_model(checkpoint.config_dict(SHAPE, vocabulary), seed=1)
    with torch.no_grad():
        model.lm_head.weight.fill_(float("nan"))
    kind = WindowKind(window=64, share=1.0, most_shots=2, many=0.2)
    batches = DocumentSource(vocabulary, seed=1).batches(64, (kind,))
    with pytest.raises(FloatingPointError, match="lower --lr"):
        train(model, batches, Settings(seconds=5.0, lr=3e-3, device=torch.device("cpu")))


def test_the_card_names_what_was_measured(tmp_path: Path) -> None:
    outcome = Outcome(seconds=10.0, steps=5, tokens=2_000_000, loss=0.1, first_loss=6.0)
    write_card(tmp_path, Card(3_900_000, outcome, "a machine", "a command"), [])
    text = (tmp_path / "README.md").read_text()
    assert "3.90 M parameters" in text
    assert "2.0 M tokens in 5 steps, 10 seconds" in text
    assert "not evaluated yet" in text


def test_the_defaults() -> None:
    args = arguments(["--minutes", "2"])
    assert args.minutes == 2.0
    assert args.out.name == "tiny-target"
    assert json.dumps([suite.count for suite in suites(1000)]) == "[1000, 1000, 250, 250, 250, 125]"


def test_options_of_all_trainers() -> None:
    """What the command line leaves out follows from the device; a model card shows no directory of this machine."""
    given = ["--device", "cpu", "--out", "/home/me/models", "--seed", "7", "--workers", "3"]
    training = training_of(arguments(given))
    assert (training.device.type, training.seed) == ("cpu", 7)
    assert (training.batch_tokens, training.workers) == (4_096, 3)
    assert training_of(arguments([*given, "--batch-tokens", "512"])).batch_tokens == 512
    shown = shown_command("deploy.tiny_models.train_target", given, arguments(given).out)
    assert shown == ("python3 -m deploy.tiny_models.train_target --device cpu --out OUT --seed 7 --workers 3")
