"""The files of a Hugging Face model directory: JSON, safetensors headers, a fingerprint over all. No torch.

A weight file is safetensors: 8 bytes little-endian header length, a JSON header {name: {dtype, shape,
data_offsets}}, then the bytes. Reading headers alone says what a checkpoint holds and whether a file is
whole.
Source: https://github.com/huggingface/safetensors (format section of the README).
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.errors import ModelError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
FOREIGN_WEIGHTS = (
    ".bin",
    ".pt",
    ".pth",
    ".ckpt",
    ".pkl",
    ".gguf",
    ".ggml",
    ".h5",
    ".msgpack",
    ".onnx",
    ".npz",
)
MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library
SAMPLE_BYTES = 256


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of a weight file, as its header says."""

    dtype: str  # safetensors' spelling: F32, BF16, F16, I64 ...
    shape: tuple[int, ...]
    begin: int  # byte offsets behind the header
    end: int


@dataclass(frozen=True, slots=True)
class WeightFile:
    """One safetensors file: where it lies, where its bytes start and what it holds."""

    path: Path
    data_start: int
    tensors: Mapping[str, TensorEntry]

    @property
    def num_bytes(self) -> int:
        return sum(entry.end - entry.begin for entry in self.tensors.values())


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object. `ModelError` names the file when it is missing, not JSON or not an object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror or error}") from error
    except ValueError as error:
        raise ModelError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} holds a {type(value).__name__}, not a JSON object")
    return value


def weight_paths(directory: Path) -> list[Path]:
    """The safetensors files of a model directory in a stable order; anything else is refused by name."""
    index = directory / INDEX
    if index.is_file():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ModelError(f"{index} has no weight_map")
        names = sorted({str(name) for name in weight_map.values()})
        for name in names:
            if Path(name).name != name or not name.endswith(".safetensors"):
                raise ModelError(f"{index} names {name!r}; only *.safetensors files beside it are loaded")
            if not (directory / name).is_file():
                raise ModelError(f"{index} names {name}, which is not in {directory}")
        return [directory / name for name in names]
    single = directory / SINGLE
    if single.is_file():
        return [single]
    foreign = sorted(p.name for p in directory.iterdir() if p.suffix in FOREIGN_WEIGHTS)
    found = f"found {', '.join(foreign[:4])}" if foreign else "found no weights"
    raise ModelError(
        f"{directory}: {found}; supported weights are {SINGLE} or {INDEX} with its safetensors files "
        "(convert others with transformers' save_pretrained)"
    )


def read_header(path: Path) -> WeightFile:
    """Parse and check one header. A truncated or corrupt file is a `ModelError` that names it."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            prefix = file.read(8)
            length = int.from_bytes(prefix, "little")
            if len(prefix) < 8 or length > min(MAX_HEADER_BYTES, size - 8):
                raise ModelError(f"{path} is not a whole safetensors file: its header is cut off or corrupt")
            raw = json.loads(file.read(length))
        tensors = {
            name: TensorEntry(e["dtype"], tuple(map(int, e["shape"])), *map(int, e["data_offsets"]))
            for name, e in raw.items()
            if name != "__metadata__"
        }
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{path} is not a safetensors file: its header is corrupt ({error})") from error
    expected = 8 + length + max((entry.end for entry in tensors.values()), default=0)
    if size != expected:
        raise ModelError(
            f"{path} has {size} bytes and its header wants {expected}: the file is truncated or corrupt"
        )
    return WeightFile(path, 8 + length, tensors)


def read_weight_files(directory: Path) -> list[WeightFile]:
    """The headers of every weight file, with no tensor in two of them."""
    files = [read_header(path) for path in weight_paths(directory)]
    owners: dict[str, Path] = {}
    for file in files:
        for name in file.tensors:
            if name in owners:
                raise ModelError(f"tensor {name} is in both {owners[name].name} and {file.path.name}")
            owners[name] = file.path
    return files


def _weight_facts(file: WeightFile) -> Iterator[bytes]:
    yield f"{file.path.name} {file.path.stat().st_size}".encode()
    with file.path.open("rb") as handle:
        for name, entry in sorted(file.tensors.items()):
            yield f"{name} {entry.dtype} {entry.shape} {entry.begin} {entry.end}".encode()
            middle = (entry.begin + entry.end) // 2
            yield os.pread(handle.fileno(), min(SAMPLE_BYTES, entry.end - middle), file.data_start + middle)


def fingerprint(directory: Path, config_facts: str) -> str:
    """sha256 (hex) over `config_facts`, every header and 256 bytes from the middle of every tensor.

    The sampled bytes tell apart a model and its fine-tune, whose headers are equal and whose KV pages are
    not.
    """
    digest = hashlib.sha256(config_facts.encode())
    for file in read_weight_files(directory):
        for fact in _weight_facts(file):
            digest.update(len(fact).to_bytes(8, "little"))
            digest.update(fact)
    return digest.hexdigest()
