"""Profiles of a node at an operator's order: a trace of what it computes, recorded by a thread beside the main loop.

A recorder holds the interpreter lock while it ends, for a time that grows with the number of recorded events, and the
node stands still meanwhile. So the first steps are recorded by themselves: they show how many events a step has, and so
how many steps the trace may have.
"""

from __future__ import annotations

import gzip
import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from common.errors import ConfigError
from common.messages.node_inbox import Profile
from common.messages.router_inbox import MAX_MESSAGE, ProfileEnded
from common.node.to_router import ToRouter
from common.observability.logs import Log
from common.observability.profile_files import keep_latest, new_file

MAX_EVENTS = 40_000  # of a trace: the node stands still for some microseconds for each
MAX_BYTES = 64 << 20  # of a file
LOOK_SECONDS = 0.005  # interval at which the thread looks whether the steps were taken
END_SECONDS = 10.0  # that a node which ends waits for the file
ENDING = ".trace.json.gz"


class ProfileRecorder(Protocol):
    """Records everything that the process computes between `start` and `stop`."""

    def start(self) -> None: ...

    def stop(self) -> int:
        """Return the number of recorded events."""
        ...

    def save(self, file: Path) -> None:
        """Write a Chrome trace as JSON."""
        ...


class Profiler(Protocol):
    """Follows orders to profile this node. Used by the thread of the main loop."""

    def begin(self, order: Profile, router: ToRouter) -> None:
        """Begin a profile, whose end `router` is told about."""
        ...

    def turn(self, steps: int) -> None:
        """Note the number of steps that the node has taken, and send the answer once there is one. Once per turn."""
        ...

    def close(self) -> None:
        """End a profile early, because the node ends."""
        ...


class NoProfiler:
    """The profiler of a node that has nowhere to write."""

    def begin(self, order: Profile, router: ToRouter) -> None:
        router.send(ProfileEnded(order=order.order, problem="this node has no directory for profiles"))

    def turn(self, steps: int) -> None:
        pass

    def close(self) -> None:
        pass


class NodeProfiler:
    """Records one profile at a time into files of `directory`, of which the latest ones are kept."""

    def __init__(
        self,
        name: str,
        directory: Callable[[], Path],
        recorder: Callable[[], ProfileRecorder],
        recording: threading.Lock,
        log: Log,
    ) -> None:
        """
        Args:
            directory: may raise ConfigError.
            recording: held while this process records, in which there can be one recorder at a time.
        """
        self._name = name
        self._directory = directory
        self._recorder = recorder
        self._recording = recording
        self._log = log
        self._steps = 0
        self._ending = threading.Event()
        self._thread: threading.Thread | None = None
        self._router: ToRouter
        self._ended: ProfileEnded | None = None  # written by the thread

    def begin(self, order: Profile, router: ToRouter) -> None:
        if self._thread is not None or not self._recording.acquire(blocking=False):
            router.send(ProfileEnded(order=order.order, busy=True, problem="a profile is being recorded"))
            return
        thread = threading.Thread(target=self._run, args=(order,), name="profile", daemon=True)
        try:
            thread.start()
        # Too many threads.
        except RuntimeError as error:
            self._recording.release()
            router.send(ProfileEnded(order=order.order, problem=_not_written(error)))
            return
        self._router, self._thread = router, thread

    def turn(self, steps: int) -> None:
        self._steps = steps
        if self._ended is not None:
            ended, self._ended, self._thread = self._ended, None, None
            self._log.info("profile", path=ended.path, bytes=ended.file_bytes, problem=ended.problem)
            self._router.send(ended)

    def close(self) -> None:
        self._ending.set()
        if self._thread is not None:
            self._thread.join(END_SECONDS)
        self.turn(self._steps)

    def _run(self, order: Profile) -> None:
        ended = ProfileEnded(order=order.order, problem="a defect; the node's log has the details")
        try:
            ended = self._record(order)
        except (OSError, RuntimeError, ConfigError) as error:
            ended = ProfileEnded(order=order.order, problem=_not_written(error))
        finally:
            self._recording.release()
            self._ended = ended

    def _record(self, order: Profile) -> ProfileEnded:
        directory = self._directory()
        recorder = self._recorder()
        # The first start of a process takes seconds, in which nothing is recorded.
        recorder.start()
        began, steps = time.monotonic(), self._steps
        deadline = began + order.seconds
        self._wait(1, deadline)
        events, taken = recorder.stop(), max(self._steps - steps, 1)
        room = MAX_EVENTS * taken // max(events, 1)
        if order.steps > taken and room > taken and not self._over(deadline):
            recorder = self._recorder()
            recorder.start()
            began, steps = time.monotonic(), self._steps
            self._wait(min(order.steps, room), deadline)
            recorder.stop()
        seconds, taken = time.monotonic() - began, self._steps - steps
        file = new_file(directory, self._name, ENDING)
        nbytes = write_trace(recorder, file)
        keep_latest(file, self._name, ENDING)
        return ProfileEnded(
            order=order.order, path=str(file), file_bytes=nbytes, seconds=round(seconds, 3), steps=taken
        )

    def _wait(self, steps: int, deadline: float) -> None:
        until = self._steps + steps
        while self._steps < until and not self._over(deadline):
            time.sleep(LOOK_SECONDS)

    def _over(self, deadline: float) -> bool:
        return self._ending.is_set() or time.monotonic() > deadline


def _not_written(error: Exception) -> str:
    return f"no profile was written: {error}"[:MAX_MESSAGE]


def write_trace(recorder: ProfileRecorder, file: Path) -> int:
    """Write a compressed trace, whole or not at all; return its bytes. Raises OSError."""
    plain, packed = file.with_suffix(".plain"), file.with_suffix(".part")
    try:
        recorder.save(plain)
        with plain.open("rb") as source, gzip.open(packed, "wb", compresslevel=3) as target:
            shutil.copyfileobj(source, target, 1 << 20)
        nbytes = packed.stat().st_size
        if nbytes > MAX_BYTES:
            raise OSError(f"the trace has {nbytes >> 20} MiB, over {MAX_BYTES >> 20}; ask for fewer steps")
        os.replace(packed, file)
        return nbytes
    finally:
        plain.unlink(missing_ok=True)
        packed.unlink(missing_ok=True)
