"""The queue in which the CUDA driver keeps launches that the GPU has not begun."""

from __future__ import annotations

from collections.abc import MutableMapping

VARIABLE, DEEPEST = "CUDA_SCALE_LAUNCH_QUEUES", "4x"


def deepen_launch_queue(environment: MutableMapping[str, str]) -> None:
    """Let processes with this environment queue as many launches as the driver allows, unless it says otherwise.

    A launch waits while the queue is full. A prompt forward of 80 layers with a break in each does not fit into the
    usual queue: its launch took until the GPU had computed two thirds of it, and other requests waited for the host
    meanwhile (tests/bench/NOTES.md). This has no effect once CUDA is in use. Source: CUDA programming guide,
    environment variables.
    """
    environment.setdefault(VARIABLE, DEEPEST)
