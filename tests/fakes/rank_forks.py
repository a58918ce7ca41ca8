"""Starts the ranks of nodes in test clusters as forks of rank 0, in the place of `subprocess` in its module.

A node starts its other ranks before anything else. In a test cluster it is itself a fork of a process that has
imported torch (fork_server.py), so its forks save the seconds in which each rank would import it again. They have the
same parent, descriptors and end as processes that are started without a fork, which tests/unit/node/ranks tests.
"""

from __future__ import annotations

import faulthandler
import os
import runpy
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from subprocess import DEVNULL, TimeoutExpired

from tests.fakes.forked_main import run_and_exit

LOOK_SECONDS = 0.005
NAME = "_node.rank"  # of the processes; their command line is that of rank 0
__all__ = ["DEVNULL", "Popen", "TimeoutExpired"]


class Popen:
    """The part of subprocess.Popen that ranks are started with, for `python -m MODULE DESCRIPTOR`."""

    def __init__(
        self, command: Sequence[str], *, stdin: int, pass_fds: Sequence[int], preexec_fn: Callable[[], None]
    ) -> None:
        assert stdin == DEVNULL
        self._command = command
        self._reaping = threading.Lock()  # the watchdog's thread polls, too
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            run_and_exit(partial(_become_rank, preexec_fn, command[2], command[3:], pass_fds))

    def poll(self) -> int | None:
        with self._reaping:
            if self.returncode is None:
                ended, status = os.waitpid(self.pid, os.WNOHANG)
                if ended:
                    self.returncode = os.waitstatus_to_exitcode(status)
            return self.returncode

    def wait(self, timeout: float) -> int:
        until = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > until:
                raise TimeoutExpired(self._command, timeout)
            time.sleep(LOOK_SECONDS)
        return code

    def kill(self) -> None:
        with self._reaping:  # the number belongs to the process until it is reaped
            if self.returncode is None:
                os.kill(self.pid, signal.SIGKILL)


def _no_timer(*arguments: object, **options: object) -> None:
    pass


def _become_rank(
    begin: Callable[[], None], module: str, arguments: Sequence[str], kept: Sequence[int]
) -> None:
    begin()
    Path("/proc/self/comm").write_text(NAME)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    below = 3
    for descriptor in (*sorted(kept), os.sysconf("SC_OPEN_MAX")):
        os.closerange(below, descriptor)
        below = descriptor + 1
    sys.argv = [module, *arguments]
    # Its thread, which rank 0 has started, was not forked, and setting the timer again would wait for it.
    faulthandler.dump_traceback_later = faulthandler.cancel_dump_traceback_later = _no_timer
    runpy.run_module(module, run_name="__main__", alter_sys=True)
