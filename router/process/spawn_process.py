"""Starts the router's child processes, since starting one in the router would block its event loop until it runs.

    python -m router.process.spawn_process

Its standard input is the router's socket (SOCK_SEQPACKET); it runs until that closes.

A `Start` carries one file descriptor: the channel between the router and the new process. It is answered by a
`Started` and, when the process has ended, by an `Ended`. The processes see from their channels when the router ends.

What a process prints is read here, so that the router can tell why one has failed to start.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading

import msgspec

from common.one_thread import ONE_THREAD
from router.process.child_process import START_BYTES

MAX_PRINTED = 2000
PIECE = 1 << 16  # bytes read at once
OUTPUT_SECONDS = 1.0  # how long to wait for the end of the output once a process has ended


class Start(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Run this Python program with the channel as its standard input."""

    number: int  # identifies the process; chosen by the router
    arguments: tuple[str, ...]  # for the Python interpreter
    environment: dict[str, str]  # in addition to the router's own
    answers: bool  # the channel is also standard output
    discard_output: bool  # what it prints is not copied to the standard error of the spawn process


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
    printed: str  # the last characters that it printed, at most MAX_PRINTED


_requests: msgspec.msgpack.Decoder[Start | Kill] = msgspec.msgpack.Decoder(Start | Kill)
_encode = msgspec.msgpack.encode


class _Output:
    """Reads what a process prints, in a thread, and keeps the end of it."""

    def __init__(self, pipe: int, discard: bool) -> None:
        """Read from the descriptor `pipe` until it ends. Copies everything to standard error unless `discard`."""
        self._pipe = pipe
        self._discard = discard
        self._kept = b""
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def last(self) -> str:
        """Return the end of the output of a process that has ended."""
        # It lasts if the process has left its output to another one.
        self._thread.join(OUTPUT_SECONDS)
        return self._kept.decode(errors="replace")[-MAX_PRINTED:]

    def _read(self) -> None:
        while piece := os.read(self._pipe, PIECE):
            # A character of UTF-8 has up to four bytes.
            self._kept = (self._kept + piece)[-4 * MAX_PRINTED :]
            if not self._discard:
                with contextlib.suppress(OSError):
                    os.write(2, piece)
        os.close(self._pipe)


class _Processes:
    """The processes that run. Of two threads per process, one waits for its end and one reads what it prints."""

    def __init__(self, router: socket.socket) -> None:
        self._router = router
        self._running: dict[int, subprocess.Popen[bytes]] = {}

    def start(self, asked: Start, channel: int) -> None:
        try:
            process, output = _run(asked, channel)
        except (OSError, ValueError, RuntimeError) as error:
            # The text of an OSError quotes the path of the program.
            reason = getattr(error, "strerror", None) or str(error)
            self._router.send(_encode(Started(asked.number, problem=reason)))
            return
        self._running[asked.number] = process
        self._router.send(_encode(Started(asked.number, process.pid)))
        waiting = threading.Thread(target=self._await_end, args=(asked.number, process, output), daemon=True)
        try:
            waiting.start()
        except RuntimeError:
            # There may be no more threads, so nobody would report its end.
            process.kill()
            self._await_end(asked.number, process, output)

    def kill(self, number: int) -> None:
        process = self._running.get(number)
        if process is not None:
            process.kill()

    def _await_end(self, number: int, process: subprocess.Popen[bytes], output: _Output) -> None:
        code = process.wait()
        self._running.pop(number, None)
        self._router.send(_encode(Ended(number, code, output.last())))


def _run(asked: Start, channel: int) -> tuple[subprocess.Popen[bytes], _Output]:
    """Start a process. Raises OSError or ValueError, or RuntimeError if no thread can be started."""
    pipe, end = os.pipe()
    try:
        output = _Output(pipe, asked.discard_output)
    except BaseException:
        os.close(pipe)
        os.close(end)
        raise
    try:
        process = subprocess.Popen(
            [sys.executable, *asked.arguments],
            stdin=channel,
            stdout=channel if asked.answers else end,
            stderr=end,
            env=os.environ | ONE_THREAD | asked.environment,
        )
    finally:
        # If no process holds it either, the output ends.
        os.close(end)
    return process, output


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
