"""Benchmarks over constructed models of the published shapes, small and on a CPU: acceptance, text, counted experts."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from common.engine.models.causal_lm import CausalLM
from common.errors import ModelError
from deploy.tiny_models import constructed
from deploy.tiny_models.constructed_head import Drafting
from deploy.tiny_models.constructed_shape import successor
from deploy.tiny_models.constructed_tensors import shape_of
from tests.bench import engine, rounds, shapes

CPU = torch.device("cpu")
SMALL = {
    "hidden_size": 128,
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 256,
    "max_position_embeddings": 512,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.25},
}
VISION = json.loads((constructed.TOKENIZER.parent / "tiny-vision" / "config.json").read_text())
MOE, HYBRID = "qwen3-30b-a3b", "qwen3.5-35b-a3b"


def small(name: str) -> dict[str, Any]:
    """Return the config of a published shape with other sizes."""
    raw = shapes.config_of(name)
    return {key: SMALL.get(key, value) for key, value in raw.items()}


@pytest.mark.parametrize(
    ("name", "algorithm", "acceptance"),
    [(MOE, "eagle3", 0.6), (HYBRID, "eagle3", 1.0), (HYBRID, "mtp", 0.6), (HYBRID, "mtp", 1.0)],
)
def test_acceptance_is_the_chosen_one_and_the_text_is_that_of_plain_decoding(
    name: str, algorithm: str, acceptance: float
) -> None:
    pair = shapes.pair(small(name), algorithm, Drafting(acceptance), steps=3, seed=1, device=CPU)
    (row,) = rounds.bench(pair, [3], length=70, steps=3, rounds=20, graphs="none")
    assert row.same_text == 1.0
    theory = sum(acceptance**drafts for drafts in range(4))
    assert row.accept_length == pytest.approx(theory, abs=0.35 if acceptance < 1 else 1e-9)
    config = pair.model.config
    assert config.experts is not None
    least = config.num_layers * (config.experts.router.chosen + config.experts.shared)
    most = config.num_layers * (config.experts.count + config.experts.shared)
    assert least <= row.plain_experts <= row.experts <= most


def test_tensors_depend_only_on_seed_and_name_and_fill_the_model() -> None:
    def tensors(seed: int) -> dict[str, torch.Tensor]:
        model: CausalLM = shapes.target(small(HYBRID), seed, CPU)
        return dict(model.named_parameters())

    first, again, other = tensors(1), tensors(1), tensors(2)
    assert all(torch.equal(value, again[name]) for name, value in first.items())
    matrices = [name for name, value in first.items() if value.ndim > 1]
    assert not any(torch.equal(first[name], other[name]) for name in matrices)
    assert all(value.isfinite().all() for value in first.values())
    # No two layers and no two experts are alike.
    stacks = [value for name, value in first.items() if name.endswith("gate_up")]
    assert not torch.equal(stacks[0], stacks[1])
    assert not torch.equal(stacks[0][0], stacks[0][1])


def test_the_greedy_text_is_the_cycle() -> None:
    pair = shapes.pair(small(HYBRID), "mtp", Drafting(0.5), steps=1, seed=3, device=CPU)
    config = pair.model.config
    following = successor(shape_of(config, config.vocab_size // 2), 3)
    ids = torch.arange(20, 60)
    logits = pair.model.compute_logits(pair.model.embed(ids))
    assert torch.equal(logits.argmax(-1), following[ids])


def test_a_written_checkpoint_has_the_chosen_text_and_its_module_drafts_as_chosen(tmp_path: Path) -> None:
    """The directory that serving loads, for the target and for its own module."""
    constructed.write(tmp_path, small(HYBRID), 128, seed=3, device=CPU, module=Drafting(0.6))
    pair = shapes.loaded(tmp_path, tmp_path, 3, CPU)
    (row,) = rounds.bench(pair, [3], length=70, steps=3, rounds=20, graphs="none")
    assert row.same_text == 1.0
    assert row.accept_length == pytest.approx(sum(0.6**drafts for drafts in range(4)), abs=0.35)
    following = successor(shape_of(pair.model.config, 128), 3)
    ids = torch.arange(20, 60)
    logits = pair.model.compute_logits(pair.model.embed(ids))
    assert torch.equal(logits.argmax(-1), following[ids])


def test_what_cannot_be_constructed_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="use the config of its text part"):
        constructed.write(tmp_path, VISION, 128, seed=0, device=CPU)
    with pytest.raises(ValueError, match="have no module"):
        constructed.write(tmp_path, small(MOE), 128, seed=0, device=CPU, module=Drafting())
    tied = {**small(MOE), "tie_word_embeddings": True}
    with pytest.raises(ValueError, match="LM head is its embedding"):
        shapes.target(tied, 0, CPU)
    with pytest.raises(ModelError, match="is not a draft for mtp"):
        shapes.pair(small(MOE), "mtp", Drafting(), steps=3, seed=0, device=CPU)
    with pytest.raises(SystemExit, match="neither a directory with config.json nor one of"):
        shapes.config_of("qwen4")


def test_prompts_and_steps_of_a_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both forwards of a hybrid with experts run, and the experts that they read are counted."""
    (tmp_path / "config.json").write_text(json.dumps(small(HYBRID)))
    file = tmp_path / "engine.json"
    sizes = ["--prompts", "64", "--batches", "1", "2", "--context", "20", "--steps", "2"]
    where = ["--shape", str(tmp_path), "--device", "cpu", "--prompt-graphs", "none", "--json", str(file)]
    monkeypatch.setattr(sys, "argv", ["engine", *where, *sizes])
    engine.main()
    report = json.loads(file.read_text())
    found = {(row["what"], row["graphs"], row["size"]): row for row in report["rows"]}
    assert set(found) == {
        ("prefill", "none", 64),
        *(("decode", graphs, size) for graphs in ("full", "none") for size in (1, 2)),
    }
    assert all(row["ms"] > 0 for row in found.values())
    # 4 layers with 6 experts of which a token has 2, and a shared one
    assert found["decode", "full", 1]["experts"] == 12
    assert 12 < found["decode", "full", 2]["experts"] <= 20
    assert found["prefill", "none", 64]["experts"] == 28
