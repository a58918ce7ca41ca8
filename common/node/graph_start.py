"""Graphs at a node's start: a trial of them sizes the KV pool, then they are captured, and a table reports on them."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import torch

from common.engine.graphs import node_graphs
from common.engine.graphs.node_graphs import CompilePass, NodeGraphs
from common.engine.graphs.report import node_table
from common.engine.graphs.spec import GraphKey
from common.engine.ops.compile_ahead import KernelsAhead, compiling_ahead
from common.engine.ops.triton_kernel import has_triton
from common.errors import ConfigError
from common.node.serving_model import ServingModel
from common.observability.logs import Log

MISSED = b"missed"  # what a rank says if it compiles kernels that were not in the cache
# Keys of a section: lowering them makes its graphs smaller.
SMALLER = {"prefill": "chunk_tokens or max_batch", "decode": "max_running"}


def compiled(
    device: torch.device,
    build: Callable[[], Iterable[NodeGraphs[Any]]],
    log: Log,
    exchange: Callable[[bytes], Sequence[bytes]] = lambda own: (own,),
) -> None:
    """Compile the kernels of a node on all cores, if it has a GPU and they are not in Triton's cache on disk.

    Whether they are is known from the largest shapes. All ranks record the same graphs, since a library's sums connect
    them while they are captured.

    Args:
        build: makes the forwards of the node, not captured. What else it launches is compiled, too, and not run.
        exchange: gives this rank's bytes to the others and returns those of all ranks.
    """
    if device.type != "cuda" or not has_triton():
        return
    with compiling_ahead(device) as kernels:
        _record_all(kernels, build, log, exchange)
    _release()


def _record_all(
    kernels: KernelsAhead,
    build: Callable[[], Iterable[NodeGraphs[Any]]],
    log: Log,
    exchange: Callable[[bytes], Sequence[bytes]],
) -> None:
    try:
        graphs = CompilePass(kernels, build(), log)
        graphs.largest()
    except torch.OutOfMemoryError:
        graphs = CompilePass(kernels, (), log)  # `sized` refuses what does not fit, with the arithmetic
    own = MISSED if not kernels.were_cached() else b""
    if MISSED in exchange(own):
        graphs.others()


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


def agreed(served: ServingModel, exchange: Callable[[bytes], Sequence[bytes]]) -> ServingModel:
    """Return `served` with the pool that every rank of the node has room for.

    Args:
        exchange: gives this rank's bytes to the others and returns those of all ranks.
    """
    own = msgspec.msgpack.encode((served.num_pages, served.max_model_len))
    given = [msgspec.msgpack.decode(each, type=tuple[int, int]) for each in exchange(own)]
    pages, longest = (min(each) for each in zip(*given, strict=True))
    return replace(served, num_pages=pages, max_model_len=min(longest, (pages - 1) * served.page_size))


def graph_trial(build: Callable[[], Iterable[NodeGraphs[Any]]]) -> int:
    """Return the bytes that the graphs of a GPU node will take; all are released. Raises torch.OutOfMemoryError."""
    try:
        return node_graphs.trial(build, _reserved)
    finally:
        _release()


def capture(
    served: ServingModel,
    graphs: Sequence[NodeGraphs[Any]],
    log: Log,
    exchange: Callable[[bytes], Sequence[bytes]] = lambda own: (own,),
) -> None:
    """Capture all graphs of a rank, then log a table of the results, one record per line.

    Graphs that some rank lacks are dropped on all of them, since all ranks have to run the same.

    Raises ConfigError if a forward that was not captured does not run without a graph either.
    """

    def common(own: Sequence[GraphKey]) -> Sequence[GraphKey]:
        every = [
            msgspec.msgpack.decode(each, type=list[GraphKey])
            for each in exchange(msgspec.msgpack.encode(own))
        ]
        return [key for key in own if all(key in each for each in every)]

    for each in graphs:
        try:
            node_graphs.capture(each, log, common)
        except torch.OutOfMemoryError as error:
            what = f"{each.decision.phase} runs neither under a graph nor without one"
            raise _no_room(served, what, error) from error
    for line in node_table(map(node_graphs.report, graphs)):
        log.info("graphs", table=line)


def _release() -> None:
    """Release the memory of forwards that nothing uses any more."""
    gc.collect()  # modules and runners refer to each other
    torch.cuda.empty_cache()


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
