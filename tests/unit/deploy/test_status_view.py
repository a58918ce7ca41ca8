"""`deploy/status` shows the ranks of nodes that have several."""

from __future__ import annotations

import io
import os

from rich.console import Console

from common.process_entry import entry
from deploy.process_table import ProcessRecord, Table
from deploy.status_view import UP, show_launched, show_status

LOAD = {"running": 3, "queued": 0, "free_pages": 5, "cached_pages": 1, "total_pages": 9}
RANKS = [
    {"device": "cuda:0", "memory_bytes": 3 << 30, "plans": 7, "behind": 0},
    {"device": "cuda:1", "memory_bytes": 2 << 30, "plans": 5, "behind": 2},
]
NODES = [
    {"name": "prefill-0", "state": "up", "load": LOAD, "host": "a", "pid": 7, "ranks": RANKS[:1]},
    {"name": "decode-0", "state": "up", "load": LOAD, "host": "a", "pid": 8, "ranks": RANKS},
]


def console() -> tuple[Console, io.StringIO]:
    text = io.StringIO()
    return Console(file=text, width=200), text


def rank_rows(text: str) -> list[str]:
    return [" ".join(line.replace("│", " ").split()) for line in text.splitlines() if "GiB" in line]


SHOWN = ["decode-0/0 cuda:0, 3.0 GiB", "decode-0/1 cuda:1, 2.0 GiB, 2 plans behind"]


def test_ranks_of_a_launched_cluster() -> None:
    out, text = console()
    assert show_launched({"ready": True, "nodes": NODES}, out) == UP
    assert rank_rows(text.getvalue()) == SHOWN


def test_ranks_of_a_cluster_with_a_supervisor() -> None:
    own = entry(os.getpid())
    record = ProcessRecord(pid=own.pid, started=own.started, state="up")
    processes = {name: record for name in ("router", "prefill-0", "decode-0")}
    table = Table(supervisor=own, cluster="c", url="http://h", state="ready", processes=processes)
    out, text = console()
    assert show_status(table, None, {"ready": True, "nodes": NODES}, out) == UP
    assert rank_rows(text.getvalue()) == SHOWN
