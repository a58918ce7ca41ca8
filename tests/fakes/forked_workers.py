"""A plugin of pytest that forks the processes of pytest-xdist from one that has collected the tests.

    python -m pytest -n 3 -p tests.fakes.forked_workers ...

Each would otherwise import torch and transformers, and compile all test files of a fresh checkout, which takes it half
a minute. They still collect the tests themselves, but from modules that they have from that process.
"""

from __future__ import annotations

import contextlib
import gc
import os
import shlex
import signal
import sys
from collections.abc import Sequence

import pytest
import torch
from execnet import XSpec
from execnet.gateway_base import get_execmodel, init_popen_io
from execnet.gateway_base import serve as run_worker

from tests.fakes.socket_forks import serve, start_server


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config, specs: Sequence[XSpec]) -> None:
    """Name the program that gets a fork in place of the interpreter. CUDA does not work in forks."""
    if torch.cuda.is_available():
        return
    given = config.invocation_params
    arguments = start_server(
        "tests.fakes.forked_workers", *given.args, environment=dict(os.environ), directory=given.dir
    )
    # Ctrl-C in a terminal reaches the fork itself, which ends its fixtures before the client may end.
    command = ["env", "--ignore-signal=INT", sys.executable, *arguments]
    for spec in specs:
        if spec.popen and not spec.python:
            spec.python = shlex.join(command)


class _ForgetFailed:
    """Removes modules that were skipped or could not be imported, so that forks import them again and say why."""

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.passed or report.fspath is None:
            return
        path = os.path.abspath(report.fspath)
        for name, module in list(sys.modules.items()):
            if getattr(module, "__file__", None) == path:
                del sys.modules[name]


def main(path: str, arguments: Sequence[str]) -> None:
    """Collect the tests that the arguments select and serve forks. What is wrong with them, the forks will report."""
    with (
        open(os.devnull, "w") as nowhere,
        contextlib.redirect_stdout(nowhere),
        contextlib.redirect_stderr(nowhere),
    ):
        pytest.main([*arguments, "--collect-only", "-n", "0"], plugins=[_ForgetFailed()])
    gc.collect()
    gc.freeze()
    if serve(path):
        signal.signal(signal.SIGINT, signal.default_int_handler)
        # The program that the other side sends to an interpreter: execnet itself, which is here already.
        sys.stdin.readline()
        streams = init_popen_io(get_execmodel("main_thread_only"))
        streams.write(b"1")
        run_worker(streams, id=f"fork-{os.getpid()}")  # type: ignore[arg-type]


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
