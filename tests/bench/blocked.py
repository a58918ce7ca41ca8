"""Finds what the kernel makes a thread wait for: samples where the main threads of processes are blocked.

    python -m tests.bench.blocked --seconds 60 --json FILE NAME...      NAME: a word of a command line, such as `router`

Every millisecond the state of each thread is read from /proc. A stretch of at least --least seconds in which it neither
ran nor waited as an idle thread does is a block. Each is reported with the system call, the kernel's function that
waits and, if this process may read it, the kernel's stack. So it shows whether a table of files grew, a disk was slow
or a page was read from it, which a probe within the process (loop_probe.py) cannot tell.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tests.bench.environment import describe

INTERVAL = 0.001  # seconds
# Parts of the names of kernel functions in which a thread waits that has nothing to do.
IDLE = ("poll", "futex", "nanosleep", "wait_woken", "select", "pause", "sigtimedwait", "do_wait", "pipe_read")
LINES = 12  # of a stack


@dataclass
class Block:
    """A stretch in which a thread was blocked."""

    process: str
    since: float  # CLOCK_MONOTONIC
    seconds: float
    state: str  # D: cannot be interrupted, S: can be
    waits_in: str  # the kernel's function
    system_call: str  # its number; -1 in a page fault
    stack: list[str] = field(default_factory=list)


class Thread:
    """The files of a main thread in /proc."""

    def __init__(self, process: str, pid: int) -> None:
        self.process, self.pid = process, pid
        self._files = ExitStack()
        self._opened: dict[str, int] = {}
        for name in ("stat", "wchan", "syscall", "stack"):
            try:
                self._opened[name] = os.open(f"/proc/{pid}/task/{pid}/{name}", os.O_RDONLY | os.O_CLOEXEC)
            except OSError:  # only root may read stacks
                continue
            self._files.callback(os.close, self._opened[name])

    def close(self) -> None:
        self._files.close()

    def read(self, name: str) -> str:
        """Return the text of a file, or nothing if it cannot be read."""
        try:
            return os.pread(self._opened[name], 4096, 0).decode(errors="replace")
        except (KeyError, OSError):
            return ""

    def blocked(self) -> tuple[str, str] | None:
        """Return the state and the kernel's function if the thread is blocked, but not idle. Raises OSError."""
        state = os.pread(self._opened["stat"], 4096, 0).decode(errors="replace").rpartition(")")[2].split()[0]
        waits_in = self.read("wchan")
        # Where the kernel does not name the function, an idle thread cannot be told from a blocked one.
        idle = state == "S" and (waits_in in ("", "0") or any(each in waits_in for each in IDLE))
        return None if idle or state not in "DS" else (state, waits_in)


class Watch:
    """Follows one thread from sample to sample."""

    def __init__(self, thread: Thread) -> None:
        self.thread = thread
        self.block: Block | None = None  # which has not ended yet

    def sample(self, now: float) -> Block | None:
        """Return the block that has just ended, if one has. Raises OSError once the process has ended."""
        found, before = self.thread.blocked(), self.block
        if found is None:
            self.block = None
            return before
        state, waits_in = found
        if before is not None and (before.state, before.waits_in) == found:
            before.seconds = now - before.since
            return None
        call = self.thread.read("syscall").split()[:1]
        stack = self.thread.read("stack").splitlines()[:LINES]
        self.block = Block(self.thread.process, now, 0.0, state, waits_in, call[0] if call else "", stack)
        return before


def threads_of(names: Sequence[str]) -> Iterator[Thread]:
    """Yield the main threads of other processes that have one of `names` among the words of their command line."""
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            words = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
        except OSError:  # it has ended
            continue
        for name in names:
            if name in words and int(entry.name) != os.getpid():
                yield Thread(name, int(entry.name))


def watch(threads: Sequence[Thread], seconds: float, least: float) -> list[Block]:
    """Sample for so many seconds, and return the blocks of at least `least` seconds in the order of their ends.

    A block that lasts until the end of the samples, or until its process ends, is one of them.
    """
    watches, found, now = [Watch(each) for each in threads], [], time.monotonic()
    until = now + seconds
    while watches and now < until:
        for each in tuple(watches):
            try:
                ended = each.sample(now)
            except OSError:
                watches.remove(each)
                ended = each.block
            if ended is not None:
                found.append(ended)
        time.sleep(INTERVAL)
        now = time.monotonic()
    found += [each.block for each in watches if each.block is not None]
    return [block for block in found if block.seconds >= least]


def summary(blocks: Sequence[Block]) -> list[str]:
    """Return a line for each place where threads were blocked: how often, the longest and the sum, longest first."""
    places: dict[tuple[str, str, str], list[float]] = {}
    for each in blocks:
        places.setdefault((each.process, each.waits_in, each.system_call), []).append(each.seconds)
    lines = []
    for (process, waits_in, call), times in sorted(places.items(), key=lambda place: -max(place[1])):
        place = f"{process}, {waits_in or 'an unknown function'}, system call {call or 'unknown'}"
        lines.append(
            f"{place}: {len(times)} x, longest {1e3 * max(times):.1f} ms, {1e3 * sum(times):.1f} ms in all"
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="+", metavar="NAME")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument(
        "--least", type=float, default=0.003, help="seconds of the shortest block that is reported"
    )
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    threads = list(threads_of(options.names))
    if not threads:
        parser.error(f"no process has one of these words in its command line: {' '.join(options.names)}")
    blocks = watch(threads, options.seconds, options.least)
    for thread in threads:
        thread.close()
    print("\n".join(summary(blocks)) or f"no block of {1e3 * options.least:.0f} ms or more")
    if options.json:
        report = {"environment": describe(), "blocks": [asdict(each) for each in blocks]}
        options.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
