"""Rotary embedding as a config says it: `rope_scaling` and transformers-5 `rope_parameters`. No torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from common.errors import ModelError

SUPPORTED_ROPE = ("default", "linear", "llama3", "yarn")
DEFAULT_THETA = 10_000.0


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Parameters of one rotary embedding; the fields that `kind` does not use keep their defaults.

    Source: transformers `modeling_rope_utils` (llama3, yarn); YaRN: arXiv 2309.00071.
    """

    kind: str = "default"  # one of SUPPORTED_ROPE
    theta: float = DEFAULT_THETA
    factor: float = 1.0
    original_max_positions: int = 0  # llama3, yarn
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 1.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    truncate: bool = True  # yarn
    attention_factor: float = 1.0  # multiplies cos and sin


def parse_rope(raw: Mapping[str, Any], max_positions: int, where: str) -> RopeConfig:
    """Read the rope of a config.json. `ModelError` names an unsupported type or a missing value."""
    values = dict(raw.get("rope_scaling") or raw.get("rope_parameters") or {})
    if any(isinstance(value, dict) for value in values.values()):
        raise ModelError(
            f"{where}: rope parameters per layer type are not supported, only one set for all layers"
        )
    kind = str(values.get("rope_type", values.get("type", "default")))
    if kind not in SUPPORTED_ROPE:
        raise ModelError(
            f"{where}: rope type {kind!r} is not supported; supported are {', '.join(SUPPORTED_ROPE)}"
        )
    partial = values.get("partial_rotary_factor", raw.get("partial_rotary_factor"))
    if partial not in (None, 1, 1.0):
        raise ModelError(f"{where}: partial_rotary_factor {partial} is not supported, only 1.0")

    def number(key: str, default: float | None = None) -> float:
        value = values.get(key)
        value = default if value is None else value
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not math.isfinite(value)
            or value <= 0
        ):
            raise ModelError(f"{where}: rope type {kind!r} needs a positive number {key}, found {value!r}")
        return float(value)

    theta = number("rope_theta", raw.get("rope_theta") or DEFAULT_THETA)
    if kind == "default":
        return RopeConfig(theta=theta)
    if kind == "linear":
        return RopeConfig(kind, theta, number("factor"))
    outer = raw.get("original_max_position_embeddings")  # the outer value wins, as in transformers
    if outer is not None:
        values["original_max_position_embeddings"] = outer
    original = int(number("original_max_position_embeddings", max_positions))
    if kind == "llama3":
        low, high = number("low_freq_factor"), number("high_freq_factor")
        if high <= low:
            raise ModelError(
                f"{where}: llama3 rope needs high_freq_factor {high} above low_freq_factor {low}"
            )
        return RopeConfig(kind, theta, number("factor"), original, low, high)
    factor = number("factor", max_positions / original)
    return RopeConfig(
        kind,
        theta,
        factor,
        original,
        beta_fast=number("beta_fast", 32.0),
        beta_slow=number("beta_slow", 1.0),
        truncate=bool(values.get("truncate", True)),
        attention_factor=_yarn_attention_factor(values, factor),
    )


def _yarn_attention_factor(values: Mapping[str, Any], factor: float) -> float:
    explicit = values.get("attention_factor")
    if explicit is not None:
        return float(explicit)

    def mscale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    numerator, denominator = values.get("mscale"), values.get("mscale_all_dim")
    if numerator and denominator:
        return mscale(float(numerator)) / mscale(float(denominator))
    return mscale(1.0)
