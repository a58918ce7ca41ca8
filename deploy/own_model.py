"""Writes the cluster file for one model on this machine: one prefill node and one decode node.

Without a GPU both nodes share the CPU, a single GPU is shared by both nodes, and of several GPUs each node gets one.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from common.checkpoint.model_config import ModelConfig
from common.checkpoint.model_files import weight_paths
from common.config.schema import DecodeSection, PrefillSection
from common.errors import ConfigError, ModelError
from common.speculation.directory import algorithm_of, compare_with_target, load_draft_config, max_steps
from deploy.cores import usable_cores
from deploy.gpus import Gpu

GIB = 1 << 30
SHARED_GPU = 0.93  # share of one GPU for both nodes; the driver and two CUDA contexts need the rest
# Share of a single GPU's memory, after the weights, for the prefill node. The decode node's pool holds every running
# request and gets the rest.
PREFILL_SHARE = 0.25
LARGE_GPU = 40 * GIB  # from this size a forward of LARGE_CHUNK tokens needs only a small part of the memory
LARGE_CHUNK = 8192
CPU_DECODE_SHARE, CPU_PREFILL_SHARE = 0.4, 0.2  # pools, as shares of the memory that the weights leave free
SHM_SHARE = 0.8  # share of /dev/shm, which holds the decode pool
POOL_STEP = 1024  # tokens; CPU pools are a multiple of it
FLOAT32 = 4  # bytes per value on a CPU node
STEPS = 3

HEADER = """\
# Written by deploy/up for {name}, and again at its next start. To change more than --set can,
# copy this file and run deploy/up COPY. Every key: deploy/clusters/example.yaml.
"""


@dataclass(frozen=True, slots=True)
class Machine:
    """The resources that the nodes can use."""

    gpus: tuple[Gpu, ...]
    cores: int
    free_memory: int  # bytes of host memory
    free_shared: int  # bytes of /dev/shm

    @classmethod
    def of_this_host(cls, gpus: list[Gpu]) -> Machine:
        shared = shutil.disk_usage("/dev/shm").free if Path("/dev/shm").is_dir() else 0
        return cls(tuple(gpus), usable_cores(), _available_memory(), shared)

    def __str__(self) -> str:
        if not self.gpus:
            return f"the CPU ({self.cores} cores)"
        if len(self.gpus) == 1:
            return f"one GPU, shared by both nodes ({self.gpus[0].name})"
        return f"two GPUs, one for each node ({self.gpus[0].name}, {self.gpus[1].name})"


def cluster_sections(
    name: str, directory: Path, draft: Path | None, machine: Machine
) -> dict[str, dict[str, Any]]:
    """Return the sections of the cluster file. Raises ConfigError for an unsupported model or draft."""
    try:
        config = ModelConfig.load(directory)
        weights = stored_bytes(directory)
        sections: dict[str, dict[str, Any]] = {"model": {"path": str(directory), "served_name": name}}
        if draft is not None:
            weights += stored_bytes(draft)
            algorithm = algorithm_of(draft, directory)
            load_draft_config(draft, algorithm, config)
            compare_with_target(draft, algorithm, directory)
            sections["speculation"] = _speculation(algorithm, draft)
    except ModelError as error:
        raise ConfigError("", str(error)) from error
    if machine.gpus:
        return sections | _on_gpus(machine.gpus, weights)
    # CPU nodes compute in float32: a checkpoint with two bytes per value takes twice its size.
    widened = weights * (1 if config.dtype == "float32" else 2)
    return sections | _on_cpu(config, widened, machine)


def write_cluster_file(file: Path, name: str, sections: dict[str, dict[str, Any]]) -> None:
    """Replace the file atomically. Raises ConfigError."""
    temporary = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        file.parent.mkdir(mode=0o700, exist_ok=True)
        text = HEADER.format(name=name) + yaml.safe_dump(sections, sort_keys=False)
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(file)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise ConfigError("", f"cannot write {file}: {error.strerror or error}") from error


def lock_path(file: Path) -> Path:
    """Return the file whose lock keeps others from writing the cluster file of a model; the user's own have none."""
    return file.with_name(f".{file.name}.lock")


def _speculation(algorithm: str, draft: Path) -> dict[str, Any]:
    steps = min(STEPS, max_steps(draft, algorithm) or STEPS)
    return {"algorithm": algorithm, "draft_model_path": str(draft), "steps": steps}


def _on_gpus(gpus: tuple[Gpu, ...], weights: int) -> dict[str, dict[str, Any]]:
    least = min(gpu.total_bytes for gpu in gpus[:2])
    prefill: dict[str, Any] = {"nodes": [{"name": "prefill-0", "device": "cuda:0"}]}
    if len(gpus) == 1:
        rest = max(SHARED_GPU * least - 2 * weights, 0.0)
        share = min(max((weights + PREFILL_SHARE * rest) / least, 0.1), SHARED_GPU / 2)
        prefill["memory_fraction"] = round(share, 3)
        decode: dict[str, Any] = {
            "nodes": [{"name": "decode-0", "device": "cuda:0"}],
            "memory_fraction": round(SHARED_GPU - share, 3),
        }
    else:
        decode = {"nodes": [{"name": "decode-0", "device": "cuda:1"}]}
    if least >= LARGE_GPU:
        prefill["chunk_tokens"] = LARGE_CHUNK
    return {"prefill": prefill, "decode": decode}


def _on_cpu(config: ModelConfig, weights: int, machine: Machine) -> dict[str, dict[str, Any]]:
    """Return the threads of both nodes, and pools that fit besides the weights; a default that fits is left out."""
    per_token = 2 * config.num_layers * config.num_kv_heads * config.head_dim * FLOAT32
    free = max(machine.free_memory - 2 * weights, 0)
    decode = min(CPU_DECODE_SHARE * free, SHM_SHARE * machine.free_shared) / per_token
    prefill = CPU_PREFILL_SHARE * free / per_token
    sections: dict[str, dict[str, Any]] = {"process": {"threads": max(machine.cores // 2, 1)}}
    for name, tokens, default in (
        ("prefill", prefill, PrefillSection.CPU_POOL_TOKENS),
        ("decode", decode, DecodeSection.CPU_POOL_TOKENS),
    ):
        if tokens < default:
            sections[name] = {"pool_tokens": max(int(tokens) // POOL_STEP, 1) * POOL_STEP}
    return sections


def stored_bytes(directory: Path) -> int:
    return sum(path.stat().st_size for path in weight_paths(directory))


def _available_memory() -> int:
    """Return the bytes that can be allocated without swapping, according to the kernel."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    return 0
