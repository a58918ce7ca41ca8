"""Stands for `subprocess` in a module that starts other Python processes: they are forks of the fork server.

Each saves the seconds in which it would import torch. Its parent is the server and not the test process.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from subprocess import DEVNULL, TimeoutExpired

from tests.cluster import fork_server
from tests.cluster.harness import ROOT

__all__ = ["DEVNULL", "Popen", "TimeoutExpired"]


def Popen(
    command: Sequence[str], *, stdin: int, pass_fds: Sequence[int], preexec_fn: Callable[[], None]
) -> fork_server.Fork:
    """Start `python -m MODULE ...` with these descriptors. `preexec_fn`, which ties it to its parent, is left out."""
    assert stdin == DEVNULL
    with open(2, "wb", closefd=False) as log:
        return fork_server.start(command[2:], ROOT, dict(os.environ), log, descriptors=pass_fds)
