"""Starts the ranks of `peer_rank` as processes; without GPUs as forks, which need not import torch again."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from common.engine.collectives.endpoints import open_endpoints
from tests.cluster import fork_server
from tests.cluster.fork_server import Started
from tests.fakes.waiting import PATIENCE

ROOT = Path(__file__).parents[2]


def _start(
    device: str, module: Sequence[str], environment: dict[str, str], descriptors: Sequence[int]
) -> Started:
    if device == "cpu":
        with open(2, "wb", closefd=False) as log:
            return fork_server.start(module, ROOT, environment, log, descriptors=descriptors)
    command = [sys.executable, "-m", *module]
    return subprocess.Popen(command, pass_fds=descriptors, cwd=ROOT, env=environment)


def run_peers(devices: Sequence[str], environment: Mapping[str, str]) -> list[int]:
    """Run a rank on each of these devices and return their exit statuses."""
    processes: list[Started] = []
    for device, endpoint in zip(devices, open_endpoints(len(devices)), strict=True):
        text = msgspec.json.encode(endpoint).decode()
        module = ["tests.fakes.peer_rank", text, device]
        given = {**os.environ, **environment}
        processes.append(_start(device, module, given, endpoint.descriptors))
        endpoint.close()
    try:
        return [process.wait(2 * PATIENCE) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
