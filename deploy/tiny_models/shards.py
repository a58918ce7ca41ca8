"""Writes large checkpoints fast: safetensors files whose tensors are made while several threads write them."""

from __future__ import annotations

import json
import math
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

import torch
from torch import Tensor

SHARD_BYTES = 2 << 30
CHUNK_BYTES = 32 << 20  # copied from the device and written at a time
MAX_THREADS = 32
DTYPES: Mapping[torch.dtype, str] = {torch.bfloat16: "BF16", torch.float32: "F32"}


@dataclass(frozen=True, slots=True)
class Stored:
    """One tensor of the checkpoint.

    Attributes:
        make: returns its values on the device, of this shape and any dtype.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype  # in the file
    make: Callable[[], Tensor]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def write_shards(
    directory: Path, tensors: Sequence[Stored], device: torch.device, most: int = SHARD_BYTES
) -> None:
    """Write the tensors, in their order, to files of about `most` bytes, and their index.

    Tensors are made one at a time. One thread writes each file, since writes to one file would wait for each other.
    """
    shards = _divided(tensors, most)
    names = [f"model-{index + 1:05d}-of-{len(shards):05d}.safetensors" for index in range(len(shards))]
    making = threading.Lock()
    with ThreadPoolExecutor(min(MAX_THREADS, os.cpu_count() or 1, len(shards))) as threads:
        written = [
            threads.submit(_write_shard, directory / name, shard, device, making)
            for name, shard in zip(names, shards, strict=True)
        ]
        for each in written:
            each.result()
    index = {
        "metadata": {"total_size": sum(tensor.num_bytes for tensor in tensors)},
        "weight_map": {
            tensor.name: name for name, shard in zip(names, shards, strict=True) for tensor in shard
        },
    }
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def _divided(tensors: Sequence[Stored], most: int) -> list[list[Stored]]:
    """Divide them into runs of at most `most` bytes; a larger tensor has a run of its own."""
    shards: list[list[Stored]] = []
    size = most
    for tensor in tensors:
        if size + tensor.num_bytes > most:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += tensor.num_bytes
    return shards


def _header(shard: Sequence[Stored]) -> bytes:
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for tensor in shard:
        offsets = [at, at := at + tensor.num_bytes]
        entries[tensor.name] = {
            "dtype": DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": offsets,
        }
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


@torch.no_grad()
def _write_shard(path: Path, shard: Sequence[Stored], device: torch.device, making: threading.Lock) -> None:
    size = min(CHUNK_BYTES, max(tensor.num_bytes for tensor in shard))
    on_gpu = device.type == "cuda"
    buffer = torch.empty(size, dtype=torch.uint8, pin_memory=on_gpu)
    with path.open("wb", buffering=0) as file:
        file.write(_header(shard))
        for tensor in shard:
            with making:
                values = tensor.make().to(tensor.dtype).contiguous()
                if on_gpu:
                    torch.cuda.current_stream(device).synchronize()
            assert values.shape == tensor.shape, (tensor.name, values.shape)
            # A stream of this thread, since copies in the stream that makes tensors would wait for it.
            stream = torch.cuda.Stream(device) if on_gpu else None  # type: ignore[no-untyped-call]
            with torch.cuda.stream(stream):
                _write_values(file, values.view(-1).view(torch.uint8), buffer)


def _write_values(file: FileIO, values: Tensor, buffer: Tensor) -> None:
    """Write bytes [n] through the host's buffer."""
    for begin in range(0, values.numel(), buffer.numel()):
        chunk = values[begin : begin + buffer.numel()]
        staged = buffer[: chunk.numel()]
        staged.copy_(chunk)  # waits until it is there
        left = memoryview(staged.numpy())  # type: ignore[arg-type]
        while left:
            left = left[file.write(left) :]
