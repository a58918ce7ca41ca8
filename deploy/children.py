"""Child processes of the supervisor: start, progress, logs and exit."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from common.observability.startup import Progress
from common.parent_death import at_parent_death

TAIL_BYTES = 2000
LINE_CHARACTERS = 300  # limit for a log line in a report
# SIGKILL leaves a process no time for a line, so the last one of its log is about something else.
KILLED = "killed from outside, by hand or by the kernel because memory ran out, which dmesg would say"
KILLED_SECONDS = 30.0  # wait after SIGKILL; a process that takes longer hangs in the kernel


@dataclass(slots=True)
class Child:
    """One process of the cluster. `progress` is its latest start-up report, and `reports` their number."""

    name: str
    command: Sequence[str]
    log_path: Path
    progress: Progress = field(default_factory=lambda: Progress(phase="importing"))
    reports: int = 0
    log_problem: str = ""  # why its output is lost; empty while it has a log
    _process: subprocess.Popen[bytes] | None = None
    _status: int = -1
    _buffer: bytes = b""

    def start(self) -> None:
        """Start the process; its log is appended to. Raises OSError if it cannot be started."""
        self._close_status()  # the previous process died before its status pipe was read to the end
        with contextlib.ExitStack() as opened:
            read_end, write_end = os.pipe()
            opened.callback(os.close, write_end)
            on_failure = opened.enter_context(contextlib.ExitStack())
            on_failure.callback(os.close, read_end)
            os.set_blocking(read_end, False)
            log = self._open_log()
            opened.callback(os.close, log)
            self._process = subprocess.Popen(
                [sys.executable, "-m", *self.command, "--status-fd", str(write_end)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[write_end],
                start_new_session=True,  # Ctrl-C reaches only the supervisor, which drains in order
                # The child drains if the supervisor is killed.
                preexec_fn=at_parent_death(signal.SIGTERM),
            )
            on_failure.pop_all()
        self.progress = Progress(phase="importing")
        self._buffer = b""
        self._status = read_end

    def _open_log(self) -> int:
        """Open its log, or /dev/null if that fails: running without a log is better than not running."""
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
            log = os.open(self.log_path, flags, 0o600)
        except OSError as error:
            self.log_problem = (
                f"{self.log_path} cannot be opened ({error.strerror}): output is lost until the next start"
            )
            return os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
        self.log_problem = ""
        return log

    def _close_status(self) -> None:
        if self._status >= 0:
            os.close(self._status)
            self._status = -1

    def remove_logs(self) -> None:
        """Remove the logs of an earlier cluster."""
        for path in (self.log_path, self._old_log):
            with contextlib.suppress(OSError):
                path.unlink()

    @property
    def _old_log(self) -> Path:
        return self.log_path.with_name(f"{self.log_path.name}.1")

    @property
    def launched(self) -> bool:
        """True once `start` has been called."""
        return self._process is not None

    @property
    def may_report(self) -> bool:
        """True while it may write reports: its end of the status pipe is open."""
        return self._status >= 0

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
        """Read the reports that it has written since the last call."""
        while self._status >= 0:
            try:
                data = os.read(self._status, 65536)
            except BlockingIOError:
                break
            if not data:
                self._close_status()
            self._buffer += data
        *lines, self._buffer = self._buffer.split(b"\n")
        for line in lines:
            with contextlib.suppress(ValueError):  # a dying process may write half a line
                self.progress = msgspec.json.decode(line, type=Progress)
                self.reports += 1
        return self.progress

    def signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        if self._process.poll() is None:
            self._process.send_signal(number)

    def stop(self, grace: float) -> bool:
        """Send SIGTERM, and SIGKILL after `grace` seconds. Return True if SIGTERM was enough."""
        assert self._process is not None
        self.signal(signal.SIGTERM)
        try:
            self._process.wait(grace)
        except subprocess.TimeoutExpired:
            self._process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(KILLED_SECONDS)
            return False
        return True

    def log_tail(self) -> str:
        """Return the end of its log, to show when it fails."""
        return _tail(self.log_path) or _tail(self._old_log)  # the log may just have been rotated

    def start_failure(self) -> str:
        """Return why it ended before it was ready: the reason that it reported, or the end of its log.

        After SIGKILL it says who may have sent it, since the process could not report a reason.
        """
        at = self.read_progress()
        if at.phase == "failed" and at.message:
            return at.message
        return f"{KILLED}; log: {self.log_path}" if self._was_killed else self.log_tail()

    def last_words(self) -> str:
        """Return one line that says why it ended: the reason reported at start-up, or the last line of its log.

        After SIGKILL it says who may have sent it.
        """
        if self.read_progress().phase == "failed" and self.progress.message:
            return _shorten(self.progress.message)
        if self._was_killed:
            return KILLED
        events = (_event(line.strip()) for line in reversed(self.log_tail().split("\n")))
        return _shorten(next((event for event in events if event), "no log line"))

    @property
    def _was_killed(self) -> bool:
        return self._process is not None and self.exit_code == -signal.SIGKILL


def describe_exit(code: int) -> str:
    """Say how a process ended, from Popen's return code."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"signal {signal.Signals(-code).name}"
    except ValueError:  # real-time signals have no names
        return f"signal {-code}"


def _tail(path: Path) -> str:
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(max(size - TAIL_BYTES, 0))
            text = file.read(TAIL_BYTES).decode(errors="replace")
    except OSError:
        return ""
    if size > TAIL_BYTES:  # start at a whole line, unless the tail is a single long line
        text = text.partition("\n")[2] or text
    return text


def _event(line: str) -> str:
    """Convert a log line to readable text: the event of a JSON line, with its reason or the last line of its traceback.

    Returns "" for a JSON line that was truncated on a full disk.
    """
    try:
        fields = msgspec.json.decode(line, type=dict[str, object])
    except msgspec.DecodeError:
        return "" if line.startswith('{"') else line
    reason = fields.get("reason") or str(fields.get("exception") or "").strip().rpartition("\n")[2]
    event = str(fields.get("event", line))
    return f"{event}: {reason}" if reason else event


def _shorten(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= LINE_CHARACTERS else f"{text[:LINE_CHARACTERS]} ..."
