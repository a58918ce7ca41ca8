"""A recorder that is torch's profiler: operators of all threads of the process, and kernels of its GPU."""

from __future__ import annotations

from pathlib import Path

import torch
from torch._C._profiler import _ExperimentalConfig as ProfileOptions
from torch.profiler import ProfilerActivity, profile


class TorchTrace:
    """One recording. `stop` and `save` hold the interpreter lock for some microseconds per event."""

    def __init__(self) -> None:
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        # The thread that starts it is not the one that computes.
        options = ProfileOptions(profile_all_threads=True)
        self._profile = profile(activities=activities, experimental_config=options)

    def start(self) -> None:
        self._profile.start()

    def stop(self) -> int:
        self._profile.stop()
        profiler = self._profile.profiler
        results = None if profiler is None else profiler.kineto_results
        return 0 if results is None else len(results.events())

    def save(self, file: Path) -> None:
        self._profile.export_chrome_trace(str(file))
