"""`quant_method: fp8`: scales per block of 128 x 128 (DeepSeek, Qwen), or one per tensor. No torch.

Names match as in transformers 5 (should_convert_module in quantizers/quantizers_utils.py): expressions from the start
of a name to the end of one of its parts, and ends of names. Earlier versions, and other tools, also list blocks
within the name of a product, and expressions that begin with `re:`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from common.checkpoint.fp8_weights import (
    BLOCK,
    BLOCK_SIZE,
    ENDING,
    EVERYTHING,
    REGEX,
    TENSOR,
    Fp8Scheme,
    Fp8Weights,
    check_kv_scheme,
    checked_patterns,
)
from common.checkpoint.json_fields import shown
from common.checkpoint.weight_formats import FormatRecord
from common.errors import ModelError

IGNORED = ("modules_to_not_convert", "ignored_layers")
EXPRESSION = re.compile(r"[*+?()\[\]{}|^$\\]")  # a listed name with one of these is a regular expression
PART_ENDS = r"(?:(?<=\.)|(?=\.|$))"


def parse(raw: Mapping[str, Any], where: str) -> Fp8Weights:
    """Read the section. Raises ModelError for other formats of numbers and other blocks."""
    number = raw.get("fmt", "e4m3")
    if number not in ("e4m3", "float8_e4m3fn"):
        raise ModelError(f"{where}: fmt {shown(number)} is not supported; supported is e4m3")
    activations = raw.get("activation_scheme", "dynamic")
    if activations not in ("dynamic", "static"):
        raise ModelError(
            f"{where}: activation_scheme {shown(activations)} is not supported; supported are dynamic, static"
        )
    block = raw.get("weight_block_size")
    if block not in (None, [BLOCK_SIZE, BLOCK_SIZE]):
        raise ModelError(
            f"{where}: weight_block_size {shown(block)} is not supported; supported are [{BLOCK_SIZE}, {BLOCK_SIZE}] "
            "and one scale per tensor"
        )
    for key, known in (("expert_dtype", (None, "fp8")), ("modules_to_convert", (None, []))):
        if raw.get(key) not in known:
            raise ModelError(f"{where}: {key} {shown(raw[key])} is not supported: only products are in FP8")
    static = activations == "static"
    if block is not None and static:
        raise ModelError(
            f"{where}: activation_scheme static is not supported with weight_block_size; with blocks it must be dynamic"
        )
    scheme = Fp8Scheme(TENSOR, static) if block is None else Fp8Scheme(BLOCK, scale="weight_scale_inv")
    ignored = tuple(each for key in IGNORED for each in _patterns(raw, key, where))
    check_kv_scheme(raw.get("kv_cache_scheme"), "kv_cache_scheme", where)
    return Fp8Weights("fp8", ((EVERYTHING, scheme),), ignored)


def _patterns(raw: Mapping[str, Any], key: str, where: str) -> list[str]:
    """Return a list of names and expressions as patterns. Raises ModelError as `checked_patterns`."""
    listed = checked_patterns(raw.get(key), key, where)
    expressions = {each for each in listed if EXPRESSION.search(each) and not each.startswith(REGEX)}
    checked_patterns([f"{REGEX}{each}" for each in sorted(expressions)], key, where)
    bounded = {each: f"{REGEX}(?:{each}){PART_ENDS}" for each in expressions}
    return [bounded.get(each, each if each.startswith(REGEX) else f"{ENDING}{each}") for each in listed]


RECORD = FormatRecord(parse, "common.engine.formats.fp8:Fp8Format")
