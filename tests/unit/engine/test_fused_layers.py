"""Layers of one row whose rotation, or whose choice of experts, is in the next kernel equal those with separate ones.

On a GPU the sizes decide. Here they are said to fit, and the operations are the torch references.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from common.checkpoint.families import LayerKind
from common.checkpoint.model_config import EXPERTS, ModelConfig
from common.engine.attention import step_attention
from common.engine.formats import dense_experts
from tests.fakes.tiny_model import CONFIG, MIXTURE, tiny_model
from tests.unit.engine.paged_driver import Driver

IDS = torch.arange(9) * 7 % 90
EXPERTS_TWICE = replace(MIXTURE, layer_kinds=(LayerKind(feed_forward=EXPERTS),) * 2, qk_norm=True)


@pytest.mark.parametrize("config", [CONFIG, MIXTURE, EXPERTS_TWICE], ids=["dense", "mixed", "experts"])
def test_fused_layers_equal_separate_ones(config: ModelConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model(config=config)

    def logits() -> Tensor:
        return Driver(model, [IDS], page_size=4).run_all(None, [3])[0]

    expected, used = logits(), Counter[str]()
    for module, name in ((dense_experts, "add_experts"), (step_attention, "rotary_decode")):

        def counted(*given: object, name: str = name, run: object = getattr(module, name)) -> object:
            used[name] += 1
            assert callable(run)
            return run(*given)

        monkeypatch.setattr(module, name, counted)
    monkeypatch.setattr(dense_experts, "fuses_experts", lambda stream, gate_up: len(stream) == 1)
    monkeypatch.setattr(step_attention, "fuses_rotation", lambda qkv: True)
    torch.testing.assert_close(logits(), expected, atol=1e-5, rtol=1e-5)
    # six steps of two layers
    assert used["rotary_decode"] == 12
    assert used["add_experts"] == 6 * sum(kind.feed_forward == EXPERTS for kind in config.layer_kinds)
