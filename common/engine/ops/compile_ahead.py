"""Compiles kernels on several threads before they are launched, so that a node with an empty cache starts sooner.

A kernel is compiled for the shapes and types of a launch, which only the code that launches it knows. So that code runs
once within `compiling_ahead`, where launches compile on other threads and run nothing. What it computes is meaningless,
and lies in the memory of graphs that are dropped: it must not be read on the host, kept for later (as in a cache), or
used as indices outside a capture.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from typing import Any

import torch

from common.engine.ops.triton_kernel import compiling_only, has_triton, triton

MAX_THREADS = 32  # beyond, Triton's share of Python, a fifth of a compilation, is what takes the time


class KernelsAhead:
    """The kernels that are being compiled."""

    def __init__(self, mode: Any) -> None:
        self._mode = mode  # triton.AsyncCompileMode
        self._missed = 0

    def collect(self) -> None:
        """Let launches find what has been compiled so far; they look for the rest again, which takes 0.2 ms each."""
        for kernel in list(self._mode.future_kernels.values()):
            if kernel.future.done():
                kernel.result(ignore_errors=True)

    def were_cached(self) -> bool:
        """Return whether everything so far was in Triton's cache on disk; wait until that is known."""
        return not any(self._missed for _ in as_completed(list(self._mode.raw_futures)))

    def count(self, *, cache_hit: bool, **_: object) -> None:
        """Take note of a compilation; Triton calls this on any thread."""
        if not cache_hit:
            self._missed += 1


@contextmanager
def compiling_ahead(device: torch.device, threads: int | None = None) -> Iterator[KernelsAhead]:
    """Compile what is launched in this context on other threads, and launch nothing. Leaving it waits for them.

    A kernel that does not compile, or does not fit the GPU, raises where it is launched after this context, as it would
    without it. Needs Triton; other threads of the process must not launch kernels meanwhile.

    Args:
        threads: by default, as many as the process has cores.
    """
    assert has_triton(), "nothing to compile"
    count = threads or min(MAX_THREADS, len(os.sched_getaffinity(0)))
    on_device = (torch.cuda.set_device, (device,)) if device.type == "cuda" else (None, ())
    with ThreadPoolExecutor(count, "compile", *on_device) as pool:
        mode = triton.AsyncCompileMode(_LoadingExecutor(pool), ignore_errors=True)
        kernels = KernelsAhead(mode)
        before = triton.knobs.compilation.listener
        triton.knobs.compilation.listener = kernels.count
        try:
            with compiling_only(), mode:
                yield kernels
        finally:
            triton.knobs.compilation.listener = before


class _LoadingExecutor(Executor):
    """Compiles a kernel and loads it onto the GPU, for which Triton also compiles a launcher in C."""

    def __init__(self, pool: Executor) -> None:
        self._pool = pool

    def submit(self, compile_kernel: Callable[..., Any], /, *args: Any, **options: Any) -> Future[Any]:
        return self._pool.submit(_loaded, compile_kernel)


def _loaded(compile_kernel: Callable[[], Any]) -> Any:
    compiled = compile_kernel()
    _ = compiled.run  # a property, which loads the kernel
    return compiled
