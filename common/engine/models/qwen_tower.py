"""The layers of Qwen2.5-VL's tower: blocks of norm, attention, norm, SwiGLU around one stream, then the merger.

The code minimises launches, which take most of such a tower's time: sums are fused with norms, queries and keys are
rotated together in place, gate and up are one product. Source: arXiv 2502.13923, 2.1.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor, nn

from common.engine.attention.segments import Segments
from common.engine.encoder_sizes import aligned_width
from common.engine.formats.dense import DenseFormat, LibraryLinear
from common.engine.layers.activations import Activations
from common.engine.layers.linear import WeightFormat
from common.engine.layers.norm import RmsNorm
from common.engine.layers.piece import Piece
from common.engine.layers.placement import Placement
from common.engine.models.patch_attention import PatchAttention
from common.engine.models.patch_merger import EPS, Ints, PatchMerger, TowerSizes


class VisionMlp(nn.Module):
    """SwiGLU whose inner width is rounded up; the additional values are zero and stay zero."""

    def __init__(self, name: str, width: int, inner: int, weights: WeightFormat) -> None:
        super().__init__()
        self.inner = inner
        padded = aligned_width(inner)
        self.gate_up = weights.linear(width, {f"{name}.gate_proj": padded, f"{name}.up_proj": padded}, True)
        self.down = weights.linear(padded, {f"{name}.down_proj": width}, True)
        for each in self.parameters():
            each.zero_()

    def forward(self, x: Tensor) -> Tensor:
        """Return [N, C] for x [N, C]."""
        return self.down.product(self.gate_up.gated(Activations(x), self.down.reads))

    def pieces(self) -> Iterator[Piece]:
        for piece in self.gate_up.pieces():
            yield Piece.all_of(piece.name, piece.into[: self.inner])
        for piece in self.down.pieces():
            view = piece.into
            yield Piece.all_of(piece.name, view[:, : self.inner] if view.ndim == 2 else view)


class VisionBlock(nn.Module):
    """One block over the patches of all images of a batch."""

    def __init__(self, name: str, width: int, inner: int, heads: int, weights: WeightFormat) -> None:
        super().__init__()
        self.norm1 = RmsNorm(f"{name}.norm1", width, EPS, weights.placement)
        self.norm2 = RmsNorm(f"{name}.norm2", width, EPS, weights.placement)
        self.attention = PatchAttention(name, width, heads, weights)
        self.mlp = VisionMlp(f"{name}.mlp", width, inner, weights)

    def forward(
        self, x: Tensor, residual: Tensor | None, turn: tuple[Tensor, Tensor], segments: Segments
    ) -> tuple[Tensor, Tensor]:
        """Return (x, residual) after the block; the stream is x + residual (None: only x) [N, C]."""
        normed, residual = (self.norm1(x), x) if residual is None else self.norm1.add(x, residual)
        normed, residual = self.norm2.add(self.attention(normed, turn, segments), residual)
        return self.mlp(normed), residual

    def pieces(self) -> Iterator[Piece]:
        for part in (self.norm1, self.norm2, self.attention, self.mlp):
            yield from part.pieces()


class VisionTower(nn.Module):
    """Embeds patches, runs the blocks, and merges groups of patches into rows of the language model."""

    def __init__(self, sizes: TowerSizes, placement: Placement) -> None:
        super().__init__()
        width, self.patch = sizes.width, sizes.patch
        weights = DenseFormat(placement, LibraryLinear)
        self.embed = weights.linear(sizes.values, {"patch_embed.proj": width}, False)
        self.blocks = nn.ModuleList(
            VisionBlock(f"blocks.{index}", width, sizes.inner, sizes.heads, weights)
            for index in range(sizes.depth)
        )
        self.norm = RmsNorm("merger.ln_q", width, EPS, placement)
        self.merger = PatchMerger(sizes, ("merger.mlp.0", "merger.mlp.2"), weights)

    def embedded(self, patches: Tensor) -> Tensor:
        """Return [N, C] for [N, values].

        A convolution over whole patches is a product, which cuDNN does not exploit.
        """
        return self.embed.product(Activations(patches))

    def corners(self, places: Ints, sizes: Sequence[tuple[int, int]]) -> Sequence[Ints]:
        """Return nothing: the tower has no learned positions."""
        return ()

    def placed(self, embedded: Tensor, positions: Sequence[Tensor]) -> Tensor:
        """Return [N, C] as it is: only the angles of attention depend on positions."""
        return embedded

    def merged(self, x: Tensor, residual: Tensor) -> Tensor:
        """Return [N / group, H] for x and residual [N, C]."""
        normed, _ = self.norm.add(x, residual)
        return self.merger.merged(normed)

    def pieces(self) -> Iterator[Piece]:
        """Yield the pieces it reads. Their names lack the prefix that the checkpoint's layout has for the tower."""
        for piece in self.embed.pieces():
            yield Piece.all_of(piece.name, piece.into.view(-1, *self.patch))
        for block in self.blocks:
            assert isinstance(block, VisionBlock)
            yield from block.pieces()
        yield from self.norm.pieces()
        yield from self.merger.pieces()
