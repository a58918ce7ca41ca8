"""The router's spawn process in test clusters: it forks text workers instead of starting a Python for each of them.

    python -m tests.fakes.text_forks            as router.process.spawn_process
    python -m tests.fakes.text_forks PATH       serves forks of the same at the socket PATH (socket_forks.py)

A router has four text workers, which import for most of a second of CPU time each, so a short cluster spent more on
them than on its nodes. A fork runs the same `main` under the same limits. Workers that are started without a fork are
tested in tests/unit/router/text, and in clusters by the commands of deploy/.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import signal
import subprocess
import sys
from functools import partial
from typing import Any

from common.one_thread import ONE_THREAD

os.environ.update(ONE_THREAD)  # before libraries are loaded, because a fork keeps their threads and memory

from router.process import spawn_process
from router.text import channel, process
from tests.fakes.forked_main import run_and_exit
from tests.fakes.socket_forks import serve

ARENA_MAX = -8  # glibc's M_ARENA_MAX: the heaps of threads would take a part of each fork's address space


class _Fork:
    """The part of subprocess.Popen that the spawn process uses."""

    def __init__(self, stdin: int, stdout: int, stderr: int, env: dict[str, str]) -> None:
        self.pid = os.fork()
        if self.pid == 0:
            run_and_exit(partial(_become_worker, stdin, stdout, stderr, env))

    def wait(self) -> int:
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)


def _become_worker(stdin: int, stdout: int, stderr: int, env: dict[str, str]) -> None:
    for number, descriptor in enumerate((stdin, stdout, stderr)):
        os.dup2(descriptor, number)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    os.environ.update(env)
    process.main()


def _become_spawn_process() -> None:
    """Run in a fork of the server."""
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    spawn_process.main()


def fork_workers() -> None:
    """Make a spawn process of this one, or of its forks, fork text workers."""
    ctypes.CDLL(None).mallopt(ARENA_MAX, 1)
    start = subprocess.Popen

    def start_or_fork(command: list[str], **options: Any) -> Any:
        return _Fork(**options) if tuple(command[1:]) == channel.PROGRAM else start(command, **options)

    subprocess.Popen = start_or_fork  # type: ignore[assignment, misc]
    gc.freeze()


def main() -> None:
    fork_workers()
    if len(sys.argv) == 1:
        spawn_process.main()
    elif serve(sys.argv[1]):
        run_and_exit(_become_spawn_process)


if __name__ == "__main__":
    main()
