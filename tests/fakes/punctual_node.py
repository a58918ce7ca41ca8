"""A node that records for how long its main loop is silent, and by how much more than announced, in CPU time.

`python -m tests.fakes.punctual_node FILE prefill --cluster CLUSTER --name NAME` writes both to FILE. CPU time does not
pass while the machine stops the process or gives its time to others.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from common.node.router_links import RouterLinks
from common.process import run_command


class Silences(msgspec.Struct):
    """The silences of a main loop between two turns so far, in seconds."""

    longest: float = 0.0
    latest: float = 0.0  # by how much one has exceeded what was announced: a router waits for loop_timeout


class SilenceMeter:
    """Measures the silences of one main loop, as a router does."""

    def __init__(self, clock: Callable[[], float], report: Callable[[Silences], object]) -> None:
        """`report` is called with every change."""
        self._clock = clock
        self._report = report
        self._turned_at: float | None = None  # None before the first turn: nobody waits for it
        self._until = 0.0
        self._found = Silences()

    def turned(self) -> None:
        """Note that the loop begins a turn."""
        self._turned_at = self._until = self._measured()

    def announced(self, seconds: float) -> None:
        """Note that the loop says that it may be silent for `seconds` from now on."""
        self._until = max(self._until, self._measured() + seconds)

    def _measured(self) -> float:
        now = self._clock()
        if self._turned_at is not None:
            silence, late = now - self._turned_at, now - self._until
            if silence > self._found.longest or late > self._found.latest:
                self._found.longest = max(self._found.longest, silence)
                self._found.latest = max(self._found.latest, late)
                self._report(self._found)
        return now


def record(file: Path) -> None:
    """Write the silences of the main loop of this process to the file."""
    new = file.with_suffix(".new")

    def report(found: Silences) -> None:
        new.write_bytes(msgspec.json.encode(found))
        new.replace(file)

    meter = SilenceMeter(time.process_time, report)
    publish, announce = RouterLinks.publish, RouterLinks.announce

    def publishing(self: Any, state: Any, load: Any, counters: Any, held: Any = ()) -> None:
        meter.turned()
        publish(self, state, load, counters, held)

    def announcing(self: Any, seconds: float) -> None:
        meter.announced(seconds)
        announce(self, seconds)

    RouterLinks.publish = publishing  # type: ignore[method-assign]
    RouterLinks.announce = announcing  # type: ignore[method-assign]


if __name__ == "__main__":
    record(Path(sys.argv.pop(1)))
    if sys.argv.pop(1) == "prefill":
        from prefill_node.__main__ import main
    else:
        from decode_node.__main__ import main
    run_command(main, "launch_prefill")
