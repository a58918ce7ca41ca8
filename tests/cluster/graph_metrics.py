"""Reads the graph metrics: what ran under graphs, what did not, and why."""

from __future__ import annotations

import re


def graph_series(text: str, role: str) -> dict[tuple[str, str, str, str], float]:
    """Return (series, phase, model, reason) -> value, from /metrics."""
    found = {}
    for name, labels, value in re.findall(r"^(tandem_graphs?_\w+)\{(.*)\} (\S+)$", text, re.MULTILINE):
        of = dict(re.findall(r'(\w+)="([^"]*)"', labels))
        if of["role"] == role:
            found[name, of["phase"], of["model"], of.get("reason", "")] = float(value)
    return found


def replay_share(series: dict[tuple[str, str, str, str], float], phase: str, model: str) -> float:
    """Return the share of all forwards of a phase that were replayed; 0 if none ran."""
    replays = series.get(("tandem_graph_replays_total", phase, model, ""), 0.0)
    eager = sum(
        value for key, value in series.items() if key[:3] == ("tandem_graph_fallbacks_total", phase, model)
    )
    return replays / (replays + eager) if replays + eager else 0.0
