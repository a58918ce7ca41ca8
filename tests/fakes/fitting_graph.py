"""Tells which graph of a runner fits a batch."""

from __future__ import annotations

from typing import TypeVar

from common.engine.graphs.graph_runner import GraphRunner
from common.engine.graphs.spec import ShapeKey

Batch = TypeVar("Batch")
Output = TypeVar("Output")


def fitting_graph(graphs: GraphRunner[Batch, Output], batch: Batch) -> tuple[ShapeKey | None, str]:
    """Return (shape, "") if a graph would serve the batch, else (None, reason)."""
    key, reason = graphs.choose(graphs.program.facts(batch))
    return (None, reason) if key is None else (key.shape, "")
