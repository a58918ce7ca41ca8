"""Starts servers that fork themselves for each client that connects to a socket, and runs them.

A fork has the standard streams, directory, environment and limits of its client (fork_client.py).
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import os
import resource
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

CLIENT = Path(__file__).with_name("fork_client.py")
ROOT = Path(__file__).parents[2]
SECONDS = 60.0  # for a server to end
MAX_BYTES = 1 << 17  # of a client's environment


def start_server(
    module: str, *arguments: str, environment: dict[str, str], directory: Path = ROOT
) -> tuple[str, ...]:
    """Run `python -m MODULE PATH ARGUMENT ...`, which calls `serve(PATH)`, as long as this process runs.

    Return the arguments with which a Python gets a fork of it.
    """
    folder = tempfile.mkdtemp(prefix="tandem-forks-")
    path = f"{folder}/s"
    server = subprocess.Popen(
        [sys.executable, "-m", module, path, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=directory,
        env=environment,
    )
    assert server.stdin and server.stdout  # noqa: PT018
    assert server.stdout.readline() == b"ready\n", f"the server of forks of {module} has not started"
    owner = os.getpid()

    def end() -> None:
        if os.getpid() == owner:
            server.terminate()
            server.wait(SECONDS)
            shutil.rmtree(folder)

    atexit.register(end)
    return ("-I", "-S", str(CLIENT), path)


class _ServedFork:
    """A fork, and the connection of the client that waits for its end. In the fork itself `pid` is 0."""

    def __init__(self, connection: socket.socket, content: bytes, streams: list[int]) -> None:
        self.connection = connection
        directory, limits, *variables = content.decode(errors="surrogateescape").split("\0")
        self.pid = os.fork()
        if self.pid == 0:
            _take_place(streams, directory, limits, variables)
            return
        for each in streams:
            os.close(each)
        with contextlib.suppress(OSError):  # the client was killed
            connection.send(str(self.pid).encode())

    def end(self, status: int) -> None:
        """Tell the client how the fork has ended."""
        with self.connection, contextlib.suppress(OSError):  # the client was killed
            self.connection.send(str(os.waitstatus_to_exitcode(status)).encode())


def _take_place(streams: list[int], directory: str, limits: str, variables: list[str]) -> None:
    """Make this fork what its client is, without the server's descriptors."""
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGCHLD, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    # Above the three numbers that they get.
    moved = [fcntl.fcntl(each, fcntl.F_DUPFD, 3) for each in streams]
    for to, stream in enumerate(moved):
        os.dup2(stream, to)
    for each in {*streams, *moved} - {0, 1, 2}:
        os.close(each)
    os.chdir(directory)
    os.environ.clear()
    os.environ.update(each.partition("=")[::2] for each in variables)
    numbers = [int(each) for each in limits.split()]
    for which, limit in enumerate(zip(numbers[::2], numbers[1::2], strict=True)):
        resource.setrlimit(which, limit)


def serve(path: str) -> bool:
    """Return True in each fork, and False when standard input ends: the process that started the server has ended."""
    for number in (signal.SIGINT, signal.SIGHUP):  # of a terminal; the forks end with their clients
        signal.signal(number, signal.SIG_IGN)
    ended, waking = socket.socketpair()
    for each in (ended, waking):
        each.setblocking(False)
    signal.set_wakeup_fd(waking.fileno())
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    # Clients that have not sent yet what their forks shall be. A client may be killed before it does.
    connected: dict[object, socket.socket] = {}
    running: dict[socket.socket, _ServedFork] = {}
    with (
        ended,
        waking,
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
                    return False
                if key.fileobj is listener:
                    connection = listener.accept()[0]
                    connected[connection] = connection
                    selector.register(connection, selectors.EVENT_READ)
                elif (asking := connected.pop(key.fileobj, None)) is not None:
                    content, streams, _, _ = socket.recv_fds(asking, MAX_BYTES, 3)
                    if not content:
                        selector.unregister(asking)
                        asking.close()
                        continue
                    running[asking] = fork = _ServedFork(asking, content, streams)
                    if fork.pid == 0:
                        for each in (*connected.values(), *running):
                            each.close()
                        return True
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
