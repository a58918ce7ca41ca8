"""The constructed checkpoint: an ordinary directory whose greedy text is its cycle, by `transformers` too."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from deploy.models.constructed import SPECIAL, Shape, successor, write

SMALL = Shape(vocab=128, hidden=256, layers=2, heads=4, kv_heads=2, head_dim=32, inter=256, max_positions=256)


def test_greedy_text_follows_the_cycle(tmp_path: Path) -> None:
    write(tmp_path, SMALL, seed=3, device=torch.device("cpu"))
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    prompt = torch.tensor([[20, 90, 41]])
    options = {"do_sample": False, "pad_token_id": 0, "attention_mask": torch.ones_like(prompt)}
    text = model.generate(prompt, max_new_tokens=20, **options)[0, 3:].tolist()
    succ = successor(SMALL, 3).tolist()
    expected, token = [], 41
    for _ in range(20):
        token = succ[token]
        expected.append(token)
    assert text == expected


def test_the_cycle_holds_every_ordinary_token_and_no_special_one() -> None:
    succ = successor(SMALL, 0).tolist()
    seen, token = set(), succ[SPECIAL]
    while token not in seen:
        seen.add(token)
        token = succ[token]
    assert seen == set(range(SPECIAL, SMALL.vocab))
