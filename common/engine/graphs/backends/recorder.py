"""Chooses the recorder of kernels for a device: CUDA graphs on a GPU, the tape on the CPU."""

from __future__ import annotations

import torch

from common.engine.graphs.backends.base import Recorder
from common.engine.graphs.backends.cuda import CudaRecorder
from common.engine.graphs.backends.tape import TapeRecorder


def recorder_for(device: torch.device) -> Recorder:
    """Return a recorder with a memory pool of its own."""
    return CudaRecorder(device) if device.type == "cuda" else TapeRecorder()
