"""Renders `deploy/top`: one line about the cluster's latency, and a row for each node."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table as RichTable
from rich.text import Text

from deploy.cluster_sample import NO_BUCKETS, Buckets, ClusterSample, NodeRates, node_rates
from deploy.process_table import Table
from deploy.status_view import pages_text, process_state, rank_rows

COLUMNS = ("node", "role", "state", "running", "queued", "moving", "pages free / all", "used", "tokens/s")


def render(samples: Sequence[ClusterSample], table: Table | None) -> RenderableType:
    """Return the picture of the last sample, with rates since the first one. `table`: the supervisor's, if any."""
    before, now = samples[0], samples[-1]
    seconds = now.at - before.at
    view = RichTable(*COLUMNS, "accept", "graphs")
    for column in view.columns[3:]:
        column.justify = "right"
    earlier = {node["name"]: node for node in before.nodes} if seconds > 0 else {}
    generated = 0.0
    for node in sorted(now.nodes, key=lambda each: (each["role"] != "prefill", each["name"])):
        rates = node_rates(node, earlier.get(node["name"]), seconds)
        generated += (rates.tokens_per_s or 0.0) if node["role"] == "decode" else 0.0
        _add(view, node, rates)
    for name, state in _absent(now, table):
        view.add_row(escape(name), "", escape(state), style="red")
    return Group(*_head(before, now, generated), view)


def _head(before: ClusterSample, now: ClusterSample, generated: float) -> list[Text]:
    info = now.info
    state = "ready" if info.get("ready") else "not ready"
    requests = f"{info.get('active_requests', 0)} requests, {now.waiting_for_room} of them wait for room"
    first, gap = _percentiles(before.first_tokens, now.first_tokens), _percentiles(before.gaps, now.gaps)
    return [
        Text(f"{info.get('served_model_name', '')}: {state}; {requests}; {generated:,.0f} tokens/s"),
        Text(f"p50 / p90 / p99: first token {first}; gap {gap}"),
    ]


def _percentiles(before: Buckets, now: Buckets) -> str:
    """Return the percentiles of the window or, if nothing happened in it, since the start."""
    window = now.since(before if before.counts != now.counts else NO_BUCKETS)
    since = "" if before.counts and before.counts != now.counts else " since the start"
    if not window.total:
        return "-"
    return " / ".join(_ms(window.quantile(share)) for share in (0.5, 0.9, 0.99)) + f" ms{since}"


def _ms(seconds: float) -> str:
    return "-" if math.isnan(seconds) else f"{1e3 * seconds:.3g}"


def _add(view: RichTable, node: dict[str, Any], rates: NodeRates) -> None:
    load = node["load"]
    total = load["total_pages"]
    used = total - load["free_pages"] - load["cached_pages"]
    view.add_row(
        escape(node["name"]),
        node["role"],
        escape(str(node.get("state", "up"))),
        str(load["running"]),
        str(load["queued"]),
        str(load["transferring"]),
        pages_text(load),
        f"{used / total:.0%}" if total else "-",
        "-" if rates.tokens_per_s is None else f"{rates.tokens_per_s:,.0f}",
        "-" if rates.accept_length is None else f"{rates.accept_length:.2f}",
        "-" if rates.graph_share is None else f"{rates.graph_share:.0%}",
        style=None if node.get("state", "up") == "up" else "yellow",
    )
    for name, text in rank_rows(node):
        view.add_row(escape(name), "", escape(text), style="dim")


def _absent(now: ClusterSample, table: Table | None) -> list[tuple[str, str]]:
    """Return (name, state) of what should run and is not registered."""
    nodes = {node["name"]: node for node in now.nodes}
    if table is None:
        return [(each["name"], "not registered") for each in now.info.get("missing_nodes", [])]
    states = {name: process_state(name, record, nodes, now.info) for name, record in table.processes.items()}
    return [(name, state) for name, state in states.items() if name not in nodes and state != "up"]
