"""A mixer without request state, and a feed-forward of experts: blocks that tests add by one table row each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from common.checkpoint.families import Family, LayerKind
from common.checkpoint.model_config import ModelConfig
from common.engine.attention.backend import AttentionBackend, TokenSlots
from common.engine.layers.activations import DENSE, Activations
from common.engine.layers.blocks import FeedForward, Mixer
from common.engine.layers.linear import WeightFormat
from common.engine.layers.norm import RmsNorm
from common.engine.layers.piece import Piece
from common.engine.ops.rms_norm import add_rms_norm
from common.kv_cache.layer_kinds import MixerRecord

EXPERTS, CHOSEN = 3, 2


class LocalMixer(Mixer):
    """out(silu(in(x))): treats every token by itself."""

    def __init__(self, name: str, config: ModelConfig, layer: int, weights: WeightFormat) -> None:
        super().__init__()
        size = config.hidden_size
        self.inward = weights.linear(size, {f"{name}.local.in": 2 * size}, bias=False)
        self.outward = weights.linear(size, {f"{name}.local.out": size}, bias=False)
        self.reads = self.inward.reads

    def add_norm(
        self,
        x: Activations,
        stream: Tensor,
        norm: RmsNorm,
        angles: tuple[Tensor, Tensor],
        attention: AttentionBackend,
    ) -> tuple[Activations, Tensor]:
        return self.outward.add_norm(self.inward.gated(x, self.outward.reads), stream, norm)

    def forward(self, x: Activations, angles: tuple[Tensor, Tensor], attention: AttentionBackend) -> Tensor:
        return self.outward.product(self.inward.gated(x, self.outward.reads))

    def pieces(self) -> Iterator[Piece]:
        yield from self.inward.pieces()
        yield from self.outward.pieces()


class Experts(FeedForward):
    """The sum of the most likely experts. The checkpoint stores all of them as one tensor [experts, 2 H, H]."""

    reads = DENSE

    def __init__(self, name: str, config: ModelConfig, weights: WeightFormat) -> None:
        super().__init__()
        size, placement = config.hidden_size, weights.placement
        self.name = f"{name}.mlp.experts"
        self.router = weights.linear(size, {f"{name}.mlp.gate": EXPERTS}, bias=False)
        shape = (EXPERTS, size, size)
        self.up = torch.nn.Parameter(torch.empty(shape, dtype=placement.dtype), requires_grad=False)
        self.down = torch.nn.Parameter(torch.empty(shape, dtype=placement.dtype), requires_grad=False)

    def forward(self, x: Activations) -> Tensor:
        likely = self.router.product(x).softmax(-1)
        best, chosen = likely.topk(CHOSEN)
        share = torch.zeros_like(likely).scatter(-1, chosen, best)
        inner = F.silu(torch.einsum("th,eih->tei", x.tensor(), self.up))
        return torch.einsum("tei,ehi,te->th", inner, self.down, share)

    def add_norm(
        self, x: Activations, stream: Tensor, norm: RmsNorm, slots: TokenSlots | None = None
    ) -> tuple[Activations, Tensor]:
        normed, total = add_rms_norm(self(x), stream, norm.weight, norm.eps)
        return Activations(normed), total

    def pieces(self) -> Iterator[Piece]:
        yield from self.router.pieces()
        count, size, _ = self.up.shape
        whole = (count, 2 * size, size)
        yield Piece(self.name, self.up, whole, (0, 0, 0))
        yield Piece(self.name, self.down, whole, (0, size, 0))


def layer_kinds(raw: Mapping[str, Any], layers: int, where: str) -> tuple[LayerKind, ...]:
    return tuple(LayerKind(mixer, feed_forward) for mixer, feed_forward in raw["blocks"])


LOCAL = MixerRecord(lambda *_: (), "tests.fakes.toy_blocks:LocalMixer")
FAMILY = Family(layer_kinds=layer_kinds)
