"""The number of torch's threads on the CPU."""

from __future__ import annotations

import torch

GPU_NODE_THREADS = 4  # little is computed there: pixels, copies of small arrays


def limit_threads(device: torch.device, threads: int) -> None:
    """Set the number of torch's threads on the CPU; `threads` is that of a node on the CPU, 0: torch's default.

    The default is one per core, in each process and again in each thread that computes. A node on a GPU has little to
    compute on the CPU, and a machine with many cores has many such processes.
    """
    if device.type == "cpu":
        if threads:
            torch.set_num_threads(threads)
    elif torch.get_num_threads() > GPU_NODE_THREADS:
        torch.set_num_threads(GPU_NODE_THREADS)
