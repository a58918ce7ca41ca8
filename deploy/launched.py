"""Ends the processes of this host that the launch scripts started: the routers first, since they hold the clients."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from typing import Any

from common.config.router_processes import names_router
from common.process_entry import Entry

POLL_SECONDS = 0.05


def end_launched(processes: Sequence[tuple[str, Entry]], grace: float) -> list[str]:
    """Tell them to drain and wait up to `grace` seconds for each role; return those that still run, with their pids."""
    routers = [each for name, each in processes if names_router(name)]
    nodes = [each for name, each in processes if not names_router(name)]
    for role in (routers, nodes):
        for process in role:
            process.send(signal.SIGTERM)
        deadline = time.monotonic() + grace
        while any(process.alive for process in role) and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
    return [f"{name} (pid {each.pid})" for name, each in processes if each.alive]


def elsewhere(info: dict[str, Any] | None, processes: Sequence[tuple[str, Entry]]) -> list[str]:
    """Return the nodes that the router knows and that are not among `processes`, as on another host."""
    here = {(name, each.pid) for name, each in processes}
    return [
        f"{node['name']} (pid {node.get('pid')} on {node.get('host')})"
        for node in (info or {}).get("nodes", [])
        if (node["name"], node.get("pid")) not in here or node.get("host") != os.uname().nodename
    ]
