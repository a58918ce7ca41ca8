"""A process that has drained ends in bounded time, whatever one of its threads does."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster.harness import ENV, MODEL
from tests.fakes.waiting import PATIENCE

# Arguments: the cluster file, and where the process hangs.
NODE = """
import sys, threading, time
from pathlib import Path
from common import process

file, place = Path(sys.argv[1]), sys.argv.pop()

def hang(here):
    if here == place:
        time.sleep(600)

def bound(here):
    # Only where the process hangs: how fast it does the rest decides nothing.
    process.END_SECONDS = 0.5 if here == place else 600.0

class Node:
    def start(self): pass
    def run(self): bound("close")
    def overdue(self): return -1.0
    def drain(self): pass
    def close(self): hang("close")

def main(cluster: Path):
    process.run_node(lambda *read: lambda *told: Node(), cluster, "decode-0", None, None)
    bound("thread")
    threading.Thread(target=hang, args=["thread"]).start()

process.run_command(main, "launch_decode")
"""
ROUTER = """
import asyncio, os, signal, sys, time
from pathlib import Path
from router import __main__ as entry

place = sys.argv.pop()

def hang():
    time.sleep(600)

class App:
    http = type("Http", (), {"reload": None})

    async def start(self):
        os.kill(os.getpid(), signal.SIGTERM)

    async def finish_requests(self):
        if place == "drain":
            hang()

    async def close(self):
        if place == "close":
            hang()
        asyncio.get_running_loop().run_in_executor(None, hang)

entry.build = lambda *parts: App()
entry.END_SECONDS = 0.5
# The bound of what follows the drain does not contain that of the drain.
drain = 0.5 if place == "drain" else 600
entry.main(Path(sys.argv[1]), set_=[f"health.drain_timeout={drain}"])
"""
STACKS = "(most recent call first)"


def end(tmp_path: Path, program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    file = tmp_path / "cluster.yaml"
    file.write_text(f'model: {{path: "{MODEL}"}}\nprocess: {{run_dir: "{tmp_path}/r"}}\n')
    command = [sys.executable, "-c", program, str(file), *arguments]
    return subprocess.run(
        command, env=ENV, stderr=subprocess.PIPE, text=True, timeout=2 * PATIENCE, check=False
    )


@pytest.mark.parametrize("place", ["close", "thread"])
def test_a_node_that_does_not_end_writes_its_stacks_and_ends(tmp_path: Path, place: str) -> None:
    ended = end(tmp_path, NODE, place)
    assert (ended.returncode, STACKS in ended.stderr) == (1, True), ended.stderr
    assert ("drained" in ended.stderr) == (place == "thread")


def test_a_node_that_ends_by_itself(tmp_path: Path) -> None:
    ended = end(tmp_path, NODE, "nowhere")
    assert (ended.returncode, STACKS in ended.stderr) == (0, False), ended.stderr


@pytest.mark.parametrize("place", ["drain", "close", "thread"])
def test_a_router_that_does_not_end_writes_its_stacks_and_ends(tmp_path: Path, place: str) -> None:
    ended = end(tmp_path, ROUTER, place)
    assert (ended.returncode, STACKS in ended.stderr) == (1, True), ended.stderr
