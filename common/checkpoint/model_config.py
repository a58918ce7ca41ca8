"""Reads the config of a model directory as `ModelConfig`, without transformers and torch.

The router reads limits, eos ids and sampling defaults here; the engine reads shapes. No code of a checkpoint is
executed: `auto_map` is ignored, and an architecture that has no row in `families.py` is refused by name.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Literal

from common.checkpoint import model_files
from common.checkpoint.experts_config import ExpertsConfig, parse_experts
from common.checkpoint.families import FAMILIES, Family, LayerKind
from common.checkpoint.fp8_weights import ONLINE
from common.checkpoint.gated_delta_config import LINEAR, GatedDeltaConfig, mixer_types, parse_gated_delta
from common.checkpoint.generation_config import NO_DEFAULTS, DefaultSampling, default_sampling, eos_ids
from common.checkpoint.json_fields import (
    MAX_HEADS,
    MAX_LAYERS,
    MAX_POSITIONS,
    MAX_VOCAB,
    MAX_WIDTH,
    Raw,
    architecture_of,
    flag,
    is_finite,
    optional_section,
    positive,
    shown,
    word,
)
from common.checkpoint.layer_norms import PRE_NORM, LayerNorms
from common.checkpoint.layer_windows import windows_by_type, windows_every, windows_from
from common.checkpoint.model_mistakes import explain_directory, explain_missing
from common.checkpoint.modelopt import with_modelopt_file
from common.checkpoint.rope_config import (
    LONGROPE,
    RopeConfig,
    by_layer_type,
    parse_rope,
    stretched_positions,
    with_sections,
)
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
from common.errors import ConfigError, ModelError

EXPERTS = "experts"  # LayerKind.feed_forward of layers with experts
Activation = Literal["silu", "gelu_tanh"]
# transformers' name -> tandem's
ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
}
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
    dtype: str  # the checkpoint's: a key of DTYPES
    eos_token_ids: tuple[int, ...] = ()
    default_sampling: DefaultSampling = NO_DEFAULTS
    vision: VisionConfig | None = None  # the vision part of a model that takes images; None: text only
    weights: StoredWeights = DENSE  # how the checkpoint stores its products
    layer_kinds: tuple[LayerKind, ...] = ()  # [num_layers]; (): attention and a dense feed-forward in each
    experts: ExpertsConfig | None = None  # for layers whose feed-forward is "experts"
    gated_delta: GatedDeltaConfig | None = None  # for layers with such a mixer; None: there are none
    qk_norm_whole: bool = False  # q_norm and k_norm cover all heads of a token together
    layer_norms: LayerNorms = PRE_NORM
    norm_float32: bool = False  # norms multiply by their weight in float32
    norm_offset: bool = False  # norms multiply by 1 + weight, in float32
    activation: Activation = "silu"  # applied to gates
    embedding_scale: float = 1.0
    attention_scale: float | None = None  # factor for scores; None: head_dim^-1/2
    value_scale: float = 1.0  # factor for attention's output
    fused: bool = False  # one tensor for q, k and v projections, one for gate and up projections
    window_rope: RopeConfig | None = None  # for layers with a window; None: as all layers
    output_gate: bool = False  # attention's output is multiplied by sigmoid of a gate from q_proj
    text_part: bool = False  # other parts of the checkpoint are not loaded

    def kind_of(self, layer: int) -> LayerKind:
        """Return the blocks of one layer."""
        return self.layer_kinds[layer] if self.layer_kinds else LayerKind()

    def for_length(self, max_tokens: int | None) -> ModelConfig:
        """Return the config for a server whose requests have at most this many tokens; None: as many as the model's."""
        length = self.max_position_embeddings if max_tokens is None else max_tokens
        return replace(self, rope=self.rope.for_length(length))

    def quantized(self, quantization: str, key: str = "model.quantization") -> ModelConfig:
        """Return the config for weights that are quantised while they are loaded ("fp8"), or as stored ("none").

        Raises ConfigError, which names `key`, if the checkpoint is quantised already.
        """
        if quantization == "none":
            return self
        if self.weights != DENSE:
            raise ConfigError(
                key,
                f"{quantization} is for dense checkpoints; this one has {self.weights.describe()}: leave it out",
            )
        return replace(self, weights=ONLINE)

    @classmethod
    def load(cls, path: str | Path) -> ModelConfig:
        """Read config.json and generation_config.json. Raises ModelError with what is not supported."""
        directory = Path(path)
        if not directory.is_dir():
            raise ModelError(f"{directory} {explain_missing(directory)}")
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


def model_fingerprint(path: str | Path, max_tokens: int | None = None, quantization: str = "none") -> str:
    """Return the sha256 (hex) that nodes compare before they exchange KV pages; reads headers, not weights.

    It covers every field that changes KV values (not eos ids or sampling defaults), the names, shapes, dtypes and
    offsets of all tensors, file sizes, and a sample of every tensor's bytes. `max_tokens` is as for `for_length`,
    `quantization` as for `quantized`.
    """
    config = ModelConfig.load(path).for_length(max_tokens).quantized(quantization)
    skip = ("eos_token_ids", "default_sampling")
    facts = {f.name: getattr(config, f.name) for f in fields(config) if f.name not in skip}
    return model_files.fingerprint(Path(path), repr(facts))


def _parse(raw: Raw, generation: Raw, directory: Path) -> ModelConfig:
    where = str(directory / "config.json")
    if is_vision(raw, directory):
        language, sections, interleaved = language_part(raw, where)
        config = _parse(language, generation, directory)
        return replace(
            config,
            rope=with_sections(config.rope, sections, config.head_dim, where, interleaved),
            vision=parse_vision(raw, directory),
        )
    architecture, family = _family(raw, where)
    if family.text_part:
        raw = text_part(raw, where)
    raw = {**raw, **{key: value for key, value in family.defaults.items() if raw.get(key) is None}}
    _refuse(raw, family, where)
    weights = stored_weights(with_modelopt_file(raw, directory), where)
    hidden = positive(raw, "hidden_size", where, most=MAX_WIDTH)
    heads, kv_heads, head_dim = _heads(raw, family, hidden, where)
    num_layers = positive(raw, "num_hidden_layers", where, most=MAX_LAYERS)
    max_positions = positive(raw, "max_position_embeddings", where, most=MAX_POSITIONS)
    vocab = positive(raw, "vocab_size", where, most=MAX_VOCAB)
    kinds, delta = _mixers(raw, family, num_layers, where)
    eps = _epsilon(raw, where)
    experts, inner = None, None
    if family.experts is not None:
        experts, has_experts = parse_experts(raw, family.experts, num_layers, where)
        kinds = _with_experts(kinds or (LayerKind(),) * num_layers, has_experts)
        # A model whose layers all have experts may leave out the width of dense ones.
        inner = experts.inner
    rope, window_rope = _ropes(raw, family, max_positions, head_dim, where)
    windows = _windows(raw, family, num_layers, where)
    return ModelConfig(
        architecture=architecture,
        hidden_size=hidden,
        num_layers=num_layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=positive(raw, "intermediate_size", where, inner, MAX_WIDTH),
        vocab_size=vocab,
        max_position_embeddings=_positions(
            raw, max(max_positions, stretched_positions(raw, rope, where)), where
        ),
        rms_norm_eps=eps,
        rope=rope,
        tie_word_embeddings=flag(raw, "tie_word_embeddings", where),
        qkv_bias=_option(raw, family.qkv_bias, where),
        output_bias=_option(raw, family.output_bias, where),
        mlp_bias=_option(raw, family.mlp_bias, where),
        qk_norm=_option(raw, family.qk_norm, where),
        sliding_windows=windows,
        dtype=_dtype(raw, directory, where),
        eos_token_ids=eos_ids(raw, generation, vocab, directory, family.eos),
        default_sampling=default_sampling(generation, str(directory / "generation_config.json")),
        weights=weights,
        layer_kinds=kinds,
        experts=experts,
        gated_delta=delta,
        qk_norm_whole=family.qk_norm_whole,
        layer_norms=family.layer_norms,
        norm_float32=family.norm_float32 or family.norm_offset,
        norm_offset=family.norm_offset,
        activation=_activation(raw, family, where),
        embedding_scale=hidden**0.5 if family.embedding_scale else 1.0,
        attention_scale=_attention_scale(raw, family, where),
        fused=family.fused,
        window_rope=window_rope,
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


def _heads(raw: Raw, family: Family, hidden: int, where: str) -> tuple[int, int, int]:
    """Return the number of query heads, of key-value heads, and the values of a head."""
    heads = positive(raw, "num_attention_heads", where, most=MAX_HEADS)
    shared = None if "num_key_value_heads" in raw else family.kv_heads
    kv_heads = positive(raw, "num_key_value_heads", where, shared or heads, MAX_HEADS)
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
    return heads, kv_heads, head_dim


def _mixers(
    raw: Raw, family: Family, num_layers: int, where: str
) -> tuple[tuple[LayerKind, ...], GatedDeltaConfig | None]:
    """Return the kinds of layers, as `ModelConfig.layer_kinds`, and the shape of those with a gated delta mixer."""
    if family.gated_delta is None:
        return () if family.layer_kinds is None else family.layer_kinds(raw, num_layers, where), None
    delta = parse_gated_delta(raw, where, family.gated_delta)
    types = mixer_types(raw, num_layers, where)
    return tuple(LayerKind("gated_delta" if each == LINEAR else "attention") for each in types), delta


def _epsilon(raw: Raw, where: str) -> float:
    eps = raw.get("rms_norm_eps", 1e-6)
    if not is_finite(eps) or not 0 < eps < 1:
        raise ModelError(f"{where}: rms_norm_eps must be a small positive number, found {shown(eps)}")
    return float(eps)


def _with_experts(kinds: Sequence[LayerKind], has_experts: Sequence[bool]) -> tuple[LayerKind, ...]:
    return tuple(
        replace(kind, feed_forward=EXPERTS) if has else kind
        for kind, has in zip(kinds, has_experts, strict=True)
    )


def _option(raw: Raw, option: bool | str, where: str) -> bool:
    return option if isinstance(option, bool) else flag(raw, option, where)


def _refuse(raw: Raw, family: Family, where: str) -> None:
    for key, reason in family.refused.items():
        if raw.get(key) not in (None, False):
            raise ModelError(f"{where}: {key} {shown(raw[key])} is not supported: {reason}")


def _activation(raw: Raw, family: Family, where: str) -> Activation:
    key, default = family.activation
    found = raw.get(key, default)
    # Kernels of experts and of gated delta layers, which transformers gives the same activation, have silu.
    only_silu = family.experts is not None or family.gated_delta is not None
    known = [name for name, ours in ACTIVATIONS.items() if ours == "silu" or not only_silu]
    if found not in known:
        raise ModelError(f"{where}: {key} {shown(found)} is not supported; supported are {', '.join(known)}")
    return ACTIVATIONS[found]


def _attention_scale(raw: Raw, family: Family, where: str) -> float | None:
    if family.query_scalar is None:
        return None
    width = positive(raw, "query_pre_attn_scalar", where, family.query_scalar, MAX_WIDTH)
    return 1 / math.sqrt(width)


def _ropes(
    raw: Raw, family: Family, max_positions: int, head_dim: int, where: str
) -> tuple[RopeConfig, RopeConfig | None]:
    """Return the rope, and that of layers with a window if they have their own."""
    if family.window_theta is None:
        return _rope(raw, family, max_positions, head_dim, where), None
    full, window = by_layer_type(raw, family.window_theta, where)
    return (
        _rope(full, family, max_positions, head_dim, where),
        _rope(window, family, max_positions, head_dim, where),
    )


def _rope(raw: Raw, family: Family, max_positions: int, head_dim: int, where: str) -> RopeConfig:
    rope = parse_rope(raw, max_positions, where, family.partial_rotary)
    dims = rope.rotated_dims(head_dim)
    if rope.kind == LONGROPE and len(rope.short_factors) != dims // 2:
        raise ModelError(
            f"{where}: longrope has {len(rope.short_factors)} factors for {dims // 2} frequencies of a head"
        )
    if dims < 2 or dims % 2:
        raise ModelError(
            f"{where}: partial_rotary_factor {rope.partial} rotates {dims} of {head_dim} dimensions of a head; an even "
            "number is needed"
        )
    return rope


def _positions(raw: Raw, max_positions: int, where: str) -> int:
    """Return the positions that plain attention serves: past those of training, Qwen's 1M models have chunks."""
    chunks = optional_section(raw, "dual_chunk_attention_config", where)
    return min(
        max_positions,
        positive(chunks, "original_max_position_embeddings", where, max_positions, MAX_POSITIONS),
        positive(chunks, "chunk_size", where, max_positions, MAX_POSITIONS),
    )


def _windows(raw: Raw, family: Family, num_layers: int, where: str) -> tuple[int | None, ...]:
    full = (None,) * num_layers
    if family.window is None:
        return full
    value = raw.get("sliding_window", family.window or None)
    if value is None and family.window_interval is None:
        return full
    switched = family.window_switch or family.windows_by_layer
    if switched and not flag(raw, "use_sliding_window", where):
        return full
    window = positive({"sliding_window": value}, "sliding_window", where)
    if family.window_types and raw.get("layer_types") is not None:
        return windows_by_type(raw, window, num_layers, where)
    if family.windows_by_layer:
        return windows_from(raw, window, num_layers, where)
    if family.window_interval is not None:
        return windows_every(raw, window, family.window_interval, num_layers, where)
    return (window,) * num_layers


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
