"""Facts for every result file: date, machine, versions, commit."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def describe() -> dict[str, Any]:
    """Collect the facts that are needed to interpret a measurement."""
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": f"{_cpu()}, {os.cpu_count()} cores",
        "gpus": _gpus(),
        "python": platform.python_version(),
        "torch": importlib.metadata.version("torch"),
        "commit": _run("git", "-C", str(ROOT), "rev-parse", "--short", "HEAD") or "unknown",
    }


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


def _gpus() -> list[str]:
    return _run("nvidia-smi", "--query-gpu=name", "--format=csv,noheader").splitlines()


def _run(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""
