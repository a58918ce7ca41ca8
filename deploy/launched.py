"""Ends the processes of this host that the launch scripts started: the routers first, since they hold the clients."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Sequence
from typing import Any

from common.config.router_processes import names_router
from common.errors import ConfigError, TandemError
from common.process_entry import Entry
from deploy.found_cluster import FoundCluster
from deploy.router_states import server_info
from deploy.running_processes import SUPERVISOR
from kv_transfer.transport.one_host.segment import sweep_orphans

POLL_SECONDS = 0.05
END_SECONDS = 5.0  # within which a process ends once it has drained


class NotStopped(TandemError):
    """Some processes of a cluster still run; the text names them."""


def stop_launched(found: FoundCluster) -> str:
    """End what the launch scripts started on this host and say so. Raises NotStopped if something is left anywhere."""
    info, processes = server_info(found.sockets), found.launched
    if found.unrecorded and info is None:
        raise NotStopped(unrecorded(found))
    if not processes and info is None:
        return "not running"
    drain_timeout = max((each.drain_timeout for _, each in processes), default=0.0)
    remaining = end_launched(processes, drain_timeout + END_SECONDS)
    if remaining:
        raise NotStopped(f"did not stop: {', '.join(remaining)}")
    others = elsewhere(info, processes)
    if info is not None and not any(names_router(name) for name, _ in processes):
        others = ["the router", *others]
    if others:
        raise NotStopped(
            f"stopped what runs here; end with Ctrl-C or SIGTERM where it was started: {', '.join(others)}"
        )
    return "stopped"


def unrecorded(found: FoundCluster) -> str:
    """Return a sentence about processes of the cluster that no record names."""
    names = ", ".join(f"{name} (pid {pid})" for name, pid in found.unrecorded.items())
    which = SUPERVISOR if SUPERVISOR in found.unrecorded else "them, routers first"
    return (
        f"{found.run_dir} has no record of a cluster, as if it had been removed, but these processes of {found.file} "
        f"run: {names}; end {which}, with SIGTERM"
    )


def end_launched(processes: Sequence[tuple[str, Entry]], grace: float) -> list[str]:
    """Tell them to drain and wait up to `grace` seconds for each role; return those that still run, with their pids.

    Shared memory is removed that processes of this user have left: one that is still loading does not drain, but ends.
    """
    routers = [each for name, each in processes if names_router(name)]
    nodes = [each for name, each in processes if not names_router(name)]
    for role in (routers, nodes):
        for process in role:
            process.send(signal.SIGTERM)
        deadline = time.monotonic() + grace
        while any(process.alive for process in role) and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
    with contextlib.suppress(OSError, ConfigError):
        sweep_orphans()
    return [f"{name} (pid {each.pid})" for name, each in processes if each.alive]


def elsewhere(info: dict[str, Any] | None, processes: Sequence[tuple[str, Entry]]) -> list[str]:
    """Return the nodes that the router knows and that are not among `processes`, as on another host."""
    here = {(name, each.pid) for name, each in processes}
    return [
        f"{node['name']} (pid {node.get('pid')} on {node.get('host')})"
        for node in (info or {}).get("nodes", [])
        if (node["name"], node.get("pid")) not in here or node.get("host") != os.uname().nodename
    ]
