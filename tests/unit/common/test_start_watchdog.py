"""Which starts count as hung, and how their process ends."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import torch
from safetensors.torch import save_file

from common.checkpoint.model_files import fingerprint
from common.config import load_cluster
from common.engine.layers.piece import Piece
from common.engine.weights import load_weights
from common.observability.loop_watchdog import EXIT_HUNG, HELD_FACTOR
from common.observability.start_progress import StartProgress, progressed, waiting_for_ranks
from common.observability.start_watchdog import (
    LOOK_SECONDS,
    MANY_FILLED,
    MANY_READ,
    WINDOW_SECONDS,
    StartMeter,
)
from common.observability.startup import Progress
from tests.fakes.waiting import PATIENCE
from tests.unit.common.test_observability import LOCAL

NODE = """
import sys, time
from pathlib import Path
from common.observability import start_watchdog
from common.observability.start_progress import progressed
from common.process import run_node
start_watchdog.HELD_FACTOR = {held_factor}

def this_loader_blocks():
    {body}

def build(resolved, name, reporter, log):
    reporter.report("loading", 0, 100)
    progressed("read layers.7")
    this_loader_blocks()

limit = ["health.start_hang_timeout=0.5"]
run_node(lambda resolved, name: build, Path(sys.argv[1]), "prefill-0", limit, int(sys.argv[2]))
"""


ROUTER = """
import sys, time
from pathlib import Path
import router.__main__ as process
from common.checkpoint.model_directory import opened
from common.observability import start_watchdog
start_watchdog.HELD_FACTOR = {held_factor}

def this_disk_stalls(*arguments):
    with opened(Path(sys.argv[1])):
        time.sleep(3600)

process.build = this_disk_stalls
process.main(Path(sys.argv[1]), 0, ["health.start_hang_timeout=0.5"], int(sys.argv[2]))
"""


# So late that the thread comes first, even where the process does not run for some seconds.
NEVER = 1000


class Start:
    """A start whose clock moves only with `after`."""

    def __init__(self, limit: float) -> None:
        self.progress = StartProgress()
        self.faults = 0, 0
        self.now = 0.0
        self.meter = StartMeter(self.progress, limit, 0.0, lambda: self.faults)

    def after(self, seconds: float) -> str | None:
        for _ in range(round(seconds / LOOK_SECONDS)):
            self.now += LOOK_SECONDS
            self.meter.update(self.now)
        return self.meter.problem()


def run(script: str) -> tuple[subprocess.CompletedProcess[str], list[Progress]]:
    """Run a process; return how it ended, and what its supervisor heard."""
    read_end, write_end = os.pipe()
    try:
        done = subprocess.run(
            [sys.executable, "-c", script, str(LOCAL), str(write_end)],
            timeout=PATIENCE,
            capture_output=True,
            text=True,
            check=False,
            pass_fds=[write_end],
        )
        os.close(write_end)
        lines = os.read(read_end, 1 << 16).splitlines()
    finally:
        os.close(read_end)
    return done, [msgspec.json.decode(line, type=Progress) for line in lines]


def test_a_start_may_take_any_time_while_it_makes_progress() -> None:
    start = Start(900.0)
    with start.progress.current():
        start.progress.enter("loading", 0, 100)
        for number in range(10):
            progressed(f"read layers.{number}")
            assert start.after(899.0) is None
    problem = start.after(2.0)
    assert problem is not None
    assert problem.startswith(
        "no progress of the start for 900 s, in phase loading (0 of 100), after: read layers.9;"
    )
    start.progress.enter("capturing", 0, 0)
    assert start.after(1.0) is None
    assert str(start.progress) == "phase capturing, after: nothing yet"


def test_a_slow_disk_and_a_large_allocation_are_progress() -> None:
    """A few page faults are not: a process that hangs has them as well."""
    start = Start(30.0)
    for _ in range(20):
        start.faults = start.faults[0] + MANY_READ, start.faults[1]
        assert start.after(WINDOW_SECONDS) is None
    for _ in range(20):
        start.faults = start.faults[0], start.faults[1] + MANY_FILLED
        assert start.after(WINDOW_SECONDS) is None
    for _ in range(5):
        start.faults = start.faults[0] + MANY_READ - 1, start.faults[1] + MANY_FILLED - 1
        problem = start.after(WINDOW_SECONDS)
    assert problem is not None


def test_waiting_for_other_ranks_and_being_stopped_do_not_count() -> None:
    start = Start(30.0)
    with start.progress.current(), waiting_for_ranks():
        assert start.after(3600.0) is None
    assert start.after(29.0) is None
    start.now += 3600.0  # SIGSTOP
    assert start.after(0.25) is None
    assert start.after(2.0) is not None


def test_zero_turns_it_off() -> None:
    assert Start(0.0).after(1e4) is None
    assert load_cluster(LOCAL, ["health.start_hang_timeout=0"]).cluster.health.start_hang_timeout == 0


def test_a_node_whose_loader_blocks_ends_with_its_phase_and_stacks() -> None:
    done, heard = run(NODE.format(body="time.sleep(3600)", held_factor=NEVER))
    assert done.returncode == EXIT_HUNG, done.stderr
    assert "in this_loader_blocks" in done.stderr
    problem = heard[-1].message
    assert heard[-1].phase == "failed"
    assert "no progress of the start for 0.5 s, in phase loading (0 of 100), after: read layers.7;" in problem
    assert problem in done.stderr


def test_so_does_one_whose_native_code_holds_the_interpreter() -> None:
    done, _ = run(NODE.format(body="import re; re.match('(a+)+$', 'a' * 60 + 'b')", held_factor=HELD_FACTOR))
    assert done.returncode == 1
    assert "in this_loader_blocks" in done.stderr


def test_a_router_whose_disk_stalls_ends_with_the_name_of_the_file() -> None:
    done, heard = run(ROUTER.format(held_factor=NEVER))
    assert done.returncode == EXIT_HUNG, done.stderr
    assert "in this_disk_stalls" in done.stderr
    assert heard[-1].phase == "failed"
    assert f"after: began to read {LOCAL};" in heard[-1].message


def test_tensors_that_are_read_are_progress_and_their_file_is_named(tmp_path: Path) -> None:
    """A fingerprint reads a little of each, which in all takes a slow disk longer than a single step may take."""
    file = tmp_path / "model.safetensors"
    save_file({name: torch.ones(2) for name in "abcd"}, file)
    progress = StartProgress()
    with progress.current():
        fingerprint(tmp_path, "")
        assert str(progress).endswith(f"after: began to read {file}")
        assert progress.steps >= 4
        load_weights(tmp_path, [Piece("a", torch.empty(2), (2,), (0,))], aside=("b", "c", "d"))
    assert "after: read " in str(progress)
    assert str(progress).endswith(f" of {file}")
