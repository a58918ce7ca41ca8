"""One rank of a decode node from its checkpoint to captured steps; all ranks of a node do the same at the same time."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from common.engine.forward.rotary_places import rotary_places
from common.engine.graphs.node_graphs import NodeGraphs
from common.engine.layers.ranks import expert_division
from common.engine.state.relay_state import RelayState
from common.node import graph_start
from common.node.ranks.peers import RankPeers
from common.node.serving_device import serving_device
from common.node.serving_model import ServingModel, load_serving_model
from common.node_plan import NodePlan
from common.observability.logs import Log
from decode_node.assemble import Computation
from decode_node.forwards import Forwards, step_forwards
from decode_node.steps import StepSizes
from kv_transfer.transport.cuda.cudart import CudaRuntime


@dataclass(frozen=True, slots=True)
class LoadedRank:
    """The models of a rank; the ranks of its node have agreed on the size of their pools."""

    served: ServingModel
    relay: RelayState
    sizes: StepSizes
    peers: RankPeers

    def forwards(self, allocate: Callable[[int], Tensor]) -> Forwards:
        """Compose the steps over a pool, whose bytes come from `allocate`. Their graphs are not captured."""
        return step_forwards(self.sizes, self.served, self.relay, allocate)

    def capture(self, forwards: Forwards, log: Log) -> None:
        """Capture the graphs that all ranks can have."""
        self.peers.report("capturing")
        graph_start.capture(self.served, forwards.graphs, log, self.peers.exchange)

    def computation(self, forwards: Forwards) -> Computation:
        """Return the parts of a worker."""
        served = self.served
        return Computation(
            forwards,
            self.relay,
            self.sizes.completion(served.placement.device),
            rotary_places(served.config.rope),
            served.draft_shape,
        )


def load_rank(
    plan: NodePlan, sizes: StepSizes, peers: RankPeers, log: Log, loaded: ServingModel | None = None
) -> LoadedRank:
    """Load the share of one rank, and agree with the others on the size of the pool.

    Raises ConfigError or ModelError with the remedy.

    Args:
        loaded: has the weights on the device already.
    """
    peers.connect(serving_device(plan.device), CudaRuntime, log)
    ranks = peers.ranks(expert_division(plan.expert_parallel))
    served = load_serving_model(plan, peers, log, ranks, loaded)
    peers.report("allocating")
    device, carried = served.placement.device, served.draft_shape
    relay = RelayState.allocate(plan.max_rows, served.config.vocab_size, device, carried, served.state.window)
    trial = functools.partial(torch.zeros, dtype=torch.uint8, device=device)

    def graphs() -> Sequence[NodeGraphs[Any]]:
        return step_forwards(sizes, served, relay, trial).graphs

    peers.report("compiling")
    graph_start.compiled(device, graphs, log, peers.exchange)
    peers.report("sizing")
    served = graph_start.sized(served, graphs)
    return LoadedRank(graph_start.agreed(served, peers.exchange), relay, sizes, peers)
