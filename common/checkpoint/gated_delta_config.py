"""Reads the shape of gated delta layers (Qwen3-Next, Qwen3.5) from config.json. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from common.checkpoint.json_fields import MAX_HEADS, MAX_WIDTH, Raw, positive, shown
from common.errors import ModelError

MAX_HEAD_DIM = 128  # a program of the kernels holds the state of a head; that of published models
KERNEL = 4  # taps of the convolution; the planes keep KERNEL - 1 columns
LINEAR, FULL = "linear_attention", "full_attention"


@dataclass(frozen=True, slots=True)
class GatedDeltaConfig:
    """Heads of one gated delta layer. Key head j serves `value_heads // key_heads` consecutive value heads."""

    key_heads: int
    value_heads: int
    key_dim: int  # values of one key or query head
    value_dim: int  # values of one value head
    # True: two projections whose rows are grouped by key head (Qwen3-Next); False: one projection each for
    # queries, keys and values, for gates, and for the two values per head that control the state.
    grouped_rows: bool

    @property
    def channels(self) -> int:
        """Channels of the convolution: queries, keys and values of all heads."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    @property
    def token_values(self) -> int:
        """Values of one token that the state of a layer depends on: the channels, and two values per value head."""
        return self.channels + 2 * self.value_heads

    @property
    def inner(self) -> int:
        """Values of one token that leave the layer before its output projection."""
        return self.value_heads * self.value_dim


def parse_gated_delta(raw: Raw, where: str, grouped_rows: bool) -> GatedDeltaConfig:
    """Read the `linear_*` keys. Raises ModelError with what is not supported."""
    key_heads = positive(raw, "linear_num_key_heads", where, 16, MAX_HEADS)
    value_heads = positive(raw, "linear_num_value_heads", where, 32, MAX_HEADS)
    key_dim = positive(raw, "linear_key_head_dim", where, MAX_HEAD_DIM, MAX_HEAD_DIM)
    value_dim = positive(raw, "linear_value_head_dim", where, MAX_HEAD_DIM, MAX_HEAD_DIM)
    if value_heads % key_heads:
        raise ModelError(
            f"{where}: {key_heads} key heads cannot serve {value_heads} value heads evenly (linear_num_key_heads, "
            "linear_num_value_heads)"
        )
    kernel = positive(raw, "linear_conv_kernel_dim", where, KERNEL)
    if kernel != KERNEL:
        raise ModelError(f"{where}: linear_conv_kernel_dim {kernel} is not supported, only {KERNEL}")
    gate = raw.get("output_gate_type")
    if gate not in (None, "swish"):
        raise ModelError(f"{where}: output_gate_type {shown(gate)} is not supported, only 'swish'")
    found = GatedDeltaConfig(key_heads, value_heads, key_dim, value_dim, grouped_rows)
    if found.channels + found.inner > MAX_WIDTH:
        raise ModelError(
            f"{where}: the heads of a gated delta layer have {found.channels + found.inner} values, more than the "
            f"{MAX_WIDTH} of one token that are supported"
        )
    return found


def mixer_types(raw: Raw, layers: int, where: str) -> tuple[str, ...]:
    """Return LINEAR or FULL for each layer: `layer_types`, or every `full_attention_interval`-th layer is FULL."""
    types = raw.get("layer_types")
    if types is None:
        interval = positive(raw, "full_attention_interval", where, 4)
        return tuple(LINEAR if (layer + 1) % interval else FULL for layer in range(layers))
    if not isinstance(types, list) or len(types) != layers or not set(map(str, types)) <= {LINEAR, FULL}:
        raise ModelError(f"{where}: layer_types must name {LINEAR} or {FULL} for each of {layers} layers")
    return tuple(str(kind) for kind in types)
