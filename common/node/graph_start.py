"""Graphs at a node's start: a trial of them sizes the KV pool, then they are captured, and a table reports on them."""

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

# Keys of a section: lowering them makes its graphs smaller.
SMALLER = {"prefill": "chunk_tokens or max_batch", "decode": "max_running"}


def sized(served: ServingModel, build: Callable[[], Iterable[NodeGraphs[Any]]]) -> ServingModel:
    """Return `served` with the pool that fits next to its graphs, measured by a trial on a GPU; unchanged on a CPU.

    Raises ConfigError with the arithmetic if the graphs do not fit, or no pool fits next to them.

    Args:
        build: makes the forwards of the node, not captured, over the pool of `served`.
    """
    if served.placement.device.type != "cuda":
        return served
    try:
        nbytes = graph_trial(build)
    except torch.OutOfMemoryError as error:
        raise _no_room(served, "the graphs do not fit even without a pool", error) from error
    return served.with_pool(nbytes)


def graph_trial(build: Callable[[], Iterable[NodeGraphs[Any]]]) -> int:
    """Return the bytes that the graphs of a GPU node will take; all are released. Raises torch.OutOfMemoryError."""
    try:
        return node_graphs.trial(build, _reserved)
    finally:
        gc.collect()  # modules and runners refer to each other
        torch.cuda.empty_cache()


def capture(served: ServingModel, graphs: Sequence[NodeGraphs[Any]], log: Log) -> None:
    """Capture all graphs of a node, then log a table of the results, one record per line.

    Raises ConfigError if a forward that was not captured does not run without a graph either.
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
    """Return reserved bytes without blocks that no tensor and no graph uses, which warm-ups leave."""
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved()


def _no_room(served: ServingModel, what: str, error: torch.OutOfMemoryError) -> ConfigError:
    section, device = served.memory.budget.section, served.placement.device
    reason = str(error).splitlines()[0]
    return ConfigError(
        f"{section}.graphs",
        f"{what}, on {device}: {reason} Memory plan: {served.memory.plan}. Lower {section}.{SMALLER[section]}, write "
        f"{section}.graphs: none, or use a larger GPU",
    )
