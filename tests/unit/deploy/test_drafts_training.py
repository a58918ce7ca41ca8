"""The parts of the drafts' training program on a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from deploy.tiny_models.corpus import DocumentSource, WindowKind, Windows
from deploy.tiny_models.drafts import draft_card, files
from deploy.tiny_models.drafts.draft_trainer import (
    draft_optimizers,
    frequent_tokens,
    readings,
    soft_cross_entropy,
    train,
)
from deploy.tiny_models.drafts.features import TARGET, Shared, load_target
from deploy.tiny_models.drafts.heads import Eagle3Head, Prediction
from deploy.tiny_models.drafts.measure import Acceptance
from deploy.tiny_models.drafts.shapes import KINDS, Kind, draft_config
from deploy.tiny_models.drafts.train_one import arguments, unrolled_steps
from deploy.tiny_models.training_loop import Outcome, Settings

pytestmark = pytest.mark.usefixtures("one_thread")

OUTCOME = Outcome(seconds=10.0, steps=5, tokens=2_000_000, loss=0.1, first_loss=6.0)


def batches() -> Iterator[Windows]:
    tokenizer = Tokenizer.from_file(str(TARGET / "tokenizer.json"))
    kind = WindowKind(window=96, share=1.0, most_shots=2, many=0.2)
    return DocumentSource(tokenizer, seed=3).batches(192, (kind,))


@pytest.mark.parametrize("kind", KINDS)
def test_training_lowers_the_loss_and_survives_the_file(kind: Kind, tmp_path: Path) -> None:
    target = load_target()
    head = files.new_head(draft_config(kind, files.load_config(TARGET)), seed=1)
    if isinstance(head, Eagle3Head):
        chosen = frequent_tokens(DocumentSource(_tokenizer(), 1).batches(8192), 256, looked_at=3)
        head.choose_vocabulary(Shared.of(target), torch.tensor(chosen))
    settings = Settings(1.0, lr=3e-3, device=torch.device("cpu"), clock=count(0.0, 0.05).__next__)
    outcome = train(head, target, readings(batches(), settings.device), settings, steps=2)
    assert outcome.loss < outcome.first_loss - 0.1

    files.save(tmp_path, head, draft_config(kind, files.load_config(TARGET)))
    found, loaded = files.load_head(tmp_path)
    assert found == kind
    for name, value in loaded.state_dict().items():
        wanted = head.state_dict()[name]
        wanted = wanted.bfloat16().float() if wanted.is_floating_point() else wanted
        assert torch.equal(value, wanted), name


def _tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(TARGET / "tokenizer.json"))


def test_every_parameter_has_one_optimizer() -> None:
    for kind in KINDS:
        head = files.new_head(draft_config(kind, files.load_config(TARGET)), seed=1)
        given = [
            p for opt in draft_optimizers(head, 1e-3) for group in opt.param_groups for p in group["params"]
        ]
        assert len(given) == len({id(p) for p in given}) == len(list(head.parameters()))


def test_frequent_tokens_count_answers_most() -> None:
    ids = np.array([[5, 5, 5, 9, 7, 8]], np.uint16)
    weights = np.array([[1, 1, 1, 10, 10, 1]], np.uint8)
    assert frequent_tokens(iter([Windows(ids, weights)]), size=2, looked_at=1) == [7, 9]
    with pytest.raises(ValueError, match="only 4 different"):
        frequent_tokens(iter([Windows(ids, weights)]), size=5, looked_at=1)


def test_the_loss_compares_with_the_right_row_and_skips_what_cannot_be_drafted() -> None:
    """x[t + 2] is predicted at row t; the target's distribution for it is at row t + 1."""
    target_logits = torch.full((1, 4, 5), -20.0)
    for row, token in enumerate((0, 1, 2, 3)):
        target_logits[0, row, token] = 20.0
    weights = torch.ones(1, 4)
    logits = torch.full((1, 4, 5), -20.0)
    logits[0, 0, 1] = logits[0, 1, 2] = 20.0  # rows 2 and 3 predict past the end
    assert soft_cross_entropy(Prediction(logits, 2), target_logits, weights, None) < 1e-3
    assert soft_cross_entropy(Prediction(logits, 1), target_logits, weights, None) > 10
    drafted = torch.tensor([1, 4])
    assert soft_cross_entropy(Prediction(logits[..., drafted], 2), target_logits, weights, drafted) < 1e-3


def test_the_card_takes_new_figures(tmp_path: Path) -> None:
    card = draft_card.Card("mtp", 1_720_000, 3, OUTCOME, "a machine", "a command")
    draft_card.write(tmp_path, card)
    assert "not measured yet" in (tmp_path / "README.md").read_text()
    row = Acceptance("chat", 8, 3, length=3.5, most=3.8, per_step=[0.9, 0.8, 0.7])
    draft_card.write_figures(tmp_path, [replace(row, length=2.0)])
    draft_card.write_figures(tmp_path, [row])
    text = (tmp_path / "README.md").read_text()
    assert "| chat | 8 | 3 | 3.500 | 3.800 | 0.900 0.800 0.700 |" in text
    assert "2.000" not in text
    assert "not measured" not in text
    assert "2.0 M tokens in 5 steps, 10 seconds" in text


def test_the_defaults() -> None:
    args = arguments(["--device", "cuda"])
    assert (args.minutes, args.only, args.out) == (5.0, list(KINDS), TARGET.parent)
    again = arguments(["--only", "eagle", "mtp", "--only", "mtp"])  # how a child process gets its kind
    assert again.only == ["mtp"]
    assert [unrolled_steps(kind) for kind in KINDS] == [5, 5, 3, 1]
