"""Child processes of the supervisor: start, progress, logs, end."""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from common.observability.startup import Progress

_PR_SET_PDEATHSIG = 1
_prctl = ctypes.CDLL(None, use_errno=True).prctl  # looked up before any fork: not much is safe after it
TAIL_BYTES = 2000
KILLED_SECONDS = 30.0  # after SIGKILL: what takes longer hangs in the kernel


def _die_with_parent() -> None:
    """Between fork and exec: a supervisor that is killed takes its children along (SIGTERM: they drain)."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


@dataclass(slots=True)
class Child:
    """One process of the cluster. `progress` is the last thing it said about its start-up."""

    name: str
    command: Sequence[str]
    log_path: Path
    progress: Progress = field(default_factory=lambda: Progress(phase="importing"))
    restarts: int = 0
    _process: subprocess.Popen[bytes] | None = None
    _status: int = -1
    _buffer: bytes = b""

    def start(self) -> None:
        if self._status >= 0:  # the last process died before its end was read
            os.close(self._status)
        read_end, write_end = os.pipe()
        os.set_blocking(read_end, False)
        self.progress = Progress(phase="importing")
        self._buffer = b""
        with self.log_path.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", *self.command, "--status-fd", str(write_end)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[write_end],
                start_new_session=True,  # Ctrl-C reaches the supervisor alone, which drains in order
                preexec_fn=_die_with_parent,
            )
        os.close(write_end)
        self._status = read_end

    @property
    def launched(self) -> bool:
        """Whether `start` was ever called."""
        return self._process is not None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs."""
        assert self._process is not None
        return self._process.poll()

    def read_progress(self) -> Progress:
        """Take in what it has said since the last call."""
        while self._status >= 0 and select.select([self._status], [], [], 0)[0]:
            data = os.read(self._status, 65536)
            if not data:
                os.close(self._status)
                self._status = -1
                break
            self._buffer += data
        *lines, self._buffer = self._buffer.split(b"\n")
        for line in lines:
            with contextlib.suppress(msgspec.DecodeError):  # what a dying process left half written
                self.progress = msgspec.json.decode(line, type=Progress)
        return self.progress

    def signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        if self._process.poll() is None:
            self._process.send_signal(number)

    def stop(self, grace: float) -> bool:
        """SIGTERM, then SIGKILL after `grace` seconds; True if it went by itself."""
        assert self._process is not None
        self.signal(signal.SIGTERM)
        try:
            self._process.wait(grace)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(KILLED_SECONDS)
            return False
        return True

    def log_tail(self) -> str:
        """The end of its log, for the person who sees it fail."""
        try:
            data = self.log_path.read_bytes()
        except OSError:
            return ""
        text = data[-TAIL_BYTES:].decode(errors="replace")
        if len(data) > TAIL_BYTES:  # begin with a whole line, unless one long line is all there is
            text = text.partition("\n")[2] or text
        return text
