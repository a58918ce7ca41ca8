"""Restarts the processes of a running cluster when they end, each with its own back-off."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from common.process_entry import entry
from deploy.backoff import Backoff
from deploy.children import Child, describe_exit
from deploy.process_table import ProcessRecord, ProcessState

# Seconds for which a process that starts may be silent longer than it may be without progress: one that makes progress
# reports at least once a minute, and one that does not ends itself with a better reason, unless it is stopped.
SILENT_SECONDS = 120.0
Report = Callable[[str], None]


class StartBounds:
    """Tells which processes have been silent for too long while they start."""

    def __init__(self, hang_timeout: float, clock: Callable[[], float] = time.monotonic) -> None:
        """`hang_timeout`: seconds for which one may be without progress; 0: without end."""
        self._limit = hang_timeout + SILENT_SECONDS if hang_timeout else float("inf")
        self._clock = clock
        self._heard: dict[str, tuple[int, float]] = {}  # by name: its number of reports, and since when

    def begin(self, child: Child) -> None:
        """Begin to count: it was started, or is about to be killed."""
        self._heard[child.name] = child.reports, self._clock()

    def problem(self, child: Child) -> str:
        """Return what is wrong with a process that is not ready; "" while it has time left."""
        reports, since = self._heard.get(child.name, (-1, 0.0))
        if reports != child.reports:
            self.begin(child)
            return ""
        seconds, last = self._clock() - since, child.progress
        if seconds <= self._limit:
            return ""
        share = f", {last.done} of {last.total}" if last.total else ""
        return f"has reported no progress for {seconds:.0f} s (phase {last.phase}{share})"


@dataclass(slots=True)
class _Watched:
    """One process. `restart_at` is set exactly while it is down."""

    child: Child
    backoff: Backoff = field(default_factory=Backoff)
    up_since: float | None = None
    restart_at: float | None = None
    restarts: int = 0
    ended_at: float | None = None
    last_end: str = ""


class Watcher:
    """Watches all processes without waiting for any: while one is down, the others are still watched."""

    def __init__(
        self, children: Sequence[Child], hang_timeout: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`hang_timeout`: seconds for which a process that starts may be without progress; 0: without end."""
        self._clock = clock
        self._bounds = StartBounds(hang_timeout, clock)
        self._watched = {child.name: _Watched(child) for child in children}

    def check(self, report: Report) -> bool:
        """Check every process once and restart those that are due. Return whether a record changed."""
        changes = [self._check(each, report) for each in self._watched.values()]
        return any(changes)

    def records(self) -> dict[str, ProcessRecord]:
        """Return the state of every process that was started, by name."""
        return {name: _record(each) for name, each in self._watched.items() if each.child.launched}

    def _check(self, each: _Watched, report: Report) -> bool:
        now, child = self._clock(), each.child
        if each.restart_at is not None:
            if now >= each.restart_at:
                self._restart(each, now, report)
                return True
            return False
        ready = child.read_progress().phase == "ready"
        code = child.exit_code
        if code is not None:
            _schedule(each, now, f"ended with {describe_exit(code)} ({child.last_words()})", report)
            return True
        if each.up_since is None and ready:
            each.up_since = now
            if each.restarts:
                report(f"{child.name} is up again (pid {child.pid})")
            return True
        if each.up_since is None and (problem := self._bounds.problem(child)):
            report(f"{child.name} {problem}: killing it; see {child.log_path}")
            self._bounds.begin(child)
            child.signal(signal.SIGKILL)
        return False

    def _restart(self, each: _Watched, now: float, report: Report) -> None:
        try:
            each.child.start()
        except (OSError, subprocess.SubprocessError) as error:
            _schedule(each, now, f"failed to start ({error})", report)
            return
        each.restart_at = None
        self._bounds.begin(each.child)
        each.restarts += 1
        report(f"{each.child.name} was restarted (pid {each.child.pid})")


def _schedule(each: _Watched, now: float, end: str, report: Report) -> None:
    """Schedule the next start; report what ended, why, and when it restarts."""
    delay = each.backoff.next_delay(0.0 if each.up_since is None else now - each.up_since)
    each.up_since, each.restart_at = None, now + delay
    each.ended_at, each.last_end = now, end
    child = each.child
    report(f"{child.name} {end}; restarting in {delay:.1f} s; log: {child.log_path}")


def _record(each: _Watched) -> ProcessRecord:
    process = entry(each.child.pid)
    state: ProcessState = "up" if each.child.progress.phase == "ready" else "starting"
    return ProcessRecord(
        pid=process.pid,
        started=process.started,
        state="backing off" if each.restart_at is not None else state,
        restarts=each.restarts,
        restart_at=each.restart_at,
        ended_at=each.ended_at,
        last_end=each.last_end,
    )
