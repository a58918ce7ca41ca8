"""The benchmark of hand-overs on a CPU: a decode node with the tiny model, and a scripted prefill node."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import pytest
import torch

from tests.bench import handover, shapes
from tests.fakes.waiting import until

MODELS = Path(__file__).parents[3] / "deploy" / "tiny_models"


def test_requests_are_handed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handover, "WARM_UP_SECONDS", 0.0)
    models = shapes.loaded(
        MODELS / "tiny-target", MODELS / "tiny-eagle3", handover.STEPS, torch.device("cpu")
    )
    options = Namespace(max_running=2, length=20, answer=6)
    with handover.node(models, "eagle3", options) as node:
        row = until(lambda: (found := node.measure(20.0, "late", 1.0)).requests and found)
    assert row
    assert set(row.stages_ms) == set(handover.STAGES[1:])
    assert all(p50 <= p99 <= most for p50, p99, most in row.stages_ms.values())
    assert row.missing == 0
    assert handover.line(row).startswith("eagle3 20/s late")
