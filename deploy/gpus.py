"""Finds the GPUs of this machine. Torch runs in a child process, because importing it takes seconds."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec

DEVICES = ("/dev/nvidia0", "/dev/dxg")  # the driver's first device, and WSL's
TIMEOUT = 120.0  # seconds; CUDA can hang on a GPU in a bad state
QUESTION = """
import json, torch
count = torch.cuda.device_count() if torch.cuda.is_available() else 0
found = [torch.cuda.get_device_properties(index) for index in range(count)]
print(json.dumps([{"name": each.name, "total_bytes": each.total_memory} for each in found]))
"""


class Gpu(msgspec.Struct, frozen=True):
    """One device that torch can use, in the order of cuda:0, cuda:1."""

    name: str
    total_bytes: int


def driver_present() -> bool:
    """Return whether this machine has an NVIDIA driver, even if torch cannot use it."""
    return any(Path(device).exists() for device in DEVICES) or any(Path("/dev").glob("nvidia[0-9]*"))


def find_gpus() -> list[Gpu]:
    """Return the GPUs that torch sees under CUDA_VISIBLE_DEVICES; [] if there are none or torch cannot use them."""
    if not driver_present():
        return []
    try:
        asked = subprocess.run(
            [sys.executable, "-c", QUESTION], capture_output=True, timeout=TIMEOUT, check=True, text=True
        )
        return msgspec.json.decode(asked.stdout.strip().rpartition("\n")[2], type=list[Gpu])
    except (subprocess.SubprocessError, msgspec.DecodeError, OSError):
        return []
