"""Scales of keys and values that checkpoints with a quantised KV cache store beside their weights. No torch."""

from __future__ import annotations

import math
import os
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from common.checkpoint.model_directory import opened
from common.checkpoint.model_files import read_weight_files
from common.checkpoint.safetensors_header import TensorEntry, WeightFile
from common.errors import ModelError

# compressed-tensors: self_attn.k_scale, one per layer or per head; ModelOpt: self_attn.k_proj.k_scale; older: kv_scale.
NAME: Final = re.compile(
    r"(?:model\.)?(?:language_model\.)?(?:model\.)?layers\.(\d+)\.self_attn\.(?:[kv]_proj\.)?(k|v|kv)_scale"
)
SUFFIXES: Final = (
    "self_attn.k_scale",
    "self_attn.v_scale",
    "self_attn.kv_scale",
    "self_attn.k_proj.k_scale",
    "self_attn.v_proj.v_scale",
)
MAX_VALUES: Final = 4096  # KV heads of one layer
_FORMATS: Final = {"F32": "f", "F16": "e", "BF16": "H"}


def kv_scales(directory: Path) -> dict[tuple[int, str], float]:
    """Return (layer, "k" or "v") -> scale for the layers that have one, rounded up to a power of two.

    One scale serves all heads of a layer, the largest of them: values of e4m3 are floating-point numbers, so a larger
    scale costs no precision, except for values far below the others.

    Raises ModelError for a scale that is not a positive number.
    """
    scales: dict[tuple[int, str], float] = {}
    for file in read_weight_files(directory):
        for name, entry in file.tensors.items():
            found = NAME.fullmatch(name)
            if found is None:
                continue
            scale = power_of_two(max(_values(file, name, entry)))
            for plane in found[2]:
                at = int(found[1]), plane
                scales[at] = max(scale, scales.get(at, 0.0))
    return scales


def power_of_two(value: float) -> float:
    """Return the smallest power of two that is not below `value`."""
    fraction, exponent = math.frexp(value)
    return math.ldexp(1.0, exponent if fraction > 0.5 else exponent - 1)


def _values(file: WeightFile, name: str, entry: TensorEntry) -> Iterator[float]:
    count = math.prod(entry.shape)
    if entry.dtype not in _FORMATS or not 1 <= count <= MAX_VALUES:
        raise ModelError(
            f"{file.path}: {name} is {entry.dtype} {list(entry.shape)}; a scale of keys or values is one number, or "
            f"one per head, in {', '.join(_FORMATS)}"
        )
    with opened(file.path) as handle:
        raw = os.pread(handle.fileno(), entry.end - entry.begin, file.data_start + entry.begin)
    for (value,) in struct.iter_unpack(f"<{_FORMATS[entry.dtype]}", raw):
        if entry.dtype == "BF16":
            (value,) = struct.unpack("<f", struct.pack("<I", value << 16))
        if not (math.isfinite(value) and value > 0):
            raise ModelError(f"{file.path}: {name} contains {value}; scales are finite and positive")
        yield value
