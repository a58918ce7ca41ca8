"""Lets the processes of a cluster compute on one GPU at the same time: `process.gpu_sharing`."""

from __future__ import annotations

import errno
import os
import socket
import time
from pathlib import Path

from common import mps
from common.config import Resolved
from common.config.devices import SHARING
from common.config.run_directory import run_directory
from common.errors import ConfigError

SERVER = "mps.server"  # the process that runs the MPS server; names of nodes contain no dots
PATIENCE = 30.0  # seconds; deploy/up starts the server and the nodes at the same time
ASK_INTERVAL = 0.05


def server_directory(resolved: Resolved) -> Path:
    """Return the directory of the sockets of this cluster's MPS server."""
    return run_directory(resolved) / "mps"


def server_answers(directory: Path) -> bool:
    """Return whether an MPS server has its socket there, and not only the file of one that has ended."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as asking:
        asking.setblocking(False)
        # The server's socket is of another kind, which is what the kernel says only while somebody has it open.
        return asking.connect_ex(str(directory / "control")) in (0, errno.EPROTOTYPE)


def join_sharing(resolved: Resolved, on_gpu: bool, prefill: bool, patience: float = PATIENCE) -> None:
    """Let this process compute inside the cluster's MPS server; call it before CUDA starts.

    Raises ConfigError if there is no server.
    """
    wanted = resolved.cluster.process.gpu_sharing
    if wanted == "turns" or not on_gpu:
        return
    directory, deadline = server_directory(resolved), time.monotonic() + patience
    while not server_answers(directory):
        if time.monotonic() > deadline:
            raise ConfigError(
                SHARING,
                f"{wanted} needs the MPS server that deploy/up starts, and none answers in {directory}; with the "
                "launch scripts leave this key out, start nvidia-cuda-mps-control yourself and set its variables",
            )
        time.sleep(ASK_INTERVAL)
    os.environ[mps.DIRECTORY] = str(directory)
    if prefill and wanted == "decode_first":
        os.environ[mps.PRIORITY] = mps.LOW
