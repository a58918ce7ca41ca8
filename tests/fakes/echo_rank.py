"""The entry module of a rank that has no device: it records the frames that it gets, and answers commands."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import zmq

from common.errors import ConfigError, RankFailed
from common.ipc.ring import RingReader, RingWriter
from common.node.ranks.member import BuiltRank, Member, run_rank
from common.observability import start_watchdog
from common.observability.logs import Log
from common.observability.start_progress import progressed


class EchoWork:
    """Writes every frame to a file as one line. The frame "hang" blocks it, and "fail" raises."""

    completed = 0

    def __init__(self, file: Path) -> None:
        self._file = file

    def apply(self, frame: bytes, /) -> None:
        with self._file.open("ab") as file:
            file.write(frame + b"\n")
        self.completed += 1
        if frame == b"hang":
            time.sleep(3600)
        assert frame != b"fail", "told to fail"

    def turn(self) -> bool:
        return False


class EchoService:
    """Answers each command with the number of plans that were complete before it."""

    sockets: Sequence[zmq.Socket[bytes]] = ()

    def __init__(self, commands: RingReader, events: RingWriter) -> None:
        self._commands = commands
        self._events = events

    def turn(self, completed: int, /) -> bool:
        self._commands.clear()
        while (command := self._commands.take()) is not None:
            self._events.send(b"%s after %d" % (command, completed), 5.0)
        return False

    def close(self) -> None:
        self._events.send(b"closed", 5.0)


def build(member: Member, log: Log) -> BuiltRank:
    directory = Path(os.fsdecode(member.begin.work))
    member.report("loading", 5, 10)
    if (directory / f"notice-{member.begin.rank}").exists():
        raise RankFailed(2, "rank 2 has ended")
    if (directory / f"hang-{member.begin.rank}").exists():
        this_loader_blocks()
    if (directory / "refuse").exists():
        raise ConfigError("decode.pool_tokens", "there is no room")
    given = member.exchange(b"of rank %d" % member.begin.rank)
    (directory / f"given-{member.begin.rank}").write_bytes(b", ".join(given))
    (directory / f"pid-{member.begin.rank}").write_text(str(os.getpid()))
    work = EchoWork(directory / f"frames-{member.begin.rank}")
    return BuiltRank(work, EchoService(member.commands, member.events))


def this_loader_blocks() -> None:
    progressed("read layers.7")
    time.sleep(3600)


if __name__ == "__main__":
    # A thread ends a rank whose start hangs, and not the timer for native code: that one would come first if the rank
    # did not run for some seconds.
    start_watchdog.HELD_FACTOR = 1000  # type: ignore[attr-defined]
    run_rank(build, int(sys.argv[1]))
