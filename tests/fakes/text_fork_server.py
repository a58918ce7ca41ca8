"""Starts a server of `text_forks`, which forks the spawn processes of all routers that a test process starts."""

from __future__ import annotations

import functools
import os

from common.one_thread import ONE_THREAD
from tests.fakes.socket_forks import start_server


@functools.cache
def text_fork_program() -> tuple[str, ...]:
    """Return the program of a `Spawner` that gets a fork of the server, which runs as long as this process."""
    return start_server("tests.fakes.text_forks", environment=os.environ | ONE_THREAD)
