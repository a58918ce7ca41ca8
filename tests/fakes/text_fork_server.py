"""Starts a server of `text_forks`, which forks the spawn processes of all routers that a test process starts."""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from common.one_thread import ONE_THREAD

ROOT = Path(__file__).parents[2]
SECONDS = 60.0


@functools.cache
def text_fork_program() -> tuple[str, ...]:
    """Return the program of a `Spawner` that gets a fork of the server, which runs as long as this process."""
    folder = tempfile.mkdtemp(prefix="tandem-text-forks-")
    path = f"{folder}/s"
    server = subprocess.Popen(
        [sys.executable, "-m", "tests.fakes.text_forks", path],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=ROOT,
        env=os.environ | ONE_THREAD,
    )
    assert server.stdin and server.stdout  # noqa: PT018
    assert server.stdout.readline() == b"ready\n", "the server of text workers has not started"
    owner = os.getpid()

    def end() -> None:
        if os.getpid() == owner:
            server.terminate()
            server.wait(SECONDS)
            shutil.rmtree(folder)

    atexit.register(end)
    return ("-I", "-S", str(ROOT / "tests/fakes/text_fork_client.py"), path)
