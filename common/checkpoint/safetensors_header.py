"""Reads the header of a safetensors file and checks that it describes the file, byte for byte. No torch.

A file is 8 bytes little-endian header length, a JSON header {name: {dtype, shape, data_offsets}}, then the bytes.
Offsets count from the end of the header. No code maps a file or trusts a shape before this module has checked it:
tensors must cover the data without a hole or an overlap, and each must have exactly the bytes of its shape and dtype.
Source: https://github.com/huggingface/safetensors (format section of the README).
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.checkpoint.model_directory import opened
from common.checkpoint.model_json import parse_json
from common.checkpoint.model_mistakes import explain_weight_file
from common.errors import ModelError

MAX_HEADER_BYTES = 100_000_000  # the limit of the format
MAX_TENSORS = 100_000  # per file
START_BYTES = 64  # enough to recognise other kinds of files
MAX_DIMENSIONS = 8
METADATA = "__metadata__"
# Brackets and commas of an entry whose shape has MAX_DIMENSIONS numbers, halved to match the count of `parse_json`.
VALUES_PER_TENSOR = 9
DTYPE_BITS: Mapping[str, int] = {
    **dict.fromkeys(("F4",), 4),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 8),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 16),
    **dict.fromkeys(("I32", "U32", "F32"), 32),
    **dict.fromkeys(("I64", "U64", "F64", "C64"), 64),
}
FLOATS = ("F32", "BF16", "F16")  # rounded to the dtype in which the model computes
_KEYS = {"dtype", "shape", "data_offsets"}


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of a weight file, as described by its header."""

    dtype: str  # safetensors' spelling: F32, BF16, F16, I64 ...
    shape: tuple[int, ...]
    begin: int  # byte offsets from the end of the header
    end: int


@dataclass(frozen=True, slots=True)
class WeightFile:
    """One safetensors file: its path, the start of its data, and its tensors."""

    path: Path
    data_start: int
    tensors: Mapping[str, TensorEntry]

    @property
    def num_bytes(self) -> int:
        return sum(entry.end - entry.begin for entry in self.tensors.values())

    @property
    def num_values(self) -> int:
        return sum(math.prod(entry.shape) for entry in self.tensors.values())


def read_header(path: Path) -> WeightFile:
    """Read and check one header. Raises ModelError with the file and, if there is one, the tensor."""
    with opened(path) as file:
        size = os.fstat(file.fileno()).st_size
        prefix = file.read(8)
        length = int.from_bytes(prefix, "little")
        if len(prefix) < 8 or length > size - 8:
            explained = explain_weight_file(prefix + file.read(START_BYTES))
            if explained is not None:
                raise ModelError(f"{path} {explained}")
            raise ModelError(f"{path} is not a whole safetensors file: its header is cut off or corrupt")
        if length > MAX_HEADER_BYTES:
            raise ModelError(
                f"{path} has a header of {length} bytes; the format allows at most {MAX_HEADER_BYTES}"
            )
        header = file.read(length)
    return parse_header(header, size - 8 - length, path)


def parse_header(header: bytes, data_bytes: int, path: Path) -> WeightFile:
    """Check a header against the number of bytes that follow it in the file. Raises ModelError."""
    if not header.startswith(b"{"):
        raise ModelError(f"{path} is not a safetensors file: its header is corrupt (it is not a JSON object)")
    raw = parse_json(header, f"{path}: the header", MAX_TENSORS * VALUES_PER_TENSOR, unique=True)
    metadata = raw.get(METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise ModelError(f"{path}: the header is corrupt: {METADATA} must be an object of strings")
    tensors = {name: _entry(path, name, each) for name, each in raw.items() if name != METADATA}
    if len(tensors) > MAX_TENSORS:
        raise ModelError(f"{path} has {len(tensors)} tensors; at most {MAX_TENSORS} are read")
    at = 0
    for name, entry in sorted(tensors.items(), key=lambda item: (item[1].begin, item[1].end)):
        if entry.begin != at:
            fault = "overlap those of another tensor" if entry.begin < at else f"leave a hole at {at}"
            raise ModelError(
                f"{path}: the header is corrupt: data_offsets of {name} [{entry.begin}, {entry.end}] {fault}"
            )
        at = entry.end
    if at != data_bytes:
        raise ModelError(
            f"{path} has {data_bytes} bytes of data, but its header requires {at}: the file is truncated or corrupt"
        )
    return WeightFile(path, 8 + len(header), tensors)


def _entry(path: Path, name: str, raw: Any) -> TensorEntry:
    where = f"{path}: the header is corrupt: tensor {name[:200]!r}"
    if not isinstance(raw, dict) or set(raw) != _KEYS:
        raise ModelError(f"{where} must have exactly dtype, shape and data_offsets")
    dtype, shape, offsets = raw["dtype"], raw["shape"], raw["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise ModelError(f"{where}: dtype {dtype!r} is not one of {', '.join(DTYPE_BITS)}")
    if not _are_sizes(shape) or len(shape) > MAX_DIMENSIONS:
        raise ModelError(
            f"{where}: shape must be at most {MAX_DIMENSIONS} integers from 0 to 2^63, found {shape!r}"
        )
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise ModelError(
            f"{where}: data_offsets must be two integers that do not run backwards, found {offsets!r}"
        )
    begin, end = offsets
    bits = math.prod(shape) * DTYPE_BITS[dtype]
    if bits != 8 * (end - begin):
        raise ModelError(
            f"{where}: shape {shape} of {dtype} takes {bits // 8} bytes, data_offsets give {end - begin}"
        )
    return TensorEntry(dtype, tuple(shape), begin, end)


def _are_sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(each) is int and 0 <= each < 1 << 63 for each in value)
