"""The graph of a model's body, split at attention.

A trace contains two marks per layer in place of the attention backend's calls: one stores keys and values, one
attends. From the first to the second mark of a layer the graph is a *seam*: it only slices tensors between the two,
and runs as written, with calls of the live attention backend instead of the marks. A mixer other than attention leaves
one mark, which is a seam by itself. The rest are *pieces*, which do not depend on requests: these are compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.passes.split_module import split_module

from common.engine.attention.backend import AttentionBackend
from common.engine.forward.batch import ForwardBatch
from common.engine.ops.registration import library

# The marks have no implementation: they are replaced before traced code runs.
library.define(
    "tandem::mark_store",
    "(int layer, Tensor(a!) qkv, Tensor cos, Tensor sin, Tensor? q_weight, Tensor? k_weight, float eps) -> ()",
)
library.register_fake("tandem::mark_store", lambda *_: None)
library.define("tandem::mark_attend", "(int layer, Tensor query, Tensor key, Tensor value) -> Tensor")
library.register_fake("tandem::mark_attend", lambda _, query, *rest: query.new_empty(query.shape))
library.define(
    "tandem::mark_mix",
    "(int layer, str operation, Tensor projected, int width, Tensor[] weights, float eps) -> Tensor",
)
library.register_fake(
    "tandem::mark_mix",
    lambda _layer, _name, projected, width, *rest: projected.new_empty(projected.shape[0], width),
)
STORE, ATTEND = torch.ops.tandem.mark_store.default, torch.ops.tandem.mark_attend.default
MIX = torch.ops.tandem.mark_mix.default


class MarkedAttention:
    """Leaves the marks in a trace. Implements `AttentionBackend`."""

    def plan(self, batch: ForwardBatch) -> None:
        """No-op: a trace has no batch."""

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

    def mix(
        self,
        layer: int,
        operation: str,
        projected: Tensor,
        width: int,
        weights: Sequence[Tensor] = (),
        eps: float = 0.0,
    ) -> Tensor:
        out: Tensor = MIX(layer, operation, projected, width, list(weights), eps)
        return out

    def token_slots(self) -> None:
        """Return None: a trace has no batch."""


class LiveAttention:
    """The attention backend of the body's call in progress, which seams call."""

    def __init__(self) -> None:
        self.backend: AttentionBackend | None = None

    def seam(self, part: GraphModule) -> None:
        """Replace the marks of `part` by calls."""

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

        def mix(
            layer: int, operation: str, projected: Tensor, width: int, weights: Sequence[Tensor], eps: float
        ) -> Tensor:
            return self._called().mix(layer, operation, projected, width, weights, eps)

        calls: dict[object, Callable[..., object]] = {STORE: store, ATTEND: attend, MIX: mix}
        for node in part.graph.nodes:
            node.target = calls.get(node.target, node.target)
        part.recompile()

    def _called(self) -> AttentionBackend:
        assert self.backend is not None, "a seam outside a call of its body"
        return self.backend


def split(graph: GraphModule) -> GraphModule:
    """Return pieces and seams in order, as submodules of a module that calls them one after another."""
    places, place = {}, 0
    for node in graph.graph.nodes:
        place += node.target in (STORE, MIX)
        places[node] = place
        place += node.target in (ATTEND, MIX)
    parts: GraphModule = split_module(graph, graph, lambda node: places[node], keep_original_order=True)
    return parts


def is_seam(part: GraphModule) -> bool:
    return any(node.target in (STORE, ATTEND, MIX) for node in part.graph.nodes)
