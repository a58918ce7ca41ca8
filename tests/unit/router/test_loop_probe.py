"""The bench program that starts a router with a probe in its event loop."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.fakes.waiting import PATIENCE


def test_the_probed_router_takes_the_options_of_the_router(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.bench.loop_probe", str(tmp_path / "probe.json"), "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    assert "launch_router" in done.stdout
