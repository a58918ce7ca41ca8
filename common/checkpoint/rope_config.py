"""The rotary embedding of a config: `rope_scaling`, and `rope_parameters` of transformers 5. No torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from common.checkpoint.json_fields import MAX_POSITIONS, MAX_WIDTH, Raw, flag, number, optional_section, shown
from common.checkpoint.layer_windows import FULL, SLIDING
from common.errors import ModelError

LONGROPE = "longrope"
DYNAMIC = "dynamic"
YARN = "yarn"
SUPPORTED_ROPE = ("default", "linear", "llama3", YARN, DYNAMIC, LONGROPE)
ORIGINAL = "original_max_position_embeddings"  # in the section of the rope, or beside it
DEFAULT_THETA = 10_000.0
MAX_FACTOR = 1e6  # for scalings; published factors stay below 100
MIN_FACTOR = 1e-3  # frequencies are divided by it and must stay finite
SECTIONS = "mrope_section"
INTERLEAVED = "mrope_interleaved"
MULTIMODAL = "mrope"  # rope type of older files that have SECTIONS
SCALING, PARAMETERS = "rope_scaling", "rope_parameters"  # the first one, of older files, has precedence
QUERY_SCALING = "llama_4_scaling_beta"
AXES = 3  # temporal, height, width


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Parameters of one rotary embedding; the fields that `kind` does not use keep their defaults.

    Source: transformers `modeling_rope_utils` (llama3, yarn); YaRN: arXiv 2309.00071; LongRoPE: arXiv 2402.13753.

    "longrope" has two sets of frequencies. transformers takes the second for a batch with a request longer than
    `original_max_positions`, so keys in a cache may have been rotated by the first. A server uses one set for all
    requests (`for_length`), as vLLM does.
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
    short_factors: tuple[float, ...] = ()  # longrope: wavelengths are multiplied by these, one per frequency
    long_factors: tuple[float, ...] = ()  # longrope: or by these
    long: bool = False  # longrope: which of them
    # The number of frequencies rotated by the temporal, height and width position of a token, in that order,
    # rotated_dims / 2 in total; (): a token has one position.
    sections: tuple[int, ...] = ()
    interleaved: bool = False  # the axes take turns over the frequencies, instead of one run each
    partial: float = 1.0  # share of a head's dimensions that is rotated: the first ones

    @property
    def axes(self) -> tuple[int, ...]:
        """The axes after T of the positions [T, *axes] of a prompt.

        After a prompt all axes agree and positions are [T].
        """
        return (len(self.sections),) if self.sections else ()

    def axis_of_frequencies(self) -> tuple[int, ...]:
        """Return the axis of each frequency; () for one axis.

        Interleaved, frequencies 1, 4, 7 ... belong to the height and 2, 5, 8 ... to the width, as many as their
        sections say, and all others to the temporal axis.
        """
        runs = tuple(axis for axis, size in enumerate(self.sections) for _ in range(size))
        if not self.interleaved:
            return runs
        return tuple(
            index % AXES if index < AXES * self.sections[index % AXES] else 0 for index in range(len(runs))
        )

    def for_length(self, max_tokens: int) -> RopeConfig:
        """Return the rope of a server whose requests have at most this many tokens."""
        return replace(self, long=self.kind == LONGROPE and max_tokens > self.original_max_positions)

    def rotated_dims(self, head_dim: int) -> int:
        """Return how many dimensions of a head are rotated: the first ones."""
        return int(head_dim * self.partial)


def parse_rope(raw: Raw, max_positions: int, where: str, partial: float | None = None) -> RopeConfig:
    """Read the rope of a config.json. Raises ModelError with an unsupported type or a missing value.

    Args:
        partial: default of `partial_rotary_factor`; None: the model rotates whole heads and refuses the key.
    """
    rope = _parse_whole(raw, max_positions, where)
    return replace(rope, partial=_partial(raw, partial, where))


def stretched_positions(raw: Raw, rope: RopeConfig, where: str) -> int:
    """Return how many positions YaRN is said to reach, 0 if the file does not say.

    Qwen's instructions add it to a config.json whose max_position_embeddings stays that of training.
    """
    stated = (_rope_section(raw, where)[1].get(ORIGINAL), raw.get(ORIGINAL))
    if rope.kind != YARN or stated == (None, None):
        return 0
    return min(int(rope.factor * rope.original_max_positions), MAX_POSITIONS)


def by_layer_type(raw: Raw, window_theta: float, where: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the config.json with the rope of layers without a window, and with that of layers with one.

    Newer files have a section for each layer type. In older ones, scaling applies to layers without a window, and the
    others have a plain rope of `rope_local_base_freq`. A file may have both, for old and new readers: values of
    `rope_scaling` replace those of the section, and `rope_local_base_freq` is the theta of a section without one.

    Args:
        window_theta: default theta of layers with a window.
    """
    key, values = _rope_section(raw, where)
    flat, nested = ({}, values) if _is_nested(values) else (values, optional_section(raw, PARAMETERS, where))
    sections = nested if _is_nested(nested) else {}
    full, window = (optional_section(sections, kind, f"{where}: {PARAMETERS}") for kind in (FULL, SLIDING))
    theta = window.get("rope_theta") or number(raw, "rope_local_base_freq", where, window_theta)
    others = {name: value for name, value in raw.items() if name not in (SCALING, PARAMETERS)}
    return {**others, key: {**full, **flat}}, {**others, key: {**window, "rope_theta": theta}}


def _partial(raw: Raw, default: float | None, where: str) -> float:
    """Return the share of a head that is rotated. Raises ModelError if the model rotates whole heads."""
    name = "partial_rotary_factor"
    _, values = _rope_section(raw, where)
    value = values.get(name, raw.get(name))
    if default is None and value not in (None, 1, 1.0):
        raise ModelError(f"{where}: {name} {shown(value)} is not supported, only 1.0")
    return number({name: value}, name, where, 1.0 if default is None else default, 1.0)


def _parse_whole(raw: Raw, max_positions: int, where: str) -> RopeConfig:
    """Return the rope of heads that are rotated as a whole."""
    key, values = _rope_section(raw, where)
    _refuse_unsupported(key, values, where)
    kind = _kind(values, where)
    where = f"{where}: {key} of type {kind!r}"
    theta = _theta(values.get("rope_theta") or raw.get("rope_theta"), where)
    if kind == "default":
        return RopeConfig(theta=theta)
    if kind == DYNAMIC:
        # Frequencies change once a request exceeds max_position_embeddings, which no request of a server does.
        _factor(values, where)
        return RopeConfig(theta=theta)
    if kind == "linear":
        return RopeConfig(kind, theta, _factor(values, where))
    if raw.get(ORIGINAL) is not None:
        # As in transformers, the value beside the section replaces the one in it.
        values[ORIGINAL] = raw[ORIGINAL]
    original = int(number(values, ORIGINAL, where, max_positions, MAX_POSITIONS))
    if not original:
        raise ModelError(f"{where}: {ORIGINAL} must be at least 1")
    if kind == "llama3":
        return _llama3(values, theta, original, where)
    if kind == LONGROPE:
        return _longrope(values, theta, original, max_positions, where)
    return _yarn(values, theta, original, max_positions, where)


def _refuse_unsupported(key: str, values: Mapping[str, Any], where: str) -> None:
    if SECTIONS in values or values.get("rope_type", values.get("type")) == MULTIMODAL:
        raise ModelError(
            f"{where}: positions on several axes ({SECTIONS}) are supported only for models that read images"
        )
    if values.get(QUERY_SCALING):
        raise ModelError(
            f"{where}: {key}: {QUERY_SCALING} {shown(values[QUERY_SCALING])} is not supported: queries are not scaled "
            "by their position"
        )
    if _is_nested(values):
        raise ModelError(
            f"{where}: rope parameters per layer type are not supported, only one set for all layers"
        )


def _kind(values: Mapping[str, Any], where: str) -> str:
    kind = values.get("rope_type", values.get("type", "default"))
    if "short_factor" in values:
        kind = LONGROPE  # early files of Phi-3 have other names
    if kind not in SUPPORTED_ROPE:
        raise ModelError(
            f"{where}: rope type {shown(kind)} is not supported; supported are {', '.join(SUPPORTED_ROPE)}"
        )
    return str(kind)


def _theta(given: object, where: str) -> float:
    theta = number({"rope_theta": given}, "rope_theta", where, DEFAULT_THETA)
    if theta <= 1:
        raise ModelError(f"{where}: rope_theta must be above 1, found {theta}")
    return theta


def _llama3(values: Mapping[str, Any], theta: float, original: int, where: str) -> RopeConfig:
    low = number(values, "low_freq_factor", where, most=MAX_FACTOR)
    high = number(values, "high_freq_factor", where, most=MAX_FACTOR)
    if high <= low:
        raise ModelError(f"{where}: llama3 rope needs high_freq_factor {high} above low_freq_factor {low}")
    return RopeConfig("llama3", theta, _factor(values, where), original, low, high)


def _longrope(
    values: Mapping[str, Any], theta: float, original: int, max_positions: int, where: str
) -> RopeConfig:
    factor = _factor(values, where, max_positions / original)
    short, long = (_factors(values, key, where) for key in ("short_factor", "long_factor"))
    if len(short) != len(long):
        raise ModelError(
            f"{where}: {len(short)} short and {len(long)} long factors; both are one per frequency"
        )
    rope = RopeConfig(LONGROPE, theta, factor, original, short_factors=short, long_factors=long)
    attention = _longrope_attention_factor(values, factor, original, where)
    return replace(rope, attention_factor=attention).for_length(max_positions)


def _yarn(
    values: Mapping[str, Any], theta: float, original: int, max_positions: int, where: str
) -> RopeConfig:
    factor = _factor(values, where, max_positions / original)
    return RopeConfig(
        YARN,
        theta,
        factor,
        original,
        beta_fast=number(values, "beta_fast", where, 32.0, MAX_FACTOR),
        beta_slow=number(values, "beta_slow", where, 1.0, MAX_FACTOR),
        truncate=flag(values, "truncate", where, True),
        attention_factor=_yarn_attention_factor(values, factor, where),
    )


def _rope_section(raw: Raw, where: str) -> tuple[str, dict[str, Any]]:
    """Return its key and a copy of its content: older files call it rope_scaling."""
    key = SCALING if raw.get(SCALING) else PARAMETERS
    return key, dict(optional_section(raw, key, where))


def _is_nested(values: Mapping[str, Any]) -> bool:
    """Return whether these are sections, one per layer type."""
    return any(isinstance(value, dict) for value in values.values())


def split_sections(raw: Raw, where: str, interleaved: bool = False) -> tuple[dict[str, Any], tuple[int, ...]]:
    """Return the config.json as a model with one position axis would have it, and the sections of its rotary
    embedding.

    The sections are empty if the file has none. Raises ModelError if they are not those of three consecutive axes.

    Args:
        interleaved: accept sections that are distributed over the frequencies instead of consecutive.
    """
    key, values = _rope_section(raw, where)
    if values.pop(INTERLEAVED, False) and not interleaved:
        raise ModelError(f"{where}: {INTERLEAVED} is not supported")
    kind = values.get("rope_type", values.get("type"))
    if SECTIONS not in values:
        if kind == MULTIMODAL:
            raise ModelError(f"{where}: rope type {MULTIMODAL!r} needs {SECTIONS}")
        return dict(raw), ()
    sections = values.pop(SECTIONS)
    if (
        not isinstance(sections, list)
        or len(sections) != AXES
        or not all(type(each) is int and each > 0 for each in sections)
    ):
        raise ModelError(f"{where}: {SECTIONS} must be {AXES} positive integers, found {shown(sections)}")
    if kind in (MULTIMODAL, None):
        # Without any value, the other key of the file would be read instead.
        values = {**values, "rope_type": "default"}
    return {**raw, key: values}, tuple(sections)


def is_interleaved(raw: Raw, where: str, default: bool = False) -> bool:
    """Return whether the sections of a config.json are interleaved. Raises ModelError."""
    return flag(_rope_section(raw, where)[1], INTERLEAVED, where, default)


def with_sections(
    rope: RopeConfig, sections: tuple[int, ...], head_dim: int, where: str, interleaved: bool = False
) -> RopeConfig:
    """Return the rope with sections. Raises ModelError if the sections do not cover all frequencies of a head."""
    frequencies = rope.rotated_dims(head_dim) // 2
    if sections and sum(sections) != frequencies:
        raise ModelError(
            f"{where}: {SECTIONS} {list(sections)} are {sum(sections)} frequencies, a head_dim of {head_dim} has "
            f"{frequencies}"
        )
    return replace(rope, sections=sections, interleaved=interleaved and bool(sections))


def _factor(values: Mapping[str, Any], where: str, default: float | None = None) -> float:
    factor = number(values, "factor", where, default, MAX_FACTOR)
    if factor < MIN_FACTOR:
        raise ModelError(f"{where}: factor must be at least {MIN_FACTOR:g}, found {factor:g}")
    return factor


def _factors(values: Mapping[str, Any], key: str, where: str) -> tuple[float, ...]:
    found = values.get(key)
    if not isinstance(found, list) or not 0 < len(found) <= MAX_WIDTH:
        raise ModelError(f"{where}: {key} must be a list of one number per frequency, found {shown(found)}")
    return tuple(_factor({"factor": each}, f"{where}: {key}") for each in found)


def _longrope_attention_factor(values: Mapping[str, Any], factor: float, original: int, where: str) -> float:
    if values.get("attention_factor") is not None:
        return number(values, "attention_factor", where, most=MAX_FACTOR)
    if factor <= 1:
        return 1.0
    if original < 2:
        raise ModelError(f"{where}: original_max_position_embeddings must be at least 2, found {original}")
    return math.sqrt(1 + math.log(factor) / math.log(original))


def _yarn_attention_factor(values: Mapping[str, Any], factor: float, where: str) -> float:
    if values.get("attention_factor") is not None:
        return number(values, "attention_factor", where, most=MAX_FACTOR)

    def mscale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if values.get("mscale") and values.get("mscale_all_dim"):
        keys = ("mscale", "mscale_all_dim")
        above, below = (number(values, key, where, most=MAX_FACTOR) for key in keys)
        return mscale(above) / mscale(below)
    return mscale(1.0)
