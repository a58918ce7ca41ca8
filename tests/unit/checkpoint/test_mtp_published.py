"""MTP modules in the forms of public checkpoints: the target loads without its module, which loads as its draft.

Logits are compared with those of transformers' layers. Modules of different widths than the target (row D10).
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from common.checkpoint.draft_config import DraftConfig, with_steps
from common.checkpoint.model_config import ModelConfig
from common.engine.attention.paged import PagedAttention
from common.engine.forward.model_runner import load_model
from common.engine.forward.mtp_runner import load_mtp
from common.errors import ModelError
from common.speculation.directory import algorithm_of, load_draft_config
from tests.fakes.pools import plain_pool
from tests.fakes.published_heads import whole_text
from tests.fakes.published_mtp import PUBLISHED, save
from tests.fakes.tiny_model import PLACEMENT
from tests.unit.engine import families
from tests.unit.engine.paged_driver import Driver

TEXT = torch.randint(families.VOCAB, (21,), generator=torch.Generator().manual_seed(2))


def draft_of(path: Path, steps: int = 3) -> DraftConfig:
    return with_steps(load_draft_config(path, "mtp", ModelConfig.load(path)), steps)


@pytest.mark.parametrize("name", PUBLISHED)
@torch.inference_mode()
def test_target_and_module_from_one_directory(name: str, tmp_path: Path) -> None:
    form = PUBLISHED[name]
    saved = save(form, tmp_path)
    target = load_model(tmp_path)[0]
    if target.config.gated_delta is None:  # test_hybrid_models.py has the others
        actual = Driver(target, [TEXT], 16).run_all(7, [len(TEXT)])[0]
        torch.testing.assert_close(actual, families.reference_logits(saved.model, TEXT), atol=1e-4, rtol=0)

    draft = draft_of(tmp_path)
    assert draft.repeats
    (head,) = load_mtp(tmp_path, draft, target, PLACEMENT).heads
    assert head.embed_tokens is target.embed_tokens
    assert head.lm_head is target.lm_head
    hidden = torch.randn(len(TEXT), draft.target_hidden, generator=torch.Generator().manual_seed(3))
    shape = draft.model
    pool = plain_pool(1, shape.num_kv_heads, shape.head_dim, 64, 2, PLACEMENT.dtype, PLACEMENT.device)
    attention = PagedAttention(pool, shape.sliding_windows)
    attention.plan(whole_text(TEXT))
    output = head(TEXT, hidden, torch.arange(len(TEXT)), attention)
    expected = saved.module_logits(TEXT, hidden)
    assert expected.std() > 0.5
    torch.testing.assert_close(head.compute_logits(output.last), expected, atol=1e-4, rtol=0)
    assert algorithm_of(tmp_path, tmp_path) == "mtp"
    assert algorithm_of(tmp_path, tmp_path.parent) == "standalone"


def test_a_target_with_modules_is_served_without_them(tmp_path: Path) -> None:
    """A module's tensors are not those of the target, and a count that leaves some of them over is an error."""
    save(PUBLISHED["mimo"], tmp_path)
    load_model(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": 0}))
    with pytest.raises(ModelError, match=r"unexpected tensors: model.mtp_layers.0"):
        load_model(tmp_path)
