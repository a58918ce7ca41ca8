"""MTP modules in the forms of public checkpoints: the target loads without its module, which loads as its draft.

Rows D9 and D10: logits of every form and width are compared with those of transformers' layers.
"""

from __future__ import annotations

import contextlib
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

from common.checkpoint.draft_config import with_steps
from common.checkpoint.model_config import ModelConfig
from common.engine.attention.paged import PagedAttention
from common.engine.forward.model_runner import load_model
from common.engine.forward.mtp_runner import load_mtp
from common.errors import ModelError
from common.speculation.directory import algorithm_of, load_draft_config, max_steps
from tests.fakes.pools import plain_pool
from tests.fakes.published_heads import whole_text
from tests.fakes.published_mtp import PUBLISHED, save
from tests.fakes.tiny_model import PLACEMENT
from tests.unit.engine import families
from tests.unit.engine.paged_driver import Driver

TEXT = torch.randint(families.VOCAB, (21,), generator=torch.Generator().manual_seed(2))


# Public files have one module, but for those of MiMo-V2-Flash, which have three.
FORMS = [*((name, 1) for name in PUBLISHED), *((name, 3) for name in PUBLISHED)]


@pytest.mark.parametrize(("name", "count"), FORMS)
@torch.inference_mode()
def test_target_and_modules_from_their_directories(name: str, count: int, tmp_path: Path) -> None:
    """Every module has its own weights, and the modules of a form that shares some have the same."""
    saved = save(PUBLISHED[name], tmp_path, count)
    target = load_model(saved.target)[0]
    if target.config.gated_delta is None:  # test_hybrid_models.py has the others
        actual = Driver(target, [TEXT], 16).run_all(7, [len(TEXT)])[0]
        torch.testing.assert_close(actual, families.reference_logits(saved.model, TEXT), atol=1e-4, rtol=0)

    draft = with_steps(load_draft_config(saved.draft, "mtp", ModelConfig.load(saved.target)), 3)
    assert (draft.repeats, draft.modules) == ((True, 0) if count == 1 else (False, 3))
    assert max_steps(saved.draft, "mtp") == (None if count == 1 else 3)
    assert draft.aux_layers == ((target.config.num_layers,) if saved.form.before_norm else ())
    heads = load_mtp(saved.draft, draft, target, PLACEMENT).heads
    hidden = torch.randn(len(TEXT), draft.target_hidden, generator=torch.Generator().manual_seed(3))
    shape = draft.model
    pool = plain_pool(count, shape.num_kv_heads, shape.head_dim, 64, 2, PLACEMENT.dtype, PLACEMENT.device)
    attention = PagedAttention(pool, shape.sliding_windows)
    attention.plan(whole_text(TEXT))
    for index, head in enumerate(heads):
        assert head.embed_tokens is target.embed_tokens
        assert head.lm_head is target.lm_head
        output = head(TEXT, hidden, torch.arange(len(TEXT)), attention)
        expected, passed = saved.module_rows(index, TEXT, hidden)
        assert expected.std() > 0.5
        torch.testing.assert_close(head.compute_logits(output.last), expected, atol=1e-4, rtol=0)
        if saved.form.chain:
            torch.testing.assert_close(output.hidden, passed, atol=1e-4, rtol=0)
    assert algorithm_of(saved.draft, saved.draft) == "mtp"
    assert algorithm_of(saved.draft, tmp_path.parent) == ("mtp" if saved.form.apart else "standalone")


def test_a_target_with_modules_is_served_without_them(tmp_path: Path) -> None:
    """A module's tensors are not those of the target, and a count that leaves some of them over is an error."""
    save(PUBLISHED["mimo"], tmp_path)
    load_model(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": 0}))
    with pytest.raises(ModelError, match=r"unexpected tensors: model.mtp_layers.0"):
        load_model(tmp_path)


def test_modules_are_chained_as_in_transformers(tmp_path: Path) -> None:
    """The references of these tests run modules one by one; here transformers runs the chain, for a family of its own.

    Its positions are those of the tokens that rows read, later by one per module: only differences matter.
    """
    saved = save(PUBLISHED["glm-4.5-biases"], tmp_path, 3)
    saved.model.config.num_mtp_layers = 3
    modules = MtpModel(saved.model, 3).eval()
    for ours, theirs in zip(modules.layers, saved.modules, strict=True):
        ours.load_state_dict(theirs.state_dict())
    text = TEXT[:9]
    with torch.no_grad():
        hidden = saved.target_hidden(text[:-1].tolist())[None]
        cache = MtpCache(config=modules.config)
        drafts = modules(text[None, 1:], hidden, None, torch.arange(1, len(text))[None], cache)[0]
    assert drafts[0].tolist() == saved.drafts(text.tolist(), 3)


HOSTILE: list[Any] = [None, -1, 0, 1.5, 1 << 70, float("nan"), True, "x", [], {"rope_theta": []}]


def mimo_v2(path: Path, count: int = 3, **changes: Any) -> Path:
    """Write modules in the form of MiMo-V2 and change their config.json."""
    saved = save(PUBLISHED["mimo-v2"], path, count)
    file = saved.draft / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    return saved.draft


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"add_swa_attention_sink_bias": True}, "add_swa_attention_sink_bias true is not supported"),
        ({"swa_v_head_dim": 16}, "swa_v_head_dim 16 is not supported: values are as wide as keys"),
        ({"swa_head_dim": None}, "swa_head_dim must be a positive integer"),
        ({"sliding_window_size": None}, "sliding_window_size must be a positive integer"),
        ({"sliding_window_size": 1 << 40}, "sliding_window_size 1099511627776 is more than"),
        ({"swa_num_attention_heads": 5}, "5 attention heads cannot share 2 key-value heads evenly"),
        ({"attention_value_scale": -1}, "attention_value_scale must be a positive number"),
        ({"layernorm_epsilon": "small"}, "layernorm_epsilon must be a positive number"),
        ({"partial_rotary_factor": 0.3}, "rotates 7 of 24 dimensions of a head; an even number is needed"),
        ({"hidden_size": 96}, "hidden_size is 96, the target has 48: this draft is for another model"),
        ({"vocab_size": 128}, "vocab_size is 128, the target has 96: this draft is for another model"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization awq is not supported"),
    ],
)
def test_what_modules_of_mimo_v2_may_not_have(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    """Sinks and narrow values, which the published file has, are refused by their keys, like damaged values."""
    draft = mimo_v2(tmp_path, **changes)
    with pytest.raises(ModelError, match=f"config.json: .*{re.escape(said)}"):
        load_draft_config(draft, "mtp", ModelConfig.load(tmp_path))


def test_hostile_values_in_modules_of_mimo_v2(tmp_path: Path) -> None:
    """Each value is read, or the error names the file."""
    draft = mimo_v2(tmp_path)
    target, good = ModelConfig.load(tmp_path), json.loads((draft / "config.json").read_text())
    for key in {*PUBLISHED["mimo-v2"].config, "rope_parameters", "rope_scaling", "hidden_act", "mtp_chain"}:
        for value in HOSTILE:
            (draft / "config.json").write_text(json.dumps({**good, key: value}))
            with contextlib.suppress(ModelError):
                load_draft_config(draft, "mtp", target)


def test_modules_of_mimo_v2_are_counted_by_their_tensors(tmp_path: Path) -> None:
    draft = mimo_v2(tmp_path)
    target = ModelConfig.load(tmp_path)
    config = load_draft_config(draft, "mtp", target)
    assert (config.model.num_layers, config.model.sliding_windows) == (3, (5, 5, 5))
    with pytest.raises(ModelError, match="has 3 modules, one for each step"):
        with_steps(config, 4)
    file = draft / "model.safetensors"
    tensors = load_file(file)
    save_file({**tensors, "model.mtp.layers.32.enorm.weight": torch.ones(48)}, file)
    with pytest.raises(ModelError, match=r"model\.mtp\.layers\.32; at most 32 are supported"):
        load_draft_config(draft, "mtp", target)
    save_file({"model.embed_tokens.weight": torch.ones(96, 48)}, file)
    with pytest.raises(ModelError, match=r"no tensors model\.mtp\.layers\.0"):
        load_draft_config(draft, "mtp", target)


def test_modules_that_share_a_projection_are_as_wide_as_the_target(tmp_path: Path) -> None:
    """The projection of the first module reads the target's state, and that of the others a module's."""
    save(PUBLISHED["qwen3.5"], tmp_path, 2)
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "target_hidden_size": 96}))
    target = replace(ModelConfig.load(tmp_path), hidden_size=96)
    with pytest.raises(ModelError, match="hidden_size is 48, the target has 96"):
        load_draft_config(tmp_path, "mtp", target)
