"""Graphs at a node's start: a trial of them sizes the KV pool, then they are captured, and a table says what became."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from common.engine.graphs import node_graphs
from common.engine.graphs.node_graphs import NodeGraphs
from common.engine.graphs.report import node_table
from common.errors import ConfigError
from common.node.serving_model import ServingModel
from common.observability.logs import Log

# Keys of a section: less of these, less for its graphs.
SMALLER = {"prefill": "chunk_tokens or max_batch", "decode": "max_running"}


def sized(served: ServingModel, build: Callable[[], Iterable[NodeGraphs[Any]]]) -> ServingModel:
    """`served` with the pool that fits beside its graphs, which a trial measures on a GPU; on a CPU as it is.

    Raises ConfigError with the arithmetic where the graphs do not fit, or no pool beside them.

    Args:
        build: the forwards of the node, not captured, over the pool of `served`.
    """
    if served.placement.device.type != "cuda":
        return served
    try:
        nbytes = graph_trial(build)
    except torch.OutOfMemoryError as error:
        raise _no_room(served, "the graphs do not fit, whatever the pool", error) from error
    return served.with_pool(nbytes)


def graph_trial(build: Callable[[], Iterable[NodeGraphs[Any]]]) -> int:
    """Bytes that the graphs of a GPU node will take; nothing of them stays. Raises torch.OutOfMemoryError."""
    try:
        return node_graphs.trial(build, _reserved)
    finally:
        gc.collect()  # modules and runners refer to each other
        torch.cuda.empty_cache()


def capture(served: ServingModel, graphs: Sequence[NodeGraphs[Any]], log: Log) -> None:
    """All graphs of a node, then the table that says what became of each, a line a record.

    Raises ConfigError where what was not captured does not run without a graph either.
    """
    for each in graphs:
        try:
            node_graphs.capture(each, log)
        except torch.OutOfMemoryError as error:
            what = f"{each.decision.phase} runs neither under a graph nor without one"
            raise _no_room(served, what, error) from error
    for line in node_table(map(node_graphs.report, graphs)):
        log.info("graphs", table=line)


def _reserved() -> int:
    """Without what no tensor and no graph lies in: warm-ups leave that."""
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved()


def _no_room(served: ServingModel, what: str, error: torch.OutOfMemoryError) -> ConfigError:
    section, device = served.wish.section, served.placement.device
    reason = str(error).splitlines()[0]
    return ConfigError(
        f"{section}.graphs",
        f"{what}, on {device}: {reason} Beside them: {served.plan}. Lower {section}.{SMALLER[section]}, write "
        f"{section}.graphs: none, or use a larger GPU",
    )
