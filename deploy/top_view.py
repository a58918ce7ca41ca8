"""Renders `deploy/top`: one line about the cluster's latency, and a row for each node."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.markup import escape
from rich.measure import Measurement
from rich.table import Table as RichTable
from rich.text import Text

from deploy.cluster_sample import NO_BUCKETS, Buckets, ClusterSample, NodeRates, node_rates
from deploy.process_table import Table
from deploy.status_view import pages_text, process_state, rank_rows

COLUMNS = (
    *("node", "role", "state", "running", "queued", "moving", "pages free / all", "used", "tokens/s"),
    *("accept", "graphs"),
)
LEFT_OUT = ("pages free / all", "graphs", "moving", "accept")  # where the terminal is narrow, in this order


@dataclass(slots=True)
class NodeTable:
    """The rows of the nodes with as many columns as the terminal is wide enough for."""

    rows: list[tuple[dict[str, str], str | None]]  # text by column, style

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Leave out columns until no text is cut, or only the most important ones are left."""
        names = list(COLUMNS)
        unbounded = options.update(max_width=1000)
        for name in LEFT_OUT:
            if Measurement.get(console, unbounded, self._view(names)).maximum <= options.max_width:
                break
            names.remove(name)
        yield self._view(names)

    def _view(self, names: Sequence[str]) -> RichTable:
        view = RichTable(*names)
        for column in view.columns[3:]:
            column.justify = "right"
        for texts, style in self.rows:
            view.add_row(*(texts.get(name, "") for name in names), style=style)
        return view


def render(samples: Sequence[ClusterSample], table: Table | None) -> RenderableType:
    """Return the picture of the last sample, with rates since the first one. `table`: the supervisor's, if any."""
    before, now = samples[0], samples[-1]
    seconds = now.at - before.at
    view = NodeTable([])
    earlier = {node["name"]: node for node in before.nodes} if seconds > 0 else {}
    generated = 0.0
    for node in sorted(now.nodes, key=lambda each: (each["role"] != "prefill", each["name"])):
        rates = node_rates(node, earlier.get(node["name"]), seconds)
        generated += (rates.tokens_per_s or 0.0) if node["role"] == "decode" else 0.0
        _add(view, node, rates)
    for name, state in _absent(now, table):
        view.rows.append(({"node": escape(name), "state": escape(state)}, "red"))
    return Group(*_head(before, now, generated), view)


def _head(before: ClusterSample, now: ClusterSample, generated: float) -> list[Text]:
    info = now.info
    state = "ready" if info.get("ready") else "not ready"
    requests = f"{info.get('active_requests', 0)} requests, {now.waiting_for_room} of them waiting for room"
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
    if math.isnan(seconds):
        return "-"
    return f"{1e3 * seconds:.3g}" if seconds < 1 else f"{1e3 * seconds:,.0f}"


def _add(view: NodeTable, node: dict[str, Any], rates: NodeRates) -> None:
    load = node["load"]
    total = load["total_pages"]
    used = total - load["free_pages"] - load["cached_pages"]
    texts = {
        "node": escape(node["name"]),
        "role": node["role"],
        "state": escape(str(node.get("state", "up"))),
        "running": str(load["running"]),
        "queued": str(load["queued"]),
        "moving": str(load["transferring"]),
        "pages free / all": pages_text(load),
        "used": f"{used / total:.0%}" if total else "-",
        "tokens/s": "-" if rates.tokens_per_s is None else f"{rates.tokens_per_s:,.0f}",
        "accept": "-" if rates.accept_length is None else f"{rates.accept_length:.2f}",
        "graphs": "-" if rates.graph_share is None else f"{rates.graph_share:.0%}",
    }
    view.rows.append((texts, None if node.get("state", "up") == "up" else "yellow"))
    for name, text in rank_rows(node):
        view.rows.append(({"node": escape(name), "state": escape(text)}, "dim"))


def _absent(now: ClusterSample, table: Table | None) -> list[tuple[str, str]]:
    """Return (name, state) of what should run and is not registered."""
    nodes = {node["name"]: node for node in now.nodes}
    if table is None:
        return [(each["name"], "not registered") for each in now.info.get("missing_nodes", [])]
    states = {name: process_state(name, record, nodes, now.info) for name, record in table.processes.items()}
    return [(name, state) for name, state in states.items() if name not in nodes and state != "up"]
