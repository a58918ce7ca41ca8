"""Every kernel compiles for an H200: the interpreter takes much that the compiler, or the GPU, does not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
SHARED_MEMORY = (
    232_448  # bytes that a block may have on compute capability 9.0 (CUDA C++ programming guide, 21.7)
)


@pytest.mark.timeout(1200)  # two busy cores
def test_every_kernel_compiles_for_an_h200(tmp_path: Path) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)  # what was compiled before proves nothing
    done = subprocess.run(
        [sys.executable, "-m", "tests.fakes.hopper"],
        cwd=Path(__file__).parents[3],
        env=environment,
        capture_output=True,
        text=True,
        timeout=1100,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    *launches, last = map(json.loads, done.stdout.splitlines())
    assert {each["kernel"] for each in launches} == set(last["kernels"])
    assert len(last["kernels"]) >= 20
    for each in launches:
        assert each["shared"] <= SHARED_MEMORY, each
