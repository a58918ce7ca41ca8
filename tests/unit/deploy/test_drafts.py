"""The checked-in drafts: formats, sizes, vocabulary maps, and the accept lengths on their cards."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import AutoTokenizer, LlamaForCausalLM

from deploy.tiny_models.drafts import files, reference
from deploy.tiny_models.drafts.features import TARGET, load_target
from deploy.tiny_models.drafts.measure import Answered, greedy_answers, proposals, rounds_of, suites
from deploy.tiny_models.drafts.oracle import accept_length, ok_matrix, walk
from deploy.tiny_models.drafts.shapes import AUX_LAYERS, DIRECTORIES, KINDS, Kind, draft_config

pytestmark = pytest.mark.usefixtures("one_thread")

ROOT = TARGET.parent
H, KV, V = 256, 128, 704


def directory(kind: Kind) -> Path:
    return ROOT / DIRECTORIES[kind]


def tensors(kind: Kind) -> dict[str, torch.Tensor]:
    loaded: dict[str, torch.Tensor] = load_file(directory(kind) / "model.safetensors")
    return loaded


def config(kind: Kind) -> dict[str, Any]:
    return files.load_config(directory(kind))


@cache
def target() -> LlamaForCausalLM:
    return load_target()


@cache
def answered(suite: int) -> tuple[Answered, ...]:
    """Return four held-out prompts with the target's greedy text, all in one batch."""
    tokenizer = Tokenizer.from_file(str(TARGET / "tokenizer.json"))
    return tuple(greedy_answers(target(), tokenizer, suites(4)[suite]))


def layer_shapes(prefix: str, inputs: int, intermediate: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{prefix}self_attn.q_proj.weight": (H, inputs),
        f"{prefix}self_attn.k_proj.weight": (KV, inputs),
        f"{prefix}self_attn.v_proj.weight": (KV, inputs),
        f"{prefix}self_attn.o_proj.weight": (H, H),
        f"{prefix}mlp.gate_proj.weight": (intermediate, H),
        f"{prefix}mlp.up_proj.weight": (intermediate, H),
        f"{prefix}mlp.down_proj.weight": (H, intermediate),
        f"{prefix}post_attention_layernorm.weight": (H,),
    }


def published_shapes(kind: Kind) -> dict[str, tuple[int, ...]]:
    if kind == "eagle":
        return {"fc.weight": (H, 2 * H), **layer_shapes("layers.0.", H, 416)}
    if kind == "eagle3":
        return {
            "fc.weight": (H, 3 * H),
            **layer_shapes("midlayer.", 2 * H, 320),
            "midlayer.input_layernorm.weight": (H,),
            "midlayer.hidden_norm.weight": (H,),
            "norm.weight": (H,),
            "lm_head.weight": (256, H),
            "d2t": (256,),
            "t2d": (V,),
        }
    shapes: dict[str, tuple[int, ...]] = {}
    for layer in (8, 9, 10):
        prefix = f"model.layers.{layer}."
        shapes |= layer_shapes(prefix, H, 320)
        shapes |= {f"{prefix}{name}.weight": (H,) for name in ("enorm", "hnorm", "shared_head.norm")}
        shapes |= {f"{prefix}input_layernorm.weight": (H,), f"{prefix}eh_proj.weight": (H, 2 * H)}
    return shapes


@pytest.mark.parametrize("kind", ["eagle3", "eagle", "mtp"])
def test_tensors_have_their_published_names_and_shapes(kind: Kind) -> None:
    assert {name: tuple(value.shape) for name, value in tensors(kind).items()} == published_shapes(kind)


@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_bf16_and_finite(kind: Kind) -> None:
    for name, value in tensors(kind).items():
        assert value.dtype == {"d2t": torch.int64, "t2d": torch.bool}.get(name, torch.bfloat16), name
        assert value.isfinite().all(), name


def test_the_directories_are_small() -> None:
    found = [path for kind in KINDS for path in directory(kind).iterdir()]
    assert sum(path.stat().st_size for path in found) < 8_000_000, "all four together"
    assert max(path.stat().st_size for path in found) < files.MAX_FILE_BYTES


@pytest.mark.parametrize("kind", KINDS)
def test_configs_are_what_the_program_writes(kind: Kind) -> None:
    assert config(kind) == draft_config(kind, files.load_config(TARGET))


def test_configs_carry_the_keys_that_loaders_look_for() -> None:
    eagle3 = config("eagle3")
    assert eagle3["architectures"] == ["LlamaForCausalLMEagle3"]
    assert eagle3["eagle_config"] == {
        "eagle_aux_hidden_state_layer_ids": list(AUX_LAYERS),
        "use_aux_hidden_state": True,
    }
    assert (eagle3["aux_layer_convention"], eagle3["draft_vocab_size"]) == ("boundary", 256)
    assert (eagle3["num_hidden_layers"], eagle3["target_hidden_size"]) == (1, H)
    assert config("eagle")["architectures"] == ["EagleLlamaForCausalLM"]
    assert (config("mtp")["num_hidden_layers"], config("mtp")["num_nextn_predict_layers"]) == (8, 3)
    assert {config(kind)["vocab_size"] for kind in KINDS} == {V}


def test_the_draft_vocabulary_maps_agree() -> None:
    weights = tensors("eagle3")
    drafted = torch.arange(256) + weights["d2t"]
    assert (drafted.diff() > 0).all()
    assert torch.equal(weights["t2d"].nonzero().flatten(), drafted)
    tokenizer = Tokenizer.from_file(str(TARGET / "tokenizer.json"))
    answer = tokenizer.encode(" 0 1 2 3 4 5 6 7 8 9 + - * / = #### 1\n<|end|>", add_special_tokens=False).ids
    assert weights["t2d"][answer].all()


def test_the_standalone_draft_is_a_model_of_its_own() -> None:
    model = LlamaForCausalLM.from_pretrained(directory("standalone"))
    assert (model.config.hidden_size, model.config.num_hidden_layers) == (128, 2)
    assert model.dtype == torch.bfloat16
    text = "Anna has 3 apples"
    ids = AutoTokenizer.from_pretrained(directory("standalone"))(text).input_ids
    assert ids == AutoTokenizer.from_pretrained(TARGET)(text).input_ids


def card_lengths(kind: Kind) -> dict[tuple[str, int], tuple[float, float]]:
    """Return (suite, steps) -> (accept length, largest possible one) from the model card."""
    text = (directory(kind) / "README.md").read_text()
    rows = re.findall(r"^\| ([^|]+?) \| \d+ \| (\d+) \| ([\d.]+) \| ([\d.]+) \|", text, re.MULTILINE)
    return {(suite, int(steps)): (float(length), float(most)) for suite, steps, length, most in rows}


@pytest.mark.parametrize("kind", KINDS)
def test_cards_state_accept_lengths(kind: Kind) -> None:
    lengths = card_lengths(kind)
    steps = {3} if kind == "mtp" else {3, 5}
    names = {"chat", "8-shot document", "broken-off question"}
    assert set(lengths) == {(name, some) for name in names for some in steps}
    assert all(1.0 <= length <= most <= steps + 1 for (_, steps), (length, most) in lengths.items())
    assert min(length for (name, _), (length, _) in lengths.items() if name != "broken-off question") > 3.5


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("suite", "tolerance"), [(0, 0.2), (2, 0.6)])
def test_drafts_reach_the_accept_length_of_their_card(kind: Kind, suite: int, tolerance: float) -> None:
    _, head = files.load_head(directory(kind))
    length = accept_length(rounds_of(head, target(), list(answered(suite)), 3))
    assert length == pytest.approx(card_lengths(kind)[suites(4)[suite].name, 3][0], abs=tolerance)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("suite", [0, 2])
def test_the_reference_loop_accepts_as_many_drafts_as_the_oracle(kind: Kind, suite: int) -> None:
    """Two independent methods agree: a loop token by token without cache, and an unroll of the whole text."""
    one = answered(suite)[-1]
    ids, steps = torch.tensor(one.ids), 3
    draft = reference.load(directory(kind), target())
    _, head = files.load_head(directory(kind))
    rounds = walk(ok_matrix(proposals(head, target(), ids[None], steps)[0], ids), one.prompt_tokens)
    for some in rounds[:4]:
        known, to_come = one.ids[: some.at + 2], one.ids[some.at + 2 :]
        path = draft.propose(known, steps)
        accepted = 0
        while accepted < min(steps, len(to_come)) and path[accepted] == to_come[accepted]:
            accepted += 1
        assert accepted == some.accepted


@pytest.mark.parametrize("kind", KINDS)
def test_the_reference_gives_the_logits_of_the_unroll(kind: Kind) -> None:
    """Every step agrees on unrelated text, where drafts are rejected; each is fed the true tokens."""
    ids = torch.randint(7, V, (24,), generator=torch.Generator().manual_seed(5))
    draft = reference.load(directory(kind), target())
    _, head = files.load_head(directory(kind))
    proposed = proposals(head, target(), ids[None], 3)[0]
    for at in (0, 9, 18):
        for step in range(3):
            logits = draft.logits_after(ids[: at + 2].tolist(), ids[at + 2 : at + 2 + step].tolist())
            best = int(logits.argmax())
            assert logits[best] - logits[proposed[step, at]] < 1e-3, (at, step)
            assert logits.shape == (V,)
            assert int(logits.isfinite().sum()) == (256 if kind == "eagle3" else V)


def test_mtp_has_no_more_steps_than_modules() -> None:
    with pytest.raises(ValueError, match="3 MTP modules"):
        reference.load(directory("mtp"), target()).logits_after([1, 2, 3], [4, 5, 6])


def test_an_unknown_architecture_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["GPT2LMHeadModel"]}))
    with pytest.raises(ValueError, match="GPT2LMHeadModel"):
        files.load_head(tmp_path)
