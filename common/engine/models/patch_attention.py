"""The attention of a vision tower's block: patches attend within segments, such as windows or whole images."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

from common.engine.attention.segments import Segments, attend_within
from common.engine.layers.activations import Activations
from common.engine.layers.linear import WeightFormat
from common.engine.layers.piece import Piece
from common.engine.ops.rotary_kv_write import rotary_qk


class PatchAttention(nn.Module):
    """Attention with biases and one product for query, key and value. `name`: of the block in the checkpoint."""

    def __init__(self, name: str, width: int, heads: int, weights: WeightFormat) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = weights.linear(width, {f"{name}.attn.qkv": 3 * width}, True)
        self.proj = weights.linear(width, {f"{name}.attn.proj": width}, True)

    def forward(self, x: Tensor, turn: tuple[Tensor, Tensor], segments: Segments) -> Tensor:
        """Return [N, C] for x [N, C]. Query, key and value are released before the next layer needs as much memory."""
        qkv = self.qkv.product(Activations(x)).view(len(x), 3, self.heads, -1)
        rotary_qk(qkv, *turn)
        query, key, value = qkv.unbind(1)
        attended = attend_within(query, key, value, segments)
        return self.proj.product(Activations(attended.flatten(1)))

    def pieces(self) -> Iterator[Piece]:
        for part in (self.qkv, self.proj):
            yield from part.pieces()
