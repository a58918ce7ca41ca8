"""Reports kernels that compile while a node serves: each delays all requests of a launch by a second or more."""

from __future__ import annotations

from collections.abc import Callable

from common.engine.ops.triton_kernel import report_compilations
from common.observability.logs import Log

COMPILE_SECONDS = 60.0  # announced for one kernel


def report_late_compilations(log: Log, announce: Callable[[float], None] = lambda seconds: None) -> None:
    """Warn of each later compilation in this process.

    `announce(seconds)` is called before it, on the thread that launches the kernel: its loop will be silent.
    """
    report_compilations(
        lambda name, seconds: log.warning("kernel compiled late", kernel=name, seconds=seconds),
        lambda: announce(COMPILE_SECONDS),
    )
