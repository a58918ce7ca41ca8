"""The engine-level benchmark on a CPU: a head of chosen acceptance in this engine's rounds, and the tiny models."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from common.engine.formats.fp8 import Fp8Linear
from deploy.tiny_models.constructed_head import Drafting
from deploy.tiny_models.constructed_shape import Shape
from tests.bench import rounds, shapes

MODELS = Path(__file__).parents[3] / "deploy" / "tiny_models"
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


@pytest.mark.parametrize("acceptance", [0.5, 1.0])
def test_accept_length_of_the_engine_is_the_chosen_one(acceptance: float) -> None:
    """A round emits 1 + p + p^2 + p^3 tokens on average, and the text is plain decoding's."""
    drafting = Drafting(acceptance)
    pair = shapes.pair(SMALL.config(), "eagle3", drafting, steps=3, seed=1, device=torch.device("cpu"))
    for row in rounds.bench(pair, [1, 3], length=20, steps=3, rounds=30):
        assert row.same_text == 1.0
        theory = sum(acceptance**drafts for drafts in range(4))
        assert row.accept_length == pytest.approx(theory, abs=0.3 if acceptance < 1 else 1e-9)


def test_two_ranks_draft_like_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every rank runs the program; rank 0 reports the text and the accept length of one rank."""
    (tmp_path / "config.json").write_text(json.dumps(SMALL.config()))
    shape = ["--device", "cpu", "--shape", str(tmp_path)]
    size = ["--batch", "2", "--length", "20", "--rounds", "6", "--seed", "1", "--graphs", "none"]
    found = []
    for ranks in ("1", "2"):
        file = tmp_path / f"{ranks}.json"
        monkeypatch.setattr(sys, "argv", ["rounds", *shape, *size, "--ranks", ranks, "--json", str(file)])
        rounds.main()
        (row,) = json.loads(file.read_text())["rows"]
        found.append((row["accept_length"], row["same_text"]))
    assert found[0] == found[1]
    assert found[0][1] == 1.0


def test_the_tiny_family(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "rounds.json"
    where = ["--model", MODELS / "tiny-target", "--draft", MODELS / "tiny-eagle3", "--device", "cpu"]
    size = ["--batch", "2", "--length", "24", "--rounds", "6", "--json", file]
    monkeypatch.setattr(sys, "argv", ["rounds", *map(str, where + size)])
    rounds.main()
    report = json.loads(file.read_text())
    (row,) = report["rows"]
    assert report["commit"]
    assert row["same_text"] == 1.0
    assert 1.0 <= row["accept_length"] <= 4.0
    assert row["round_ms"] > 0 < row["plain_ms"]


def test_eight_bits_of_target_head_and_pages() -> None:
    """Drafts of a chosen acceptance are accepted, and both texts come from the same weights and pages."""
    pair = shapes.pair(SMALL.config(), "eagle3", Drafting(1.0), 3, 1, torch.device("cpu"), "fp8", "fp8")
    assert any(isinstance(each, Fp8Linear) for each in pair.model.modules())
    (row,) = rounds.bench(pair, [2], length=20, steps=3, rounds=6, kv=shapes.KV_DTYPES["fp8"])
    assert row.same_text == 1.0
    assert row.accept_length == pytest.approx(4.0)
