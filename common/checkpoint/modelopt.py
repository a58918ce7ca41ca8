"""ModelOpt's FP8: one scale per tensor, for weights and activations. No torch.

It is described by `quantization_config` of config.json (`quant_method: modelopt`), or by a file beside it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common.checkpoint import model_files
from common.checkpoint.fp8_weights import (
    EVERYTHING,
    GLOB,
    TENSOR,
    Fp8Scheme,
    Fp8Weights,
    check_kv_scheme,
    checked_patterns,
)
from common.checkpoint.json_fields import section, shown
from common.checkpoint.weight_formats import FormatRecord
from common.errors import ModelError

METHOD = "modelopt"
FILE = "hf_quant_config.json"
SUPPORTED = "FP8"


def with_modelopt_file(raw: Mapping[str, Any], directory: Path) -> Mapping[str, Any]:
    """Return config.json with the quantization that ModelOpt has written into a file of its own. Raises ModelError."""
    file = directory / FILE
    if raw.get("quantization_config") is not None or not file.is_file():
        return raw
    found = section(model_files.read_json(file), "quantization", str(file))
    return {**raw, "quantization_config": {**found, "quant_method": METHOD}}


def parse(raw: Mapping[str, Any], where: str) -> Fp8Weights:
    """Read the section, or the file's. Raises ModelError for other algorithms."""
    if raw.get("quantization") is not None:
        raw = section(raw, "quantization", where)
    name = raw.get("quant_algo")
    if name != SUPPORTED:
        raise ModelError(
            f"{where}: quant_algo {shown(name)} is not supported; supported is {SUPPORTED}: use such a checkpoint, or "
            "a dense one with model.quantization: fp8"
        )
    keys = ("exclude_modules", "ignore")
    patterns = [each for key in keys for each in checked_patterns(raw.get(key), key, where)]
    ignored = tuple(f"{GLOB}{each}" if "*" in each else each for each in patterns)
    for key in ("kv_cache_quant_algo", "kv_cache_scheme"):
        check_kv_scheme(raw.get(key), key, where)
    return Fp8Weights(METHOD, ((EVERYTHING, Fp8Scheme(TENSOR, static=True)),), ignored)


RECORD = FormatRecord(parse, "common.engine.formats.fp8:Fp8Format")
