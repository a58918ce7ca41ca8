"""MTP checkpoints at start-up are read in both published formats, with shared or separate weights, or refused.

Rows D2-D8: the width functions agree with the modules, the relay row and the record of MTP modules.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from common.checkpoint.draft_config import (
    DraftConfig,
    draft_fingerprint,
    hidden_rows_for,
    hidden_size_for,
    lookahead_for,
    proposals_for,
    target_width,
    with_steps,
)
from common.checkpoint.model_config import ModelConfig
from common.engine.forward.draft_inputs import DraftExtendInput
from common.engine.forward.model_runner import load_model
from common.engine.forward.mtp_runner import load_mtp
from common.engine.layers.placement import Placement
from common.engine.models.causal_lm import CausalLM
from common.engine.models.mtp import MtpModules, build_mtp
from common.engine.state.draft_row import DraftRow, DraftShape
from common.engine.state.relay_state import RelayState, draft_rows
from common.errors import ModelError
from common.messages.generation import SamplingParams
from common.node.serving_draft import draft_shape
from common.speculation.directory import load_draft_config, max_steps
from decode_node.speculative.state import RoundState
from tests.fakes.mtp_models import first_modules

MODELS = Path(__file__).resolve().parents[3] / "deploy" / "tiny_models"
TARGET, MTP = MODELS / "tiny-target", MODELS / "tiny-mtp"
PLACEMENT = Placement(torch.float32, torch.device("cpu"))
HIDDEN, VOCAB = 256, 704


def config_of(path: Path = MTP, steps: int = 3) -> DraftConfig:
    return with_steps(load_draft_config(path, "mtp", ModelConfig.load(TARGET)), steps)


@pytest.fixture(scope="module")
def target() -> CausalLM:
    return load_model(TARGET)[0]


def checkpoint(directory: Path, tensors: dict[str, torch.Tensor], **changes: Any) -> Path:
    """Save the shipped config with changes, and these tensors."""
    config = json.loads((MTP / "config.json").read_text())
    changed = {key: value for key, value in {**config, **changes}.items() if value is not None}
    (directory / "config.json").write_text(json.dumps(changed))
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()}, directory / "model.safetensors"
    )
    return directory


def shipped() -> dict[str, torch.Tensor]:
    return load_file(MTP / "model.safetensors")


@torch.inference_mode()
def module_logits(model: MtpModules, seed: int = 1) -> list[torch.Tensor]:
    """Return the logits of every module for one row at position 0, where attention returns the value."""
    generator = torch.Generator().manual_seed(seed)
    hidden, ids = torch.randn(1, HIDDEN, generator=generator), torch.tensor([77])
    said = []
    for head in model.heads:
        output = head(ids, hidden, torch.tensor([0]), OneRow())
        said.append(head.compute_logits(output.last))
    return said


class OneRow:
    """An `AttentionBackend` for a single token."""

    def plan(self, batch: object) -> None: ...

    def store(self, layer: int, *rest: object) -> None: ...

    def token_slots(self) -> None: ...

    def forward(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        return value.repeat_interleave(query.shape[1] // value.shape[1], dim=1)


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_widths(steps: int, target: CausalLM) -> None:
    """D3, D5-D7: MTP modules answer the same width functions, and their proposals are packed: topk x steps."""
    config = config_of(steps=steps)
    assert (config.modules, config.aux_layers) == (steps, ())
    assert (target_width(config), hidden_size_for(config)) == (HIDDEN, HIDDEN)
    assert (hidden_rows_for(config), proposals_for(config, 1), lookahead_for(config)) == (
        steps - 1,
        steps,
        steps,
    )
    shape = draft_shape(config, 1, PLACEMENT)
    assert (shape.topk, shape.hidden, shape.vocab) == (steps, (steps - 1) * HIDDEN, VOCAB)
    assert shape.dtype_name == ("float32" if steps > 1 else "")
    model = load_mtp(MTP, config, target, PLACEMENT)
    assert len(model.heads) == steps
    relay = RelayState.allocate(1, VOCAB, PLACEMENT.device, shape)
    state = torch.randn(shape.hidden).view(torch.uint8).numpy().tobytes() if shape.hidden else b""
    row = DraftRow((0.5,) * steps, tuple(range(steps)), state)
    assert row.fits(shape)
    assert not DraftRow((0.5,), (1,), state).fits(shape) or steps == 1
    relay.write_row(1, [4, 5], 1, SamplingParams(max_tokens=1), row)
    assert draft_rows(relay.draft_input(torch.tensor([1]))) == [row]


def test_idle_state_has_no_rows_and_all_widths() -> None:
    """D6: an idle batch of MTP modules has zero rows of width topk x steps."""
    shape = draft_shape(config_of(), 1, PLACEMENT)
    relay = RelayState.allocate(1, VOCAB, PLACEMENT.device, shape)
    idle = relay.draft.draft_topk_ids[:0], relay.draft.draft_topk_probs[:0], relay.draft.hidden[:0]
    assert [tuple(each.shape) for each in idle] == [(0, 3), (0, 3), (0, 2 * HIDDEN)]
    assert idle[2].dtype == PLACEMENT.dtype


def test_more_steps_than_modules_are_refused() -> None:
    with pytest.raises(
        ModelError, match="has 3 modules, one for each step: set speculation.steps to at most 3"
    ):
        config_of(steps=4)


@pytest.mark.parametrize("steps", [1, 3, 31])
def test_one_module_runs_at_every_step(steps: int, target: CausalLM, tmp_path: Path) -> None:
    """A checkpoint with one module has the widths of a head, for any number of steps."""
    path = first_modules(tmp_path / "one", 1)
    config = config_of(path, steps)
    assert (config.repeats, config.modules, config.model.num_layers) == (True, 0, 1)
    assert (hidden_rows_for(config), proposals_for(config, 1), lookahead_for(config)) == (1, 1, 1)
    shape = draft_shape(config, 1, PLACEMENT)
    assert (shape.topk, shape.hidden, shape.dtype_name) == (1, HIDDEN, "float32")
    assert max_steps(path, "mtp") is None
    assert max_steps(MTP, "mtp") == 3
    model = load_mtp(path, config, target, PLACEMENT)
    (head,) = model.heads
    output = head(torch.tensor([3]), torch.randn(1, HIDDEN), torch.tensor([0]), OneRow())
    assert torch.equal(output.hidden, output.last)


def test_embedding_and_head_are_shared(target: CausalLM) -> None:
    model = load_mtp(MTP, config_of(), target, PLACEMENT)
    for head in model.heads:
        assert head.embed_tokens is target.embed_tokens
        assert head.lm_head is target.lm_head


def test_copies_of_embedding_and_head_are_shared(target: CausalLM, tmp_path: Path) -> None:
    """DeepSeek's checkpoints repeat embedding and head in the module; tensors of other layers belong to the target."""
    tensors = shipped()
    tensors["model.layers.8.embed_tokens.weight"] = target.embed_tokens.weight.clone()
    tensors["model.layers.9.shared_head.head.weight"] = target.lm_head.dense().clone()
    tensors["model.layers.3.mlp.up_proj.weight"] = torch.zeros(2, 2)
    tensors["model.embed_tokens.weight"] = torch.zeros(2, 2)
    path = checkpoint(tmp_path, tensors)
    for head in load_mtp(path, config_of(path), target, PLACEMENT).heads:
        assert head.embed_tokens is target.embed_tokens
        assert head.lm_head is target.lm_head


def test_a_module_uses_its_own_embedding_and_head_where_they_differ(target: CausalLM, tmp_path: Path) -> None:
    tensors = shipped()
    embedding, head = torch.randn(VOCAB, HIDDEN), torch.randn(VOCAB, HIDDEN)
    tensors["model.layers.8.embed_tokens.weight"] = embedding
    tensors["model.layers.9.shared_head.head.weight"] = head
    path = checkpoint(tmp_path, tensors)
    first, second, third = load_mtp(path, config_of(path), target, PLACEMENT).heads
    assert torch.equal(first.embed(torch.tensor([7]))[0], embedding[7])
    assert first.lm_head is target.lm_head
    assert second.embed_tokens is third.embed_tokens is target.embed_tokens
    assert torch.equal(second.lm_head.dense(), head)
    assert third.lm_head is target.lm_head


def test_a_module_with_its_own_embedding_does_not_fit_a_target_that_reads_images(
    target: CausalLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = checkpoint(
        tmp_path, {**shipped(), "model.layers.8.embed_tokens.weight": torch.randn(VOCAB, HIDDEN)}
    )
    config = config_of(path)
    vision: Any = object()
    monkeypatch.setattr(target, "config", replace(target.config, vision=vision))
    with pytest.raises(ModelError, match=r"layers\.8\.embed_tokens\.weight is not the target's embedding"):
        load_mtp(path, config, target, PLACEMENT)


def test_modules_of_another_width_have_their_own(target: CausalLM, tmp_path: Path) -> None:
    """Row D10: the first module reads the target's width, chained ones that of the modules, others the target's."""
    changes = {"hidden_size": 128, "num_attention_heads": 4, "head_dim": 64}
    for chain in (True, False):
        path = tmp_path / str(chain)
        path.mkdir()
        config = config_of(checkpoint(path, shipped(), **changes, mtp_chain=chain))
        passed = 128 if chain else HIDDEN
        assert (target_width(config), hidden_size_for(config)) == (HIDDEN, passed)
        assert draft_shape(config, 1, PLACEMENT).hidden == 2 * passed
        with pytest.raises(ModelError, match="missing tensors: model.layers.8.embed_tokens"):
            load_mtp(path, config, target, PLACEMENT)
        pieces = list(build_mtp(config, target, PLACEMENT).pieces())
        checkpoint(
            path, {piece.name: torch.randn(piece.whole) for piece in pieces}, **changes, mtp_chain=chain
        )
        model = load_mtp(path, config, target, PLACEMENT)
        assert [head.hnorm.weight.shape[0] for head in model.heads] == [HIDDEN, passed, passed]
        assert model.heads[0].embed(torch.tensor([7])).shape == (1, 128)
    one = checkpoint(tmp_path, shipped(), **changes, num_nextn_predict_layers=1)
    with pytest.raises(ModelError, match="hidden_size is 128, the target has 256"):
        config_of(one)


def test_modules_in_the_target_s_own_checkpoint(target: CausalLM, tmp_path: Path) -> None:
    """One directory is both model and draft, as published; each loader ignores the other's tensors."""
    tensors = {**load_file(TARGET / "model.safetensors"), **shipped()}
    path = checkpoint(tmp_path, tensors, architectures=["LlamaForCausalLM"])
    loaded, config = load_model(path)
    assert config.num_layers == target.config.num_layers
    for ours, theirs in zip(loaded.state_dict().values(), target.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs)
    wanted = load_mtp(MTP, config_of(), target, PLACEMENT)
    for one, two in zip(
        load_mtp(path, config_of(path), loaded, PLACEMENT).state_dict().values(), wanted.state_dict().values()
    ):
        assert torch.equal(one, two)
    with pytest.raises(ModelError, match=r"unexpected tensors: model.layers.10"):
        load_model(
            checkpoint(tmp_path, tensors, architectures=["LlamaForCausalLM"], num_nextn_predict_layers=None)
        )


def test_weights_that_do_not_fit(target: CausalLM, tmp_path: Path) -> None:
    tensors = shipped()
    narrow = {
        **tensors,
        "model.layers.9.eh_proj.weight": tensors["model.layers.9.eh_proj.weight"][:, :HIDDEN],
    }
    with pytest.raises(ModelError, match=r"wrongly shaped tensors: model.layers.9.eh_proj.weight"):
        load_mtp(checkpoint(tmp_path, narrow), config_of(), target, PLACEMENT)
    extra = {**tensors, "model.layers.8.mlp.experts.0.up_proj.weight": torch.zeros(2, 2)}
    with pytest.raises(ModelError, match=r"unexpected tensors: model.layers.8.mlp.experts"):
        load_mtp(checkpoint(tmp_path, extra), config_of(), target, PLACEMENT)
    missing = {name: value for name, value in tensors.items() if "layers.10." not in name}
    path = checkpoint(tmp_path, missing)
    with pytest.raises(ModelError, match=r"missing tensors: model.layers.10"):
        load_mtp(path, config_of(), target, PLACEMENT)
    load_mtp(path, config_of(steps=2), target, PLACEMENT)


def test_mimo_form(target: CausalLM, tmp_path: Path) -> None:
    """MiMo has other names, Qwen2's biases, reversed projection inputs, and no chain unless configured (D8)."""
    renamed = {"enorm": "token_layernorm", "hnorm": "hidden_layernorm", "shared_head.norm": "final_layernorm"}
    mimo: dict[str, torch.Tensor] = {}
    for name, tensor in shipped().items():
        _, _, layer, rest = name.split(".", 3)
        value = tensor
        if rest == "eh_proj.weight":
            rest, value = "input_proj.weight", tensor.roll(HIDDEN, dims=1)
        for ours, theirs in renamed.items():
            rest = rest.replace(ours, theirs)
        mimo[f"model.mtp_layers.{int(layer) - 8}.{rest}"] = value
        if rest.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")):
            mimo[f"model.mtp_layers.{int(layer) - 8}.{rest.replace('weight', 'bias')}"] = torch.zeros(
                len(value)
            )
    path = checkpoint(tmp_path, mimo, architectures=["MiMoForCausalLM"], mtp_chain=None)
    config = config_of(path)
    assert config.mtp is not None
    assert not config.mtp.chain
    model = load_mtp(path, config, target, PLACEMENT)
    wanted = module_logits(load_mtp(MTP, config_of(), target, PLACEMENT))
    for logits, known in zip(module_logits(model), wanted, strict=True):
        torch.testing.assert_close(logits, known, rtol=1e-4, atol=1e-4)
    hidden = torch.randn(1, HIDDEN)
    for loaded, chained in ((model, False), (load_mtp(MTP, config_of(), target, PLACEMENT), True)):
        output = loaded.heads[0](torch.tensor([3]), hidden, torch.tensor([0]), OneRow())
        assert torch.equal(output.hidden, output.last if chained else hidden)


def test_nodes_with_other_modules_do_not_match() -> None:
    """Steps and chain are part of what nodes compare before they transfer pages."""
    config = config_of()
    made = {draft_fingerprint(MTP, config_of(steps=steps), steps, 1) for steps in (1, 2, 3)}
    made.add(draft_fingerprint(MTP, config, 2, 1))
    assert len(made) == 4


def test_static_memory_of_draft_extend_has_the_width_of_the_target() -> None:
    """D7: buffers are [rows x window, target width], with the width functions' dtype; an idle batch has no rows."""
    config = config_of()
    extend = DraftExtendInput
    width, dtype = (
        extend.hidden_size_for(config),
        extend.dtype_for(Placement(torch.bfloat16, PLACEMENT.device)),
    )
    state = RoundState.allocate(9, 4, 4, PLACEMENT.device, width, dtype)
    assert (tuple(state.walk.hidden.shape), state.walk.hidden.dtype) == ((9, 4, HIDDEN), torch.bfloat16)
    assert tuple(state.walk.first(0).hidden.shape) == (0, 4, HIDDEN)


def test_three_kinds_of_draft() -> None:
    """D8: chained modules and modules that all read the target carry the same state; a language model carries none."""
    chain = config_of()
    assert chain.mtp is not None
    apart = replace(chain, mtp=replace(chain.mtp, chain=False))
    alone = load_draft_config(MODELS / "tiny-standalone", "standalone", ModelConfig.load(TARGET))
    shapes = [draft_shape(each, 1, PLACEMENT) for each in (chain, apart, alone)]
    assert shapes[0] == shapes[1]
    assert shapes[2] == DraftShape()
    assert (lookahead_for(alone), DraftExtendInput.hidden_size_for(alone)) == (0, 0)
    assert draft_fingerprint(MTP, chain, 3, 1) != draft_fingerprint(MTP, apart, 3, 1)
