"""Starts the ranks of `peer_rank` as processes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from common.engine.collectives.endpoints import open_endpoints
from tests.fakes.waiting import PATIENCE

ROOT = Path(__file__).parents[2]


def run_peers(devices: Sequence[str], environment: Mapping[str, str]) -> list[int]:
    """Run a rank on each of these devices and return their exit statuses."""
    processes = []
    for device, endpoint in zip(devices, open_endpoints(len(devices)), strict=True):
        text = msgspec.json.encode(endpoint).decode()
        command = [sys.executable, "-m", "tests.fakes.peer_rank", text, device]
        given = {**os.environ, **environment}
        processes.append(subprocess.Popen(command, pass_fds=endpoint.descriptors, cwd=ROOT, env=given))
        endpoint.close()
    try:
        return [process.wait(2 * PATIENCE) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
