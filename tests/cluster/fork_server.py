"""Starts the processes of test clusters as forks of one that has already imported torch, which takes seconds per node.

`start` asks the server of this test process, which runs as `python -m tests.cluster.fork_server`. A fork runs the same
entry point as `python -m MODULE` does, with the same arguments, environment, directory and log. It ends without the
interpreter's last steps, which would visit, and so copy, all that was imported: half of the time of a short cluster.
Starts and ends without a fork are tested with the commands of deploy/.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import gc
import json
import os
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import BinaryIO, NoReturn, Protocol

from tests.fakes import rank_forks
from tests.fakes.network_namespace import enter_network
from tests.fakes.text_fork_server import text_fork_program

# typer imports parts of pydantic when it parses arguments.
PRELOADED = (
    "deploy.movable_node.build",
    "decode_node.build",
    "prefill_node.build",
    "router.build",
    "pydantic.type_adapter",
    "pydantic.fields",
)
TEXT_FORKS = ("-m", "tests.fakes.text_forks")  # spawn process of routers in a network of their own
MAX_BYTES = 65_536  # limit for one order
MAX_DESCRIPTORS = 32


class Started(Protocol):
    """The part of subprocess.Popen that tests use."""

    pid: int
    returncode: int | None

    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> int: ...
    def send_signal(self, sig: int) -> None: ...
    def terminate(self) -> None: ...
    def kill(self) -> None: ...


class Fork:
    """A process that the server forked. The server reports its end through `connection`. Threads may share it."""

    def __init__(self, connection: socket.socket, arguments: Sequence[str]) -> None:
        self._connection = connection
        # Not closed before: another thread may wait for it.
        weakref.finalize(self, connection.close)
        self._reading = threading.Lock()
        self._arguments = list(arguments)
        self.returncode: int | None = None
        self.pid = int(connection.recv(64))

    def poll(self) -> int | None:
        if self.returncode is None:
            self._read(0.0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            self._read(timeout)
        if self.returncode is None:
            assert timeout is not None
            raise subprocess.TimeoutExpired(self._arguments, timeout)
        return self.returncode

    def send_signal(self, sig: int) -> None:
        if self.poll() is None:
            # The server may have reaped the process, and not have reported its end yet.
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, sig)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _read(self, timeout: float | None) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._connection, selectors.EVENT_READ)
            if not selector.select(timeout):
                return
        with self._reading:
            if self.returncode is None:
                ended = self._connection.recv(64)
                assert ended, "the fork server has ended"
                self.returncode = os.waitstatus_to_exitcode(int(ended))


@dataclass(frozen=True, slots=True)
class Order:
    """What a fork runs."""

    module: list[str]  # with its arguments
    directory: str
    environment: dict[str, str]
    network: str | None  # path of its network namespace; None for the server's
    descriptors: list[int]  # of the test process, which the fork has under the same numbers

    def run(self) -> NoReturn:
        """Run the module as the main program of this process."""
        if self.network is not None:
            enter_network(self.network)
        os.chdir(self.directory)
        os.environ.clear()
        os.environ.update(self.environment)
        sys.argv = list(self.module)
        try:
            runpy.run_module(self.module[0], run_name="__main__", alter_sys=True)
            sys.exit()
        except SystemExit as end:
            _ending.status = end.code
            raise


class _Ending:
    """Ends a fork with its status. Registered before all other exit functions, it runs after them and all threads."""

    def __init__(self) -> None:
        self.status: object = self  # no status: the interpreter ends the process as always

    def __call__(self) -> None:
        status = 0 if self.status is None else self.status
        if not isinstance(status, int):
            return
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):  # the disk may be full, the stream closed
                stream.flush()
        os._exit(status & 0xFF)


_ending = _Ending()


_server: socket.socket | None = None


def start(
    module: Sequence[str],
    directory: Path,
    environment: dict[str, str],
    log: BinaryIO,
    network: str | None = None,
    descriptors: Sequence[int] = (),
) -> Fork:
    """Run `python -m MODULE ...` in a fork of the server, which the first call of a process starts.

    `network`: path of a network namespace to run in. `descriptors`: as `pass_fds` of subprocess.Popen.
    """
    global _server
    if _server is None:
        _server = _launch(directory, environment)
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    order = Order(list(module), str(directory), environment, network, list(descriptors))
    with far:
        content = json.dumps(asdict(order)).encode()
        socket.send_fds(_server, [content], [far.fileno(), log.fileno(), *descriptors])
    return Fork(near, module)


def _launch(directory: Path, environment: dict[str, str]) -> socket.socket:
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with far:
        command = [sys.executable, "-m", "tests.cluster.fork_server", str(far.fileno())]
        process = subprocess.Popen(command, cwd=directory, env=environment, pass_fds=[far.fileno()])

    def end() -> None:
        near.close()
        process.wait(60)

    atexit.register(end)
    return near


class _Server:
    """Takes orders until the test process closes its end, and reaps its forks."""

    def __init__(self, orders: socket.socket) -> None:
        self._orders = orders
        self._forks: dict[int, socket.socket] = {}
        self._ended, waking = socket.socketpair()
        for each in (self._ended, waking):
            each.setblocking(False)
        self._waking = waking

    def serve(self) -> Order | None:
        """Return the order in a fork, and None in the server when the test process has ended."""
        signal.set_wakeup_fd(self._waking.fileno())
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        # Ctrl-C in a terminal, and its end, reach the server, too, which must outlive its forks.
        self._on_interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        selector = selectors.DefaultSelector()
        selector.register(self._orders, selectors.EVENT_READ)
        selector.register(self._ended, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fileobj is self._ended:
                    self._ended.recv(4096)
                    self._reap()
                    continue
                content, descriptors, _, _ = socket.recv_fds(self._orders, MAX_BYTES, MAX_DESCRIPTORS)
                if not content:
                    # A fork may end after this: its signal must not be written to a socket that is closed.
                    signal.set_wakeup_fd(-1)
                    return None
                report, log, *passed = descriptors
                reporting = socket.socket(fileno=report)
                pid = os.fork()
                if pid == 0:
                    order = Order(**json.loads(content))
                    selector.close()
                    self._become(reporting, log)
                    _renumber(passed, order.descriptors)
                    return order
                for each in (log, *passed):
                    os.close(each)
                reporting.send(str(pid).encode())
                self._forks[pid] = reporting

    def _reap(self) -> None:
        for pid in list(self._forks):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                with self._forks.pop(pid) as report, contextlib.suppress(OSError):  # nobody waits for it
                    report.send(str(status).encode())

    def _become(self, report: socket.socket, log: int) -> None:
        """Leave behind what belongs to the server."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, self._on_interrupt)
        # The default even for tests under nohup: a router lets a signal be that it was started to ignore.
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        for each in (self._orders, self._ended, self._waking, report, *self._forks.values()):
            each.close()
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)


def _renumber(descriptors: Sequence[int], numbers: Sequence[int]) -> None:
    """Give inheritable descriptors these numbers."""
    # A number that one of them shall have may be that of another one.
    free = max((*descriptors, *numbers), default=0) + 1
    moved = [fcntl.fcntl(each, fcntl.F_DUPFD, free) for each in descriptors]
    for each in descriptors:
        os.close(each)
    for each, number in zip(moved, numbers, strict=True):
        os.dup2(each, number)
        os.close(each)


def main() -> None:
    """Run the server, or in a fork the module that was ordered."""
    atexit.register(_ending)
    for name in PRELOADED:
        if find_spec(name.partition(".")[0]) is not None:  # newer versions of typer do without pydantic
            import_module(name)
    build = import_module("router.build")
    spawner = build.Spawner
    build.Spawner = partial(spawner, text_fork_program())  # type: ignore[attr-defined]
    import_module("common.node.ranks.processes").subprocess = rank_forks  # type: ignore[attr-defined]
    # Huge pages of a fork would be a copy of most of the memory of this process, which takes up to two seconds.
    import_module("common.huge_pages").SECONDS = 0.0  # type: ignore[attr-defined]
    # A collection in a fork would visit, and so copy, all that was imported.
    gc.collect()
    gc.freeze()
    order = _Server(socket.socket(fileno=int(sys.argv[1]))).serve()
    if order is not None:
        if order.network is not None:  # the server is in another one
            build.Spawner = partial(spawner, TEXT_FORKS)  # type: ignore[attr-defined]
        order.run()


if __name__ == "__main__":
    main()
