"""The files of a Hugging Face model directory: JSON, the list of weight files, a fingerprint of all. No torch."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from common.checkpoint.model_directory import MIB, opened, read_bytes
from common.checkpoint.model_json import MAX_VALUES, parse_json
from common.checkpoint.safetensors_header import TensorEntry, WeightFile, read_header
from common.errors import ModelError
from common.observability.start_progress import progressed

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
PICKLED = ".bin"  # written by torch.save
FOREIGN_WEIGHTS = (
    PICKLED,
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
SAMPLE_BYTES = 256
MAX_CONFIG_BYTES = 4 * MIB
MAX_INDEX_BYTES = 64 * MIB  # the index of a checkpoint with 90,000 tensors has 9 MB
MAX_INDEX_VALUES = 1_000_000
MAX_WEIGHT_FILES = 4096
MAX_TENSORS = 500_000  # in all files together


def read_json(path: Path, most: int = MAX_CONFIG_BYTES, max_values: int = MAX_VALUES) -> dict[str, Any]:
    """Read a JSON object of at most `most` bytes. Raises ModelError with the file and what is wrong with it."""
    value = parse_json(read_bytes(path, most), str(path), max_values)
    if not isinstance(value, dict):
        raise ModelError(f"{path} contains a {type(value).__name__}, not a JSON object")
    return value


def indexed_names(index: Path) -> list[str]:
    """Return the sorted file names of a checkpoint's index, without checking that they exist. Raises ModelError."""
    weight_map = read_json(index, MAX_INDEX_BYTES, MAX_INDEX_VALUES).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{index} has no weight_map")
    if not all(isinstance(name, str) for name in weight_map.values()):
        raise ModelError(f"{index}: weight_map must give the name of a file for each tensor")
    names = sorted(set(weight_map.values()))
    if len(names) > MAX_WEIGHT_FILES:
        raise ModelError(f"{index} names {len(names)} files; at most {MAX_WEIGHT_FILES} are read")
    for name in names:
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise ModelError(f"{index} names {name!r}; only *.safetensors files beside it are loaded")
    return names


def weight_paths(directory: Path) -> list[Path]:
    """Return the safetensors files of a model directory in a stable order; other weights are refused by name."""
    index = directory / INDEX
    if index.is_file():
        paths = [directory / name for name in indexed_names(index)]
        for path in paths:
            if not path.is_file():
                raise ModelError(
                    f"{index} names {path.name}, which is not in {directory}: the download or copy is incomplete"
                )
        return paths
    single = directory / SINGLE
    if single.is_file():
        return [single]
    foreign = foreign_weights(directory)
    found = f"found {', '.join(foreign[:4])}" if foreign else "found no weights"
    remedy = f"convert others with transformers' save_pretrained, or {PICKLED} files with deploy/convert"
    if any(name.endswith(PICKLED) for name in foreign):
        remedy = f"deploy/convert {directory} writes them from {PICKLED} files"
    raise ModelError(
        f"{directory}: {found}; supported weights are {SINGLE} or {INDEX} with its safetensors files ({remedy})"
    )


def foreign_weights(directory: Path) -> list[str]:
    """Return the names of weight files in other formats, sorted. Raises ModelError."""
    try:
        return sorted(path.name for path in directory.iterdir() if path.suffix in FOREIGN_WEIGHTS)
    except OSError as error:
        raise ModelError(f"cannot read {directory}: {error.strerror or error}") from error


def read_weight_files(directory: Path) -> list[WeightFile]:
    """Return the headers of all weight files. Raises ModelError if two files contain the same tensor."""
    files: list[WeightFile] = []
    owners: dict[str, Path] = {}
    for path in weight_paths(directory):
        file = read_header(path)
        files.append(file)
        if len(owners) + len(file.tensors) > MAX_TENSORS:
            raise ModelError(
                f"{directory}: the weight files have more than the {MAX_TENSORS} tensors that are read"
            )
        for name in file.tensors:
            if name in owners:
                raise ModelError(f"tensor {name} is in both {owners[name].name} and {file.path.name}")
            owners[name] = file.path
    return files


def read_tensors(directory: Path) -> dict[str, TensorEntry]:
    """Return the tensors of all weight files by name. Raises ModelError as `read_weight_files` does."""
    return {name: entry for file in read_weight_files(directory) for name, entry in file.tensors.items()}


def _weight_facts(file: WeightFile) -> Iterator[bytes]:
    with opened(file.path) as handle:
        yield f"{file.path.name} {os.fstat(handle.fileno()).st_size}".encode()
        for name, entry in sorted(file.tensors.items()):
            yield f"{name} {entry.dtype} {entry.shape} {entry.begin} {entry.end}".encode()
            middle = (entry.begin + entry.end) // 2
            yield os.pread(handle.fileno(), min(SAMPLE_BYTES, entry.end - middle), file.data_start + middle)
            # A slow disk may take a while for each, and a large checkpoint has 100,000 of them.
            progressed()


def fingerprint(directory: Path, config_facts: str) -> str:
    """Return sha256 (hex) over `config_facts`, every header and 256 bytes from the middle of every tensor.

    The sampled bytes distinguish a model from its fine-tune, which has equal headers but different KV pages.
    """
    digest = hashlib.sha256(config_facts.encode())
    for file in read_weight_files(directory):
        for fact in _weight_facts(file):
            digest.update(len(fact).to_bytes(8, "little"))
            digest.update(fact)
    return digest.hexdigest()
