"""CUDA MPS: a server in which kernels of several processes run on a GPU at the same time.

Without it the processes take turns on the GPU. Facts are from NVIDIA's Multi-Process Service guide.
"""

from __future__ import annotations

import os
from pathlib import Path

DIRECTORY = "CUDA_MPS_PIPE_DIRECTORY"  # environment: the directory of the server's sockets
LOG_DIRECTORY = "CUDA_MPS_LOG_DIRECTORY"
# Environment: the priority of a client's kernels. Those of low priority wait while others wait.
PRIORITY, LOW = "CUDA_MPS_CLIENT_PRIORITY", "1"
DEFAULT_DIRECTORY = Path("/tmp/nvidia-mps")


def mps_is_used() -> bool:
    """Return whether kernels of this process run inside an MPS server, which outlives its clients."""
    return DIRECTORY in os.environ or (DEFAULT_DIRECTORY / "control").exists()
