"""Renders `deploy/status`: the supervisor's process table, joined with what the router reports about its nodes."""

from __future__ import annotations

import time
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table as RichTable

from common.config.gpu_sharing import SERVER
from common.config.router_processes import names_router
from deploy.process_table import ProcessRecord, Table

UP, NOT_READY, DEGRADED = 0, 1, 4  # exit codes of deploy/status


def show_status(
    table: Table, disk: str | None, info: dict[str, Any] | None, routers: Mapping[str, str], out: Console
) -> int:
    """Print the state and return the exit code.

    `disk` is the current disk problem, which the table cannot contain if the disk is read-only. `info` is the router's
    /server_info; None if it did not answer. `routers`: what several routers say about themselves, by name.
    """
    problems = [*table.problems, *([disk] if disk and disk not in table.problems else [])]
    nodes = {node["name"]: node for node in info.get("nodes", [])} if info else {}
    view = RichTable("process", "pid", "state", "restarts", "running", "queued", "pages free / all")
    states = {
        name: process_state(name, record, nodes, info, routers) for name, record in table.processes.items()
    }
    for name, record in table.processes.items():
        view.add_row(
            escape(name),
            str(record.pid),
            escape(states[name]),
            str(record.restarts),
            *_load_cells(nodes.get(name, {}).get("load", {})),
        )
        for rank, text in rank_rows(nodes.get(name, {})):
            view.add_row(escape(rank), "", escape(text))
    degraded = bool(problems) or any(state != "up" for state in states.values())
    ready = info is not None and bool(info.get("ready"))
    summary = table.state if table.state != "ready" or ready else "not ready"
    out.print(f"{table.url}: {'degraded' if ready and degraded and summary == 'ready' else summary}")
    out.print(view)
    for name, record in table.processes.items():
        if record.ended_at is not None:
            ago = time.monotonic() - record.ended_at
            _line(out, f"{name} {record.last_end}, {ago:.0f} s ago")
    for problem in problems:
        _line(out, f"problem: {problem}")
    if not ready:
        return NOT_READY
    return DEGRADED if degraded else UP


def show_launched(info: dict[str, Any], out: Console) -> int:
    """Show a cluster that the launch scripts started, as the router reports it, and return the exit code."""
    nodes = info.get("nodes", [])
    ready = bool(info.get("ready"))
    degraded = any(node.get("state", "up") != "up" for node in nodes)
    state = "not ready" if not ready else "degraded" if degraded else "ready"
    out.print(f"{state}; started by the launch scripts, without a supervisor")
    view = RichTable("process", "host", "pid", "state", "running", "queued", "pages free / all")
    view.add_row("router", "", "", "up", "", "", "")
    for node in nodes:
        view.add_row(
            escape(str(node["name"])),
            escape(str(node.get("host", ""))),
            str(node.get("pid", "")),
            escape(str(node.get("state", "up"))),
            *_load_cells(node.get("load", {})),
        )
        for rank, text in rank_rows(node):
            view.add_row(escape(rank), "", "", escape(text))
    out.print(view)
    if not ready:
        return NOT_READY
    return DEGRADED if degraded else UP


def _load_cells(load: dict[str, Any]) -> tuple[str, str, str]:
    """Return the running and the queued requests of a node, and its pages; empty where it reports none."""
    return str(load.get("running", "")), str(load.get("queued", "")), pages_text(load)


def rank_rows(node: dict[str, Any]) -> list[tuple[str, str]]:
    """Return (name, state) of the ranks of a node that has several."""
    ranks = node.get("ranks", [])
    if len(ranks) < 2:
        return []
    return [(f"  {node['name']}/{rank}", _rank(each)) for rank, each in enumerate(ranks)]


def _rank(rank: dict[str, Any]) -> str:
    behind = rank.get("behind", 0)
    late = f", {behind} plans behind" if behind else ""
    return f"{rank['device']}, {rank['memory_bytes'] / 2**30:.1f} GiB{late}"


def pages_text(load: dict[str, Any]) -> str:
    """Return the pages of a node that are free or hold only cached prompts, and all of them."""
    return f"{load['free_pages'] + load['cached_pages']} / {load['total_pages']}" if load else ""


def process_state(
    name: str,
    record: ProcessRecord,
    nodes: dict[str, Any],
    info: dict[str, Any] | None,
    routers: Mapping[str, str] = MappingProxyType({}),
) -> str:
    """Return the state of a process of the supervisor. `nodes`: those of `info`, by name."""
    if record.state == "backing off":
        wait = max((record.restart_at or 0.0) - time.monotonic(), 0.0)
        return f"down, restarts in {wait:.0f} s"
    if not record.alive:
        return "dead"
    if name == SERVER:
        return record.state
    if names_router(name) and (info is not None or name in routers):
        return routers.get(name, record.state) if record.state == "up" else record.state
    if name in nodes:
        return str(nodes[name].get("state", "up"))
    if record.state == "starting":
        return "starting"
    return "does not answer" if names_router(name) else "not registered"


def _line(out: Console, text: str) -> None:
    out.print(text, highlight=False, markup=False, soft_wrap=True)
