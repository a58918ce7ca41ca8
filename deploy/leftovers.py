"""Ends processes that a killed supervisor left running, so that no new cluster shares names and sockets with them."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from deploy.process_table import ProcessRecord, read_any_table

POLL_SECONDS = 0.05
KILLED_SECONDS = 10.0  # wait after SIGKILL; a process that takes longer hangs in the kernel


def find_leftovers(run_dir: Path) -> dict[str, ProcessRecord]:
    """Return the living processes of the previous cluster in `run_dir`.

    Call it with the cluster's lock held, so that the supervisor that wrote the table is gone.
    """
    table = read_any_table(run_dir)
    return {name: each for name, each in table.processes.items() if each.alive} if table else {}


def end_leftovers(
    alive: Mapping[str, ProcessRecord],
    grace: float,
    report: Callable[[str], None],
    stopped: Callable[[], bool],
) -> None:
    """Drain these processes, and kill them after `grace` seconds. Returns early if `stopped`."""
    if alive:
        names = ", ".join(f"{name} (pid {each.pid})" for name, each in alive.items())
        report(f"a killed supervisor left {names} running: waiting up to {grace:.0f} s for them to drain")
    for number, timeout in ((signal.SIGTERM, grace), (signal.SIGKILL, KILLED_SECONDS)):
        for each in alive.values():
            each.send(number)
        deadline = time.monotonic() + timeout
        while alive and time.monotonic() < deadline and not stopped():
            time.sleep(POLL_SECONDS)
            alive = {name: each for name, each in alive.items() if each.alive}
