"""Runs a program with Triton's interpreter, which has to be chosen before Triton is imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run_interpreted(program: str) -> None:
    """Run a program that prints "equal" at its end. Skips the test without Triton."""
    pytest.importorskip("triton")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.stdout.strip() == "equal", done.stderr[-3000:]
