"""The bench program that finds what the kernel makes a thread wait for."""

from __future__ import annotations

import fcntl
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.bench.blocked import Thread, Watch, summary, threads_of, watch
from tests.fakes.waiting import PATIENCE, until

# It waits for a line, then for a lock, and for another line.
PROGRAM = """
import fcntl, sys
print("ready", flush=True)
sys.stdin.readline()
with open(sys.argv[1]) as file:
    fcntl.flock(file, fcntl.LOCK_EX)
sys.stdin.readline()
"""


@pytest.fixture
def child(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    lock = tmp_path / "a-lock-of-this-test"
    lock.touch()
    command = [sys.executable, "-c", PROGRAM, str(lock)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            if not names_functions(process.pid):
                pytest.skip("this kernel does not say where a thread waits")
            yield process
        finally:
            process.kill()


def names_functions(pid: int) -> bool:
    """Return whether the kernel names the function in which a process waits that reads from a pipe."""
    try:
        return until(lambda: "pipe_read" in Path(f"/proc/{pid}/wchan").read_text(), 10.0)
    except AssertionError:
        return False


def write(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def until_it_waits(thread: Thread, function: str) -> None:
    """Wait until the thread waits in a function of the kernel, not only for a page on its way there."""
    until(lambda: function in thread.read("wchan"))


def test_a_thread_that_waits_for_a_lock_is_blocked(child: subprocess.Popen[str], tmp_path: Path) -> None:
    name = str(tmp_path / "a-lock-of-this-test")
    (thread,) = threads_of([name])
    assert thread.pid == child.pid
    samples = Watch(thread)
    with open(name) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        until_it_waits(thread, "pipe_read")
        assert samples.sample(0.0) is None
        write(child)
        until_it_waits(thread, "lock_inode")
        assert samples.sample(1.0) is None
        assert samples.sample(1.25) is None
    until_it_waits(thread, "pipe_read")
    block = samples.sample(1.5)
    assert block is not None
    assert (block.process, block.state, block.since, block.seconds) == (name, "S", 1.0, 0.25)
    assert "lock_inode" in block.waits_in
    assert samples.sample(2.0) is None
    assert summary([block]) == [
        f"{name}, {block.waits_in}, system call {block.system_call}: 1 x, longest 250.0 ms, 250.0 ms in all"
    ]
    thread.close()


def test_a_block_that_outlasts_the_samples_is_reported(child: subprocess.Popen[str], tmp_path: Path) -> None:
    name = str(tmp_path / "a-lock-of-this-test")
    (thread,) = threads_of([name])
    with open(name) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        write(child)
        until_it_waits(thread, "lock_inode")
        (block,) = watch([thread], 0.1, 0.0)
    assert (block.process, block.state) == (name, "S")
    thread.close()


def test_reading_the_files_of_a_process_that_has_ended_raises(child: subprocess.Popen[str]) -> None:
    thread = Thread("child", child.pid)
    child.kill()
    child.wait(PATIENCE)
    with pytest.raises(OSError, match="No such process"):
        thread.blocked()
    thread.close()
