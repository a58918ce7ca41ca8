"""Which GPUs the nodes of this machine would find. Torch is asked in a process of its own: it takes seconds to load."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec

DEVICES = ("/dev/nvidia0", "/dev/dxg")  # the driver's first device, and WSL's
TIMEOUT = 120.0  # seconds; a GPU that is in a bad state makes CUDA wait
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
    """Whether this machine has an NVIDIA driver, whatever torch can do with it."""
    return any(Path(device).exists() for device in DEVICES) or any(Path("/dev").glob("nvidia[0-9]*"))


def find_gpus() -> list[Gpu]:
    """The GPUs that torch finds, as CUDA_VISIBLE_DEVICES has them; [] where there are none or torch cannot use them."""
    if not driver_present():
        return []
    try:
        asked = subprocess.run(
            [sys.executable, "-c", QUESTION], capture_output=True, timeout=TIMEOUT, check=True, text=True
        )
        return msgspec.json.decode(asked.stdout.strip().rpartition("\n")[2], type=list[Gpu])
    except (subprocess.SubprocessError, msgspec.DecodeError, OSError):
        return []
