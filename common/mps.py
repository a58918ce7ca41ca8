"""CUDA MPS: a server in which kernels of several processes run on a GPU at the same time.

Without it the processes take turns on the GPU. Facts are from NVIDIA's Multi-Process Service guide.
"""

from __future__ import annotations

import os
from pathlib import Path

DIRECTORY = "CUDA_MPS_PIPE_DIRECTORY"  # environment: the directory of the server's sockets
DEFAULT_DIRECTORY = Path("/tmp/nvidia-mps")


def mps_is_used() -> bool:
    """Return whether kernels of this process run inside an MPS server, which outlives its clients."""
    return DIRECTORY in os.environ or (DEFAULT_DIRECTORY / "control").exists()
