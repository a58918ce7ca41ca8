"""Starts the router's child processes: starting one in the router would block its event loop until the child runs.

    python -m router.process.spawn_process

Its standard input is the router's socket (SOCK_SEQPACKET); it runs until that closes.

A `Start` carries one file descriptor: the channel between the router and the new process. It is answered by a
`Started` and, when the process has ended, by an `Ended`. The processes see from their channels when the router ends.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading

import msgspec

from router.process.child_process import START_BYTES

# Each process does one thing at a time within a limited address space, of which OpenBLAS would reserve 40 MiB per core.
ONE_THREAD = {name: "1" for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")}


class Start(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Run this Python program with the channel as its standard input."""

    number: int  # identifies the process; chosen by the router
    arguments: tuple[str, ...]  # for the Python interpreter
    environment: dict[str, str]  # in addition to the router's own
    answers: bool  # the channel is also standard output
    discard_output: bool  # its output goes to /dev/null


class Kill(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Send SIGKILL to a process; ignored if it has ended."""

    number: int


class Started(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The process runs, or could not be started if `problem` is set."""

    number: int
    pid: int = 0
    problem: str = ""


class Ended(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The process has ended. `code` is as in subprocess: -N if signal N killed it."""

    number: int
    code: int


_requests: msgspec.msgpack.Decoder[Start | Kill] = msgspec.msgpack.Decoder(Start | Kill)
_encode = msgspec.msgpack.encode


class _Processes:
    """The processes that run. One thread per process waits for its end."""

    def __init__(self, router: socket.socket) -> None:
        self._router = router
        self._running: dict[int, subprocess.Popen[bytes]] = {}

    def start(self, asked: Start, channel: int) -> None:
        try:
            process = subprocess.Popen(
                [sys.executable, *asked.arguments],
                stdin=channel,
                stdout=channel if asked.answers else subprocess.DEVNULL if asked.discard_output else None,
                stderr=subprocess.DEVNULL if asked.discard_output else None,
                env=os.environ | ONE_THREAD | asked.environment,
            )
        except (OSError, ValueError) as error:
            self._router.send(_encode(Started(asked.number, problem=str(error))))
            return
        self._running[asked.number] = process
        self._router.send(_encode(Started(asked.number, process.pid)))
        threading.Thread(target=self._await_end, args=(asked.number, process), daemon=True).start()

    def kill(self, number: int) -> None:
        process = self._running.get(number)
        if process is not None:
            process.kill()

    def _await_end(self, number: int, process: subprocess.Popen[bytes]) -> None:
        code = process.wait()
        self._running.pop(number, None)
        self._router.send(_encode(Ended(number, code)))


def serve(router: socket.socket) -> None:
    """Handle messages until the router closes its end."""
    processes = _Processes(router)
    while True:
        message, channels, _, _ = socket.recv_fds(router, START_BYTES, 1)
        if not message:
            return
        asked = _requests.decode(message)
        if isinstance(asked, Kill):
            processes.kill(asked.number)
            continue
        [channel] = channels
        try:
            processes.start(asked, channel)
        finally:
            os.close(channel)


def main() -> None:
    # Ctrl-C in the terminal ends only the router, which then ends this process.
    os.setpgrp()
    try:
        serve(socket.socket(fileno=0))
    except OSError:
        # The router died: an answer could not be sent.
        sys.exit(1)


if __name__ == "__main__":
    main()
