"""The harness looks at processes that may end at any moment."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.attacks import Memory
from tests.cluster.harness import RunningCluster
from tests.fakes.proc_files import with_children
from tests.fakes.waiting import until

# Its child ends and stays a zombie, and the fork that it names has ended and was reaped: no process has the number 0.
PARENT = """
import os, time
if os.fork() == 0:
    os._exit(0)
with open("/proc/self/comm", "w") as name:
    name.write("fork 0")
time.sleep(3600)
"""


@pytest.fixture
def ended(tmp_path: Path) -> Iterator[RunningCluster]:
    """A "cluster" with one node, whose children have ended."""
    cluster = RunningCluster(tmp_path)
    node = subprocess.Popen([sys.executable, "-c", PARENT])
    cluster.processes["decode-0"] = node
    try:
        until(lambda: len(list(with_children(Path(f"/proc/{node.pid}")))) == 3)
        yield cluster
    finally:
        cluster.stop()


def test_processes_that_have_ended_are_no_ranks_listen_nowhere_and_use_no_memory(
    ended: RunningCluster,
) -> None:
    memory = Memory(ended)
    assert ended.rank_pids("decode-0") == []
    assert ended.listens_at("decode-0") == set()
    assert memory.growth().keys() == {"decode-0"}
