"""Draft heads in the forms of public checkpoints, with random weights, and their logits by transformers' layers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor
from transformers import LlamaConfig, Qwen3Config
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP, LlamaRotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention

from common.checkpoint.draft_config import target_width
from common.checkpoint.model_config import ModelConfig
from common.engine.attention.paged import PagedAttention
from common.engine.forward.batch import ForwardBatch, ForwardMode
from common.engine.forward.draft_runner import load_eagle, load_eagle3
from common.engine.models.model_registry import build_model
from common.speculation.directory import load_draft_config
from tests.fakes.pools import plain_pool
from tests.fakes.tiny_model import PLACEMENT

VOCAB, HIDDEN, INNER, LAYERS, EPS = 96, 32, 48, 8, 1e-5
STEPS = 4
LAYER = "transformer_layer_config"  # where the speculators library has the layer's keys
TARGET: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": EPS,
    "torch_dtype": "float32",
}


@dataclass(frozen=True)
class Form:
    """One form of head.

    Args:
        config: what its config.json has over `TARGET`.
        first: name of the first layer.
        prefix: before every tensor's name.
    """

    config: Mapping[str, Any]
    first: str = "midlayer"
    prefix: str = ""
    eagle3: bool = True
    layers: int = 1
    head_dim: int = 8
    hidden: int = HIDDEN
    draft_vocab: int | None = 40
    own_embedding: bool = False
    own_head: bool = True
    qk_norm: bool = False
    bias: bool = False  # for queries, keys and values
    fc_bias: bool = False
    windows: tuple[int | None, ...] = (None,)
    states: int = 3
    fc_norms: tuple[str, ...] = ()  # names of the norms of equal parts of the target's states
    has_t2d: bool = True  # with a map to the target's ids, the file also has the opposite one
    input_norms: bool = True  # of EAGLE-1 layers after the first
    rope: Mapping[str, Any] = field(default_factory=dict)  # rope_parameters, if not the default

    @property
    def reads(self) -> int:
        return HIDDEN * (self.states if self.eagle3 else 1)

    @property
    def width(self) -> int:
        """Of the input of the first layer's attention."""
        return 2 * self.hidden if self.eagle3 else self.hidden


def tensors_of(form: Form, seed: int = 3) -> dict[str, Tensor]:
    """Return random tensors under the names of the form."""
    generator = torch.Generator().manual_seed(seed)
    made: dict[str, Tensor] = {}

    def add(name: str, *shape: int) -> None:
        value = torch.randn(shape, generator=generator) * 0.3
        made[f"{form.prefix}{name}"] = value + 1.0 if "norm" in name else value

    size, dim = form.hidden, form.head_dim
    add("fc.weight", size, form.reads if form.eagle3 else size + form.reads)
    if form.fc_bias:
        add("fc.bias", size)
    for norm in form.fc_norms:
        add(f"{norm}.weight", form.reads // len(form.fc_norms))
    for layer in range(form.layers):
        name = form.first if layer == 0 else f"layers.{layer}"
        width = form.width if layer == 0 else size
        for part, rows in (("q_proj", 4 * dim), ("k_proj", 2 * dim), ("v_proj", 2 * dim)):
            add(f"{name}.self_attn.{part}.weight", rows, width)
            if form.bias:
                add(f"{name}.self_attn.{part}.bias", rows)
        add(f"{name}.self_attn.o_proj.weight", size, 4 * dim)
        if form.qk_norm:
            add(f"{name}.self_attn.q_norm.weight", dim)
            add(f"{name}.self_attn.k_norm.weight", dim)
        for part, shape in (
            ("gate_proj", (INNER, size)),
            ("up_proj", (INNER, size)),
            ("down_proj", (size, INNER)),
        ):
            add(f"{name}.mlp.{part}.weight", *shape)
        norms = ["post_attention_layernorm"]
        norms += ["input_layernorm"] if form.eagle3 or (layer and form.input_norms) else []
        norms += ["hidden_norm"] if form.eagle3 and not layer else []
        for norm in norms:
            add(f"{name}.{norm}.weight", size)
    if form.eagle3:
        add("norm.weight", size)
        if form.own_head:
            add("lm_head.weight", form.draft_vocab or VOCAB, size)
    if form.own_embedding:
        add("embed_tokens.weight", VOCAB, size)
    if form.draft_vocab and form.eagle3:
        ids = torch.randperm(VOCAB, generator=generator)[: form.draft_vocab].sort().values
        made["d2t"] = ids - torch.arange(form.draft_vocab)
        made["t2d"] = torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, ids, True)
    return made


def write_head(form: Form, path: Path) -> Path:
    path.mkdir()
    base = {**TARGET, "num_hidden_layers": form.layers}
    config = {**base, **form.config}
    if LAYER in form.config:
        config = {**form.config, LAYER: {**base, **form.config[LAYER]}}
    (path / "config.json").write_text(json.dumps(config))
    tensors = {name: value.contiguous() for name, value in tensors_of(form).items()}
    if not form.has_t2d:
        tensors.pop("t2d", None)
    save_file(tensors, path / "model.safetensors")
    return path


def write_target(path: Path) -> Path:
    """Write the config of the target; its weights are random and not stored."""
    path.mkdir()
    (path / "config.json").write_text(json.dumps(TARGET))
    return path


@torch.inference_mode()
def compare_logits(form: Form, directory: Path, algorithm: str, length: int = 13) -> None:
    """Compare a loaded head with transformers' layers.

    Logits and passed states are compared at all positions of a text, and the tokens of some steps after it.
    """
    target_config = ModelConfig.load(write_target(directory / "target"))
    draft = load_draft_config(write_head(form, directory / "head"), algorithm, target_config)
    assert target_width(draft) == form.reads
    assert draft.model.sliding_windows == form.windows * form.layers
    target = build_model(target_config, PLACEMENT).eval()
    generator = torch.Generator().manual_seed(1)
    for parameter in target.parameters():
        parameter.normal_(std=0.3, generator=generator)
    load = load_eagle3 if form.eagle3 else load_eagle
    head = load(directory / "head", draft, target, PLACEMENT)
    ids = torch.randint(0, VOCAB, (length,), generator=generator)
    hidden = torch.randn(length, form.reads, generator=generator)
    ours, theirs = head.project(hidden), projected(form, hidden)
    for _ in range(STEPS):
        pool = plain_pool(form.layers, 2, form.head_dim, 64, 2, PLACEMENT.dtype, PLACEMENT.device)
        attention = PagedAttention(pool, draft.model.sliding_windows)
        attention.plan(whole_text(ids))
        output = head(ids, ours, torch.arange(len(ids)), attention)
        last, passed, logits = reference(
            form, ids, theirs, target.embed_tokens.weight, target.lm_head.dense()
        )
        found = head.compute_logits(output.last)
        for each, expected in ((output.last, last), (output.hidden, passed), (found, logits)):
            # Without a norm at its end, a head's states grow from step to step.
            tolerance = 1e-4 * max(1.0, float(expected.abs().max()))
            torch.testing.assert_close(each, expected, atol=tolerance, rtol=0)
        drafted = head.target_ids(found[-1:].argmax(-1))
        assert drafted.tolist() == [token_of(form, int(logits[-1].argmax()))]
        ids = torch.cat((ids, drafted))
        ours, theirs = torch.cat((ours, output.hidden[-1:])), torch.cat((theirs, passed[-1:]))


def token_of(form: Form, drafted: int) -> int:
    """Return the target's id of a token of the head's vocabulary."""
    offsets = tensors_of(form).get("d2t")
    return drafted if offsets is None else drafted + int(offsets[drafted])


def projected(form: Form, hidden: Tensor) -> Tensor:
    """Return what the first step reads of the target's states."""
    if not form.eagle3:
        return hidden
    named = {name.removeprefix(form.prefix): value for name, value in tensors_of(form).items()}
    if form.fc_norms:
        parts = zip(form.fc_norms, hidden.chunk(len(form.fc_norms), dim=-1), strict=True)
        hidden = torch.cat([_norm(part, named[f"{norm}.weight"]) for norm, part in parts], dim=-1)
    return F.linear(hidden, named["fc.weight"])


def reference(
    form: Form, ids: Tensor, states: Tensor, embedding: Tensor, lm_head: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return what the LM head reads, what the next step reads, and logits."""
    named = {name.removeprefix(form.prefix): value for name, value in tensors_of(form).items()}
    read = F.embedding(ids, named.get("embed_tokens.weight", embedding))
    x = states
    if not form.eagle3:
        x = F.linear(torch.cat((read, states), dim=-1), named["fc.weight"], named.get("fc.bias"))
    for layer in range(form.layers):
        name = form.first if layer == 0 else f"layers.{layer}"
        own = {
            key.removeprefix(f"{name}."): value for key, value in named.items() if key.startswith(f"{name}.")
        }
        given = x
        if form.eagle3 and layer == 0:
            given = torch.cat(
                (_norm(read, own["input_layernorm.weight"]), _norm(x, own["hidden_norm.weight"])), -1
            )
        elif "input_layernorm.weight" in own:
            given = _norm(x, own["input_layernorm.weight"])
        stream = x
        if layer == 0 and _is_on(form, "norm_before_residual"):
            stream = _norm(x, own["hidden_norm.weight"])
        x = stream + _attention(form, layer, own, given)
        mlp = LlamaMLP(_config(LlamaConfig, form, form.hidden))
        mlp.load_state_dict({key: own[f"mlp.{key}"] for key in mlp.state_dict()})
        x = x + mlp(_norm(x, own["post_attention_layernorm.weight"]))
    if not form.eagle3:
        return x, x, F.linear(x, lm_head)
    last = _norm(x, named["norm.weight"])
    return (
        last,
        last if _is_on(form, "norm_output", "return_hidden_post_norm") else x,
        F.linear(last, named.get("lm_head.weight", lm_head)),
    )


def _is_on(form: Form, *names: str) -> bool:
    switches = {**form.config, **form.config.get("eagle_config", {})}
    return any(switches.get(name) for name in names)


def _attention(form: Form, layer: int, own: Mapping[str, Tensor], x: Tensor) -> Tensor:
    config = _config(Qwen3Config if form.qk_norm else LlamaConfig, form, x.shape[1])
    made = (Qwen3Attention if form.qk_norm else LlamaAttention)(config, 0)
    made.o_proj = torch.nn.Linear(4 * form.head_dim, form.hidden, bias=False)
    made.load_state_dict({key: own[f"self_attn.{key}"] for key in made.state_dict()})
    index = torch.arange(len(x))
    seen = index[:, None] >= index
    window = (form.windows * form.layers)[layer]
    if window is not None:
        seen &= index[:, None] - index < window
    mask = torch.zeros(len(x), len(x)).masked_fill(~seen, float("-inf"))
    angles = LlamaRotaryEmbedding(config)(x[None], index[None])
    out: Tensor = made(x[None], position_embeddings=angles, attention_mask=mask[None, None])[0]
    return out[0]


def _config(kind: type[LlamaConfig] | type[Qwen3Config], form: Form, width: int) -> Any:
    rest = {key: value for key, value in TARGET.items() if key not in ("architectures", "torch_dtype")}
    rest |= {
        "hidden_size": width,
        "head_dim": form.head_dim,
        "attention_bias": form.bias,
        "hidden_act": "silu",
    }
    rest |= {"rope_parameters": {**form.rope}} if form.rope else {}
    return kind(**{**rest, "num_hidden_layers": 1, "attn_implementation": "eager"})


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, EPS)


def whole_text(ids: Tensor) -> ForwardBatch:
    """Return a text in one forward, in page 1 of 64 slots."""
    count = len(ids)
    return ForwardBatch(
        mode=ForwardMode.EXTEND,
        input_ids=ids,
        positions=torch.arange(count),
        kv_slots=torch.arange(count) + 64,
        page_table=torch.ones(1, 1, dtype=torch.int32),
        seq_lens=torch.tensor([count], dtype=torch.int32),
        query_start=torch.tensor([0, count], dtype=torch.int32),
        logits_rows=torch.arange(count),
        max_seq_len=count,
        query_lens_host=(count,),
        seq_lens_host=(count,),
    )


EAGLE3_KEYS = {"draft_vocab_size": 40, "norm_before_residual": False}
LLAMA_NAME = {"architectures": ["LlamaForCausalLM"]}
SPECULATORS: dict[str, Any] = {
    "architectures": ["Eagle3Speculator"],
    "speculators_model_type": "eagle3",
    "draft_vocab_size": 40,
    "norm_before_residual": True,
    "eagle_aux_hidden_state_layer_ids": [2, 4, 5],
}
_SHAPE = Form({})
FORMS: dict[str, Form] = {
    # yuhuili/EAGLE3-LLaMA3.1-Instruct-8B, converted
    "eagle3-named-llama": Form({**LLAMA_NAME, **EAGLE3_KEYS}),
    "eagle3-named-by-layers": replace(
        _SHAPE, config={**LLAMA_NAME, **EAGLE3_KEYS}, first="layers.0", prefix="model."
    ),
    # vllm#43132
    "eagle3-qk-norm": Form({"architectures": ["Eagle3Qwen3ForCausalLM"], **EAGLE3_KEYS}, qk_norm=True),
    "eagle3-window": Form(
        {
            "architectures": ["LlamaForCausalLMEagle3"],
            **EAGLE3_KEYS,
            "sliding_window": 4,
            "layer_types": ["sliding_attention"],
        },
        windows=(4,),
    ),
    "eagle3-head-80": Form(
        {"architectures": ["LlamaForCausalLMEagle3"], **EAGLE3_KEYS, "head_dim": 80}, head_dim=80
    ),
    "eagle3-head-112-narrow": Form(
        {
            "architectures": ["LlamaForCausalLMEagle3"],
            **EAGLE3_KEYS,
            "head_dim": 112,
            "hidden_size": 24,
            "target_hidden_size": HIDDEN,
            "norm_output": True,
        },
        head_dim=112,
        hidden=24,
        own_embedding=True,
    ),
    # DeepSpec: several layers, a full vocabulary without d2t
    "eagle3-full-vocabulary": Form(
        {
            "architectures": ["Qwen3Eagle3Model"],
            "aux_layer_convention": "output",
            "norm_before_residual": False,
        }
        | {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 3, 5, 7]}},
        first="layers.0",
        qk_norm=True,
        own_embedding=True,
        draft_vocab=None,
        states=5,
    ),
    # A config.json with the biases of a target, which the file of the head does not have
    "eagle3-without-biases-of-the-target": Form(
        {**LLAMA_NAME, **EAGLE3_KEYS, "attention_bias": True, "mlp_bias": True}
    ),
    # SpecForge, configs/gemma3-27b-eagle3.json: reuse_target_lm_head
    "eagle3-head-of-the-target": Form(
        {"architectures": ["LlamaForCausalLMEagle3"], **EAGLE3_KEYS, "draft_vocab_size": VOCAB},
        draft_vocab=None,
        own_head=False,
    ),
    "speculators-llama": Form(
        {**SPECULATORS, "transformer_layer_config": {"model_type": "llama", "head_dim": 16}},
        first="layers.0",
        own_embedding=True,
        head_dim=16,
    ),
    # vllm#47568
    "speculators-qwen3-window": Form(
        {
            **SPECULATORS,
            "transformer_layer_config": {
                "model_type": "qwen3",
                "head_dim": 16,
                "use_sliding_window": True,
                "sliding_window": 3,
                "layer_types": ["sliding_attention"],
            },
        },
        first="layers.0",
        head_dim=16,
        qk_norm=True,
        windows=(3,),
    ),
    # yuhuili/EAGLE-llama2-chat-7B and EAGLE-Qwen2-7B-Instruct
    "eagle-named-llama": Form(LLAMA_NAME, "layers.0", eagle3=False, fc_bias=True, own_embedding=True),
    "eagle-qwen2-biases": Form(
        {"architectures": ["Qwen2ForCausalLM"]}, "layers.0", eagle3=False, fc_bias=True, bias=True
    ),
    "eagle-two-layers": Form(
        {"architectures": ["LlamaForCausalLMEagle"]}, "layers.0", "model.", eagle3=False, layers=2
    ),
}
