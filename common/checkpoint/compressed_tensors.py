"""`quant_method: compressed-tensors`: FP8 with scales per tensor, channel or block. No torch.

Source of the fields: https://github.com/vllm-project/compressed-tensors (quant_args.py, quant_scheme.py). Names match
as there: match_targets in utils/match.py, apply_quantization_config in quantization/lifecycle/apply.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from common.checkpoint.fp8_weights import (
    BLOCK,
    BLOCK_SIZE,
    CHANNEL,
    EVERYTHING,
    EXACT,
    REGEX,
    TENSOR,
    Fp8Scheme,
    Fp8Weights,
    check_kv_scheme,
    checked_patterns,
)
from common.checkpoint.json_fields import optional_section, section, shown
from common.checkpoint.weight_formats import FormatRecord
from common.errors import ModelError

METHOD = "compressed-tensors"
MAX_GROUPS = 64
CLASSES = ("Linear", "Module")  # the classes of PyTorch that every product is an instance of
REMEDY = "use a checkpoint in FP8, or a dense one with model.quantization: fp8"
STRATEGIES = {"tensor": TENSOR, "channel": CHANNEL, "block": BLOCK}


def parse(raw: Mapping[str, Any], where: str) -> Fp8Weights:
    """Read the section. Raises ModelError for groups that are not FP8."""
    groups = section(raw, "config_groups", where)
    if not 0 < len(groups) <= MAX_GROUPS:
        raise ModelError(f"{where}: config_groups must have 1 to {MAX_GROUPS} groups, found {len(groups)}")
    # Many published files have the section, empty or with `format: dense`.
    if optional_section(raw, "sparsity_config", where).get("format", "dense") != "dense":
        raise ModelError(f"{where}: sparsity_config is not supported; {REMEDY}")
    if optional_section(raw, "transform_config", where):
        raise ModelError(f"{where}: transform_config is not supported; {REMEDY}")
    # Some published files with weights in FP8 say "frozen". Weights of another dtype are refused when they are read.
    if raw.get("quantization_status", "compressed") not in ("compressed", "frozen"):
        raise ModelError(
            f"{where}: quantization_status {shown(raw['quantization_status'])} is not supported: the weights have to "
            "be stored as FP8 (compressed)"
        )
    schemes: dict[str, Fp8Scheme] = {}  # of several groups with one target the last counts
    for name in groups:
        at = f"{where}: config_groups: {name[:40]}"
        group = section(groups, name, at)
        scheme = _scheme(group, at)
        schemes |= dict.fromkeys(_patterns(group, "targets", at), scheme)
    ignored = _patterns(raw, "ignore", where)
    check_kv_scheme(raw.get("kv_cache_scheme"), "kv_cache_scheme", where)
    ordered = sorted(schemes.items(), key=lambda item: _priority(item[0]))
    return Fp8Weights(METHOD, tuple(ordered), ignored)


def _patterns(raw: Mapping[str, Any], key: str, where: str) -> tuple[str, ...]:
    """Return a list of targets as patterns: expressions, whole names, and names of classes that all products have."""
    return tuple(
        each if each.startswith(REGEX) else EVERYTHING if each in CLASSES else f"{EXACT}{each}"
        for each in checked_patterns(raw.get(key), key, where)
    )


def _priority(pattern: str) -> tuple[int, str]:
    """Order targets as they apply to a product that several of them match: names, then expressions, then classes."""
    kinds = (EXACT, REGEX, EVERYTHING)
    return next(index for index, kind in enumerate(kinds) if pattern.startswith(kind)), pattern


def _scheme(group: Mapping[str, Any], where: str) -> Fp8Scheme:
    weights, inputs = _float8(group, "weights", where), _float8(group, "input_activations", where)
    if group.get("output_activations") is not None:
        raise ModelError(f"{where}: output_activations are not supported; {REMEDY}")
    strategy = weights.get("strategy")
    if strategy not in STRATEGIES or weights.get("dynamic"):
        raise ModelError(
            f"{where}: weights: strategy {shown(strategy)}{' and dynamic' if weights.get('dynamic') else ''} is not "
            f"supported; supported are {', '.join(STRATEGIES)}"
        )
    block = weights.get("block_structure")
    if strategy == "block" and block not in ([BLOCK_SIZE, BLOCK_SIZE], f"{BLOCK_SIZE}x{BLOCK_SIZE}"):
        raise ModelError(
            f"{where}: weights: block_structure {shown(block)} is not supported; supported is [{BLOCK_SIZE}, "
            f"{BLOCK_SIZE}]"
        )
    of_inputs, dynamic = inputs.get("strategy"), inputs.get("dynamic") is True
    if strategy == "block":
        fits = dynamic and of_inputs == "group" and inputs.get("group_size") == BLOCK_SIZE
        wanted = f"dynamic and of strategy group with group_size {BLOCK_SIZE}"
    else:
        fits = of_inputs == "token" if dynamic else of_inputs == "tensor"
        wanted = "dynamic and of strategy token, or static and of strategy tensor"
    if not fits:
        raise ModelError(
            f"{where}: input_activations {'dynamic' if dynamic else 'static'} of strategy {shown(of_inputs)} are not "
            f"supported; with weights of strategy {strategy} they must be {wanted}"
        )
    return Fp8Scheme(STRATEGIES[strategy], static=not dynamic)


def _float8(group: Mapping[str, Any], key: str, where: str) -> Mapping[str, Any]:
    """Return the description of FP8 numbers. Raises ModelError for others, or none."""
    if group.get(key) is None:
        raise ModelError(f"{where}: {key} are not quantised, which is not supported; {REMEDY}")
    found = section(group, key, where)
    kind, bits = found.get("type"), found.get("num_bits")
    if (kind, bits) != ("float", 8):
        raise ModelError(
            f"{where}: {key} of type {shown(kind)} with num_bits {shown(bits)} are not supported; {REMEDY}"
        )
    if found.get("symmetric", True) is not True:
        raise ModelError(
            f"{where}: {key} with symmetric {shown(found['symmetric'])} are not supported; {REMEDY}"
        )
    return found


RECORD = FormatRecord(parse, "common.engine.formats.fp8:Fp8Format")
