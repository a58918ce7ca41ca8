"""Reads the config of a model directory as `ModelConfig`, without transformers and torch.

The router reads limits, eos ids and sampling defaults here; the engine reads shapes. No code of a checkpoint is
executed: `auto_map` is ignored, and an architecture that has no row in `families.py` is refused by name.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from common.checkpoint import model_files
from common.checkpoint.experts_config import (
    ExpertsConfig,
    parse_experts,
)
from common.checkpoint.families import FAMILIES, Family, LayerKind
from common.checkpoint.gated_delta_config import (
    LINEAR,
    GatedDeltaConfig,
    mixer_types,
    parse_gated_delta,
)
from common.checkpoint.generation_config import NO_DEFAULTS, DefaultSampling, default_sampling, eos_ids
from common.checkpoint.json_fields import (
    MAX_HEADS,
    MAX_LAYERS,
    MAX_POSITIONS,
    MAX_VOCAB,
    MAX_WIDTH,
    architecture_of,
    flag,
    is_finite,
    positive,
    shown,
    word,
)
from common.checkpoint.model_mistakes import explain_directory
from common.checkpoint.rope_config import RopeConfig, parse_rope, with_sections
from common.checkpoint.safetensors_header import read_header
from common.checkpoint.text_part import text_part
from common.checkpoint.vision_config import (
    ARCHITECTURES,
    VisionConfig,
    is_vision,
    language_part,
    parse_vision,
)
from common.checkpoint.weight_formats import DENSE, StoredWeights, stored_weights
from common.errors import ModelError

Raw = Mapping[str, Any]

EXPERTS = "experts"  # LayerKind.feed_forward of layers with experts
DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}  # tandem's name -> safetensors' name


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """One decoder: shapes, options of its layers, and the directory's settings for generation."""

    architecture: str
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope: RopeConfig
    tie_word_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    # [num_layers] number of keys visible to a query, including its own; None: all
    sliding_windows: tuple[int | None, ...]
    dtype: str  # of the checkpoint: a key of DTYPES
    eos_token_ids: tuple[int, ...] = ()
    default_sampling: DefaultSampling = NO_DEFAULTS
    vision: VisionConfig | None = None  # the vision part of a model that takes images; None: text only
    weights: StoredWeights = DENSE  # how the checkpoint stores its products
    layer_kinds: tuple[LayerKind, ...] = ()  # [num_layers]; (): attention and a dense feed-forward in each
    experts: ExpertsConfig | None = None  # of the layers whose feed-forward is "experts"
    gated_delta: GatedDeltaConfig | None = None  # of the layers whose mixer is one; None: there is none
    norm_offset: bool = False  # norms multiply by 1 + weight, in float32
    output_gate: bool = False  # attention's output is multiplied by sigmoid of a gate from q_proj
    text_part: bool = False  # other parts of the checkpoint are not loaded

    def kind_of(self, layer: int) -> LayerKind:
        """Return the blocks of one layer."""
        return self.layer_kinds[layer] if self.layer_kinds else LayerKind()

    @classmethod
    def load(cls, path: str | Path) -> ModelConfig:
        """Read config.json and generation_config.json. Raises ModelError with what is not supported."""
        directory = Path(path)
        if not directory.is_dir():
            raise ModelError(f"{directory} is not a model directory")
        file = directory / "config.json"
        if not os.path.lexists(file):
            raise ModelError(f"{directory} {explain_directory(directory)}")
        raw = model_files.read_json(file)
        generation_file = directory / "generation_config.json"
        generation = model_files.read_json(generation_file) if generation_file.is_file() else {}
        return _parse(raw, generation, directory)

    @classmethod
    def parse(cls, raw: Raw, directory: Path) -> ModelConfig:
        """Read the given content of config.json of `directory`, which the caller may have changed."""
        return _parse(raw, {}, directory)


def model_fingerprint(path: str | Path) -> str:
    """Return the sha256 (hex) that nodes compare before they exchange KV pages; reads headers, not weights.

    It covers every field that changes KV values (not eos ids or sampling defaults), the names, shapes, dtypes and
    offsets of all tensors, file sizes, and a sample of every tensor's bytes.
    """
    config = ModelConfig.load(path)
    skip = ("eos_token_ids", "default_sampling")
    facts = {f.name: getattr(config, f.name) for f in fields(config) if f.name not in skip}
    return model_files.fingerprint(Path(path), repr(facts))


def _parse(raw: Raw, generation: Raw, directory: Path) -> ModelConfig:
    where = str(directory / "config.json")
    if is_vision(raw):
        language, sections = language_part(raw, where)
        config = _parse(language, generation, directory)
        return replace(
            config,
            rope=with_sections(config.rope, sections, config.head_dim, where),
            vision=parse_vision(raw, directory),
        )
    architecture, family = _family(raw, where)
    if family.text_part:
        raw = text_part(raw, where)
    weights = stored_weights(raw, where)
    activation = raw.get("hidden_act", "silu")
    if activation != "silu":
        raise ModelError(f"{where}: hidden_act {shown(activation)} is not supported; supported is silu")
    hidden = positive(raw, "hidden_size", where, most=MAX_WIDTH)
    heads = positive(raw, "num_attention_heads", where, most=MAX_HEADS)
    kv_heads = positive(raw, "num_key_value_heads", where, heads, MAX_HEADS)
    head_dim = positive(raw, "head_dim", where, family.head_dim or hidden // heads, MAX_WIDTH)
    if heads % kv_heads:
        raise ModelError(
            f"{where}: {heads} attention heads cannot share {kv_heads} key-value heads evenly (num_key_value_heads)"
        )
    if head_dim % 2:
        raise ModelError(f"{where}: head_dim {head_dim} is odd; rotary embedding needs an even one")
    if heads * head_dim > MAX_WIDTH:
        raise ModelError(
            f"{where}: num_attention_heads {heads} of head_dim {head_dim} are more than the {MAX_WIDTH} values "
            "of one token that are supported"
        )
    num_layers = positive(raw, "num_hidden_layers", where, most=MAX_LAYERS)
    max_positions = positive(raw, "max_position_embeddings", where, most=MAX_POSITIONS)
    vocab = positive(raw, "vocab_size", where, most=MAX_VOCAB)
    kinds = () if family.layer_kinds is None else family.layer_kinds(raw, num_layers, where)
    delta = None
    if family.gated_delta is not None:
        delta = parse_gated_delta(raw, where, family.gated_delta)
        types = mixer_types(raw, num_layers, where)
        kinds = tuple(LayerKind("gated_delta" if each == LINEAR else "attention") for each in types)
    eps = raw.get("rms_norm_eps", 1e-6)
    if not is_finite(eps) or not 0 < eps < 1:
        raise ModelError(f"{where}: rms_norm_eps must be a small positive number, found {shown(eps)}")
    experts, inner = None, None
    if family.experts is not None:
        experts, has_experts = parse_experts(raw, family.experts, num_layers, where)
        kinds = _with_experts(kinds or (LayerKind(),) * num_layers, has_experts)
        # A model whose layers all have experts may leave out the width of dense ones.
        inner = experts.inner
    return ModelConfig(
        architecture=architecture,
        hidden_size=hidden,
        num_layers=num_layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=positive(raw, "intermediate_size", where, inner, MAX_WIDTH),
        vocab_size=vocab,
        max_position_embeddings=max_positions,
        rms_norm_eps=float(eps),
        rope=_rope(raw, family, max_positions, head_dim, where),
        tie_word_embeddings=flag(raw, "tie_word_embeddings", where),
        qkv_bias=_option(raw, family.qkv_bias, where),
        output_bias=_option(raw, family.output_bias, where),
        mlp_bias=_option(raw, family.mlp_bias, where),
        qk_norm=_option(raw, family.qk_norm, where),
        sliding_windows=_windows(raw, family, num_layers, where),
        dtype=_dtype(raw, directory, where),
        eos_token_ids=eos_ids(raw, generation, vocab, where),
        default_sampling=default_sampling(generation, str(directory / "generation_config.json")),
        weights=weights,
        layer_kinds=kinds,
        experts=experts,
        gated_delta=delta,
        norm_offset=family.norm_offset,
        output_gate=family.output_gate,
        text_part=family.text_part,
    )


def _family(raw: Raw, where: str) -> tuple[str, Family]:
    name = architecture_of(raw)
    if name is None or name not in FAMILIES:
        said = f"architecture {name}" if name else "a config without architectures"
        known = ", ".join((*FAMILIES, *ARCHITECTURES))
        raise ModelError(f"{where}: {said[:200]} is not supported; supported are {known}")
    return name, FAMILIES[name]


def _with_experts(kinds: Sequence[LayerKind], has_experts: Sequence[bool]) -> tuple[LayerKind, ...]:
    return tuple(
        replace(kind, feed_forward=EXPERTS) if has else kind
        for kind, has in zip(kinds, has_experts, strict=True)
    )


def _option(raw: Raw, option: bool | str, where: str) -> bool:
    return option if isinstance(option, bool) else flag(raw, option, where)


def _rope(raw: Raw, family: Family, max_positions: int, head_dim: int, where: str) -> RopeConfig:
    rope = parse_rope(raw, max_positions, where, family.partial_rotary)
    dims = rope.rotated_dims(head_dim)
    if dims < 2 or dims % 2:
        raise ModelError(
            f"{where}: partial_rotary_factor {rope.partial} rotates {dims} of {head_dim} dimensions of a head; an even "
            "number is needed"
        )
    return rope


def _windows(raw: Raw, family: Family, num_layers: int, where: str) -> tuple[int | None, ...]:
    full = (None,) * num_layers
    if family.window is None:
        return full
    value = raw.get("sliding_window", family.window or None)
    switched = family.window_switch or family.windows_by_layer
    if value is None or (switched and not flag(raw, "use_sliding_window", where)):
        return full
    window = positive({"sliding_window": value}, "sliding_window", where)
    if not family.windows_by_layer:
        return (window,) * num_layers
    types = raw.get("layer_types")
    if types is None:
        first = raw.get("max_window_layers", 28)
        if type(first) is not int or first < 0:
            raise ModelError(f"{where}: max_window_layers must be a number of layers, found {shown(first)}")
        return tuple(window if layer >= first else None for layer in range(num_layers))
    known = {"sliding_attention": window, "full_attention": None}
    if (
        not isinstance(types, list)
        or len(types) != num_layers
        or not all(isinstance(kind, str) and kind in known for kind in types)
    ):
        raise ModelError(f"{where}: layer_types must name {', '.join(known)} for each of {num_layers} layers")
    return tuple(known[kind] for kind in types)


def _dtype(raw: Raw, directory: Path, where: str) -> str:
    key = "dtype" if raw.get("dtype") else "torch_dtype"
    value = raw.get(key)
    if not value:  # old checkpoints have no dtype: use that of the first floating-point tensor
        ours = {theirs: name for name, theirs in DTYPES.items()}
        header = read_header(model_files.weight_paths(directory)[0])
        value = next((ours[e.dtype] for e in header.tensors.values() if e.dtype in ours), "float32")
    name = word({key: value}, key, where, "").removeprefix("torch.")
    if name not in DTYPES:
        raise ModelError(f"{where}: dtype {name[:80]} is not supported; supported are {', '.join(DTYPES)}")
    return name
