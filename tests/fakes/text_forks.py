"""The router's spawn process in test clusters: it forks text workers instead of starting a Python for each of them.

    python -m tests.fakes.text_forks            as router.process.spawn_process
    python -m tests.fakes.text_forks PATH       serves forks of the same at the socket PATH (text_fork_client.py)

A router has four text workers, which import for most of a second of CPU time each, so a short cluster spent more on
them than on its nodes. A fork runs the same `main` under the same limits. Workers that are started without a fork are
tested in tests/unit/router/text, and in clusters by the commands of deploy/.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import resource
import selectors
import signal
import socket
import subprocess
import sys
from functools import partial
from typing import Any

from common.one_thread import ONE_THREAD

os.environ.update(ONE_THREAD)  # before libraries are loaded, because a fork keeps their threads and memory

from router.process import spawn_process
from router.text import channel, process
from tests.fakes.forked_main import run_and_exit

MAX_BYTES = 1 << 17  # of a client's environment
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


class _SpawnProcess:
    """A fork that is the spawn process of one router, and the connection of the client that waits for its end."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        content, streams, _, _ = socket.recv_fds(connection, MAX_BYTES, 3)
        directory, limits, *variables = content.decode(errors="surrogateescape").split("\0")
        self.pid = os.fork()
        if self.pid == 0:
            run_and_exit(partial(_become_spawn_process, streams, directory, limits, variables))
        for each in streams:
            os.close(each)
        with contextlib.suppress(OSError):  # the client was killed
            connection.send(str(self.pid).encode())

    def end(self, status: int) -> None:
        """Tell the client how the fork has ended."""
        with self.connection, contextlib.suppress(OSError):  # the client was killed
            self.connection.send(str(os.waitstatus_to_exitcode(status)).encode())


def _become_spawn_process(streams: list[int], directory: str, limits: str, variables: list[str]) -> None:
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGCHLD, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    # Above the three numbers that they get.
    for to, stream in enumerate([os.dup(each) for each in streams]):
        os.dup2(stream, to)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    os.chdir(directory)
    os.environ.clear()
    os.environ.update(each.partition("=")[::2] for each in variables)
    numbers = [int(each) for each in limits.split()]
    for which, limit in enumerate(zip(numbers[::2], numbers[1::2], strict=True)):
        resource.setrlimit(which, limit)
    spawn_process.main()


def serve(path: str) -> None:
    """Fork spawn processes until the process that started this one has ended, and with it this one's standard input."""
    for number in (signal.SIGINT, signal.SIGHUP):  # of a terminal; the forks end with their routers
        signal.signal(number, signal.SIG_IGN)
    ended, waking = socket.socketpair()
    for each in (ended, waking):
        each.setblocking(False)
    signal.set_wakeup_fd(waking.fileno())
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    running: dict[socket.socket, _SpawnProcess] = {}
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener,
        selectors.DefaultSelector() as selector,
    ):
        listener.bind(path)
        listener.listen(64)
        print("ready", flush=True)
        for source in (listener, ended, sys.stdin):
            selector.register(source, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fileobj is sys.stdin:
                    return
                if key.fileobj is listener:
                    connection = listener.accept()[0]
                    running[connection] = _SpawnProcess(connection)
                    selector.register(connection, selectors.EVENT_READ)
                elif key.fileobj is ended:
                    ended.recv(4096)
                    for client, fork in list(running.items()):
                        found, status = os.waitpid(fork.pid, os.WNOHANG)
                        if found:
                            if client in selector.get_map():
                                selector.unregister(client)
                            running.pop(client).end(status)
                elif (killed := running.get(key.fileobj)) is not None:  # type: ignore[call-overload]
                    # Its client: the fork is still to be reaped.
                    selector.unregister(key.fileobj)
                    os.kill(killed.pid, signal.SIGKILL)


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
    if len(sys.argv) > 1:
        serve(sys.argv[1])
    else:
        spawn_process.main()


if __name__ == "__main__":
    main()
