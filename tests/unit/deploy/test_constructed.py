"""The constructed checkpoint: a standard directory whose greedy text is its cycle, in `transformers` too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from common.checkpoint.model_config import ModelConfig
from common.engine.forward.draft_runner import load_eagle3
from common.engine.forward.model_runner import load_model
from common.speculation.directory import load_draft_config
from deploy.tiny_models.constructed import write
from deploy.tiny_models.constructed_head import Drafting, write_head, wrong_tokens
from deploy.tiny_models.constructed_shape import SPECIAL, Shape, draft_ids, successor
from deploy.tiny_models.drafts.reference import load as load_reference

CPU = torch.device("cpu")
SMALL = Shape(
    vocab=256,
    hidden=256,
    layers=3,
    heads=4,
    kv_heads=2,
    head_dim=64,
    inter=256,
    max_positions=512,
    draft_vocab=128,
)


def test_greedy_text_follows_the_cycle(tmp_path: Path) -> None:
    write(tmp_path, SMALL.config(), SMALL.draft_vocab, seed=3, device=CPU)
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    prompt = torch.tensor([[20, 90, 3]])  # 3 is a special token, which leads into the cycle like all others
    options = {"do_sample": False, "pad_token_id": 0, "attention_mask": torch.ones_like(prompt)}
    text = model.generate(prompt, max_new_tokens=20, **options)[0, 3:].tolist()
    succ = successor(SMALL, 3).tolist()
    expected, token = [], 3
    for _ in range(20):
        token = succ[token]
        expected.append(token)
    assert text == expected


def test_the_cycle_holds_every_draft_token_and_no_special_one() -> None:
    succ, ids = successor(SMALL, 0).tolist(), draft_ids(SMALL, 0).tolist()
    assert len(ids) == SMALL.draft_vocab
    assert min(ids) >= SPECIAL
    seen, token = set(), ids[0]
    while token not in seen:
        seen.add(token)
        token = succ[token]
    assert seen == set(ids) == set(succ)


def test_a_draft_vocabulary_larger_than_the_ordinary_one_is_refused() -> None:
    with pytest.raises(ValueError, match="from 1 to 240, the ordinary ids"):
        Shape(vocab=256, draft_vocab=241)
    with pytest.raises(ValueError, match="between 0 and 1"):
        Drafting(acceptance=1.5)


def test_the_head_is_a_directory_that_drafts_as_chosen(tmp_path: Path) -> None:
    """After every token of the cycle the head gives the right draft or a wrong one, half of these with it second."""
    write(tmp_path / "target", SMALL.config(), SMALL.draft_vocab, seed=1, device=CPU)
    write_head(tmp_path / "draft", SMALL, Drafting(0.75, 0.5), seed=1, device=CPU)
    draft = load_draft_config(tmp_path / "draft", "eagle3", ModelConfig.load(tmp_path / "target"))
    model, _ = load_model(tmp_path / "target", "float32", CPU, aux_layers=draft.aux_layers)
    head = load_eagle3(tmp_path / "draft", draft, model, model.placement)
    ids, succ = draft_ids(SMALL, 1), successor(SMALL, 1)
    assert torch.equal(head.target_ids(torch.arange(len(ids))), ids)
    wrong = ids[wrong_tokens(SMALL, Drafting(0.75, 0.5), 1)]
    assert len(wrong) == 32
    target: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "target", dtype=torch.float32)
    reference = load_reference(tmp_path / "draft", target)
    ranks = []
    for token in ids[:64].tolist():
        logits = reference.logits_after([40, 17, token, int(succ[token])])
        drafted = logits.argsort(descending=True)[:2].tolist()
        ranks.append(drafted.index(int(succ[succ[token]])) if int(succ[succ[token]]) in drafted else 2)
        assert (ranks[-1] > 0) == (int(succ[token]) in wrong.tolist())
    assert {0, 1, 2} == set(ranks)
