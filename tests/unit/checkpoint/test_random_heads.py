"""Random draft heads in the forms in which libraries publish them: drafts equal those of transformers' layers."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fakes.published_heads import HIDDEN, VOCAB, Form, compare_logits

ROPES: tuple[tuple[dict[str, Any], dict[str, Any]], ...] = (
    ({}, {}),
    ({"rope_theta": 500.0}, {"rope_type": "default", "rope_theta": 500.0}),
    (
        {"rope_theta": 500.0, "rope_scaling": {"type": "linear", "factor": 2.0}},
        {"rope_type": "linear", "rope_theta": 500.0, "factor": 2.0},
    ),
    (
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0}},
        {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0},
    ),
)
LLAMA, NAMED = "LlamaForCausalLM", "LlamaForCausalLMEagle3"


@st.composite
def eagle3(draw: st.DrawFn) -> Form:
    """Draw a head as SpecForge, NVIDIA, speculators or the authors of EAGLE-3 publish it."""
    speculators = draw(st.booleans(), label="speculators")
    layers = draw(st.sampled_from([1, 1, 2]), label="layers")
    dim = draw(st.sampled_from([8, 16, 24]), label="head_dim")
    hidden = draw(st.sampled_from([HIDDEN, HIDDEN, 24]), label="hidden_size")
    vocab = draw(st.sampled_from([None, VOCAB, 1, 40, VOCAB - 1]), label="draft_vocab_size")
    reduced = vocab is not None and vocab < VOCAB
    shared = hidden == HIDDEN
    own_head = reduced or not shared or draw(st.booleans(), label="lm_head")
    window = draw(st.sampled_from([None, None, 3]), label="sliding_window")
    states = draw(st.sampled_from([1, 3, 5]), label="states")
    apart = draw(st.sampled_from([None, "fc_norm", "norm_before_fc"]), label="norms of states")
    norms = {"fc_norm": tuple(f"fc_norm.{i}" for i in range(states)), "norm_before_fc": ("input_norm",)}
    if apart == "fc_norm" and states == 3 and draw(st.booleans(), label="older names"):
        norms["fc_norm"] = ("aux_norm_low", "aux_norm_mid", "aux_norm_high")
    old_rope, rope = draw(st.sampled_from(ROPES), label="rope")
    switches: dict[str, Any] = {"norm_before_residual": draw(st.booleans(), label="norm_before_residual")}
    if draw(st.booleans(), label="norm_output"):
        switches[draw(st.sampled_from(["norm_output", "return_hidden_post_norm"]))] = True
    if apart is not None:
        switches[apart] = True
    ids = {"eagle_aux_hidden_state_layer_ids": [[3], [2, 4, 5], [0, 2, 3, 5, 7]][states // 2]}
    layer: dict[str, Any] = {"head_dim": dim, "hidden_size": hidden, **old_rope}
    if window is not None:
        layer |= {"sliding_window": window, "layer_types": ["sliding_attention"] * layers}
    config: dict[str, Any] = {"target_hidden_size": HIDDEN} if hidden != HIDDEN else {}
    config |= {} if vocab is None else {"draft_vocab_size": vocab}
    if speculators:
        config |= {"architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3"}
        config |= {"transformer_layer_config": {"model_type": "qwen3", "num_hidden_layers": layers, **layer}}
        config |= ids | switches
    else:
        names = (NAMED, LLAMA, "Eagle3Qwen3ForCausalLM", "Qwen3ForCausalLM")
        config |= {"architectures": [draw(st.sampled_from(names), label="architecture")], **layer}
        if draw(st.booleans(), label="eagle_config"):
            config["eagle_config"] = ids | switches
        else:
            config |= ids | switches
    return Form(
        config,
        first=draw(st.sampled_from(["midlayer", "layers.0"]), label="first"),
        prefix=draw(st.sampled_from(["", "model."]), label="prefix"),
        layers=layers,
        head_dim=dim,
        hidden=hidden,
        draft_vocab=vocab if reduced else draw(st.sampled_from([None, VOCAB])) if vocab else None,
        own_embedding=not shared or draw(st.booleans(), label="embed_tokens"),
        own_head=own_head,
        qk_norm=draw(st.booleans(), label="qk_norm"),
        bias=draw(st.booleans(), label="bias"),
        windows=(window,),
        states=states,
        has_t2d=draw(st.booleans(), label="t2d"),
        fc_norms=() if apart is None else norms[apart],
        rope=rope,
    )


@st.composite
def eagle(draw: st.DrawFn) -> Form:
    """Draw a head as the authors of EAGLE-1 and EAGLE-2 publish it, for Llama and Qwen2."""
    layers = draw(st.sampled_from([1, 1, 2, 3]), label="layers")
    dim = draw(st.sampled_from([8, 16]), label="head_dim")
    window = draw(st.sampled_from([None, 3]), label="sliding_window")
    names = (LLAMA, "Qwen2ForCausalLM", "EagleLlamaForCausalLM", "LlamaForCausalLMEagle")
    old_rope, rope = draw(st.sampled_from(ROPES), label="rope")
    config: dict[str, Any] = {
        "architectures": [draw(st.sampled_from(names), label="architecture")],
        **old_rope,
    }
    # The key `bias` is that of the projection, attention_bias of the target that was copied.
    config |= {"head_dim": dim, "bias": draw(st.booleans()), "attention_bias": draw(st.booleans())}
    if window is not None:
        config |= {"sliding_window": window}
    return Form(
        config,
        "layers.0",
        prefix=draw(st.sampled_from(["", "model."]), label="prefix"),
        eagle3=False,
        layers=layers,
        head_dim=dim,
        draft_vocab=None,
        own_embedding=draw(st.booleans(), label="embed_tokens"),
        bias=draw(st.booleans(), label="bias"),
        fc_bias=draw(st.booleans(), label="fc_bias"),
        windows=(window,),
        input_norms=draw(st.booleans(), label="input_layernorm"),
        rope=rope,
    )


@pytest.mark.parametrize(("algorithm", "forms"), [("eagle", eagle()), ("eagle3", eagle3())])
@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_drafts_equal_those_of_transformers_layers(
    algorithm: str, forms: st.SearchStrategy[Form], data: st.DataObject
) -> None:
    form = data.draw(forms, label="form")
    with tempfile.TemporaryDirectory() as directory:
        compare_logits(form, Path(directory), algorithm, 7)
