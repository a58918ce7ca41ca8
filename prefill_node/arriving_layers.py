"""Lets each layer of a forward wait only for the copies of cached prefixes to that layer, not for those to others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from common.engine.attention.backend import AttentionBackend
from common.engine.forward.batch import ForwardBatch
from common.node.host_lane import Stage
from prefill_node.around_attention import AroundAttention


class ArrivingLayers:
    """The copies that no launched forward waits for yet, by the layer of the target that reads them."""

    def __init__(self) -> None:
        self._layers: dict[int, Stage] = {}
        self._copied: Stage | None = None
        self._compared: Stage | None = None

    def expect(self, layers: Mapping[int, Stage], copied: Stage, compared: Stage) -> None:
        """Let the next forward wait for these copies.

        `copied` follows all of them, and those to the draft's planes; `compared` follows the checksums of pages.
        """
        self._layers, self._copied, self._compared = dict(layers), copied, compared

    def layer(self, layer: int) -> None:
        """Let all work launched from now on begin after the copies to one layer."""
        stage = self._layers.pop(layer, None)
        if stage is not None:
            stage.follow()

    def whole(self) -> None:
        """Let all work launched from now on begin after all copies."""
        if self._copied is not None:
            self._copied.follow()
        self._layers, self._copied = {}, None

    def compared(self) -> None:
        """Let all work launched from now on begin after the checksums: it may write to pages that were loaded."""
        if self._compared is not None:
            self._compared.follow()
        self._layers, self._copied, self._compared = {}, None, None


class ArrivingAttention(AroundAttention):
    """Attention of the target. Where a graph has breaks at attention, a layer waits for its own copies only."""

    def __init__(self, inner: AttentionBackend, arriving: ArrivingLayers, unbroken_tokens: int) -> None:
        """`unbroken_tokens`: forwards of up to this many tokens, padding included, may be graphs without breaks."""
        super().__init__(inner)
        self._arriving = arriving
        self._unbroken_tokens = unbroken_tokens

    def plan(self, batch: ForwardBatch) -> None:
        if len(batch.positions) <= self._unbroken_tokens:
            self._arriving.whole()
        super().plan(batch)

    def forward(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        self._arriving.layer(layer)
        return super().forward(layer, query, key, value)

    def mix(
        self,
        layer: int,
        operation: str,
        projected: Tensor,
        width: int,
        weights: Sequence[Tensor] = (),
        eps: float = 0.0,
    ) -> Tensor:
        self._arriving.layer(layer)
        return super().mix(layer, operation, projected, width, weights, eps)


class DraftArrivingAttention(AroundAttention):
    """Attention of the draft: it runs after the target, reads what the last copies bring and may rewrite its end."""

    def __init__(self, inner: AttentionBackend, arriving: ArrivingLayers) -> None:
        super().__init__(inner)
        self._arriving = arriving

    def plan(self, batch: ForwardBatch) -> None:
        self._arriving.compared()
        super().plan(batch)
