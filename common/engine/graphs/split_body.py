"""The graph of a model's body, split at attention.

Tracing finds two marks per layer where an attention backend would be: one keeps keys and values, one attends. From the
first to the second of a layer the graph is a *seam*: it only slices tensors between the two, and runs as written, with
the attention backend of the call in the marks' place. All else is *pieces*, which know nothing of requests: these are
what a compiler gets.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.passes.split_module import split_module

from common.engine.attention.backend import AttentionBackend
from common.engine.forward.batch import ForwardBatch
from common.engine.ops.registration import library

# Without an implementation: whatever is traced has other calls in their place before it runs.
library.define(
    "tandem::mark_store",
    "(int layer, Tensor(a!) qkv, Tensor cos, Tensor sin, Tensor? q_weight, Tensor? k_weight, float eps) -> ()",
)
library.register_fake("tandem::mark_store", lambda *_: None)
library.define("tandem::mark_attend", "(int layer, Tensor query, Tensor key, Tensor value) -> Tensor")
library.register_fake("tandem::mark_attend", lambda _, query, *rest: query.new_empty(query.shape))
STORE, ATTEND = torch.ops.tandem.mark_store.default, torch.ops.tandem.mark_attend.default


class MarkedAttention:
    """Leaves the marks in a trace. An `AttentionBackend`."""

    def plan(self, batch: ForwardBatch) -> None:
        """Nothing: a trace is of no batch."""

    def store(
        self,
        layer: int,
        qkv: Tensor,
        angles: tuple[Tensor, Tensor],
        q_weight: Tensor | None,
        k_weight: Tensor | None,
        eps: float,
    ) -> None:
        STORE(layer, qkv, *angles, q_weight, k_weight, eps)

    def forward(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out: Tensor = ATTEND(layer, query, key, value)
        return out


class LiveAttention:
    """What seams call: the attention backend of the body's call in progress."""

    def __init__(self) -> None:
        self.backend: AttentionBackend | None = None

    def seam(self, part: GraphModule) -> None:
        """Put calls in the place of the marks of `part`."""

        def store(
            layer: int,
            qkv: Tensor,
            cos: Tensor,
            sin: Tensor,
            q_weight: Tensor | None,
            k_weight: Tensor | None,
            eps: float,
        ) -> None:
            self._called().store(layer, qkv, (cos, sin), q_weight, k_weight, eps)

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            return self._called().forward(layer, query, key, value)

        calls: dict[object, Callable[..., object]] = {STORE: store, ATTEND: attend}
        for node in part.graph.nodes:
            node.target = calls.get(node.target, node.target)
        part.recompile()

    def _called(self) -> AttentionBackend:
        assert self.backend is not None, "a seam outside a call of its body"
        return self.backend


def split(graph: GraphModule) -> GraphModule:
    """Pieces and seams in order, as the submodules of a module that calls them one after another."""
    places, place = {}, 0
    for node in graph.graph.nodes:
        place += node.target is STORE
        places[node] = place
        place += node.target is ATTEND
    parts: GraphModule = split_module(graph, graph, lambda node: places[node], keep_original_order=True)
    return parts


def is_seam(part: GraphModule) -> bool:
    return any(node.target in (STORE, ATTEND) for node in part.graph.nodes)
