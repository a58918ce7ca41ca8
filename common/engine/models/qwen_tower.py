"""The layers of Qwen2.5-VL's tower: blocks of norm, attention, norm, SwiGLU around one stream; the merger behind them.

Written for few launches, which are most of such a tower's time: sums are fused with norms, queries and keys are rotated
together in place, gate and up are one product. Source: arXiv 2502.13923, 2.1.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common.engine.attention.segments import Segments, attend_within
from common.engine.layers.linear import Linear
from common.engine.layers.norm import RmsNorm
from common.engine.layers.placement import Placement
from common.engine.ops.linear import gated_linear
from common.engine.ops.rotary_kv_write import rotary_qk

EPS = 1e-6
ALIGNED = (
    64  # elements: matrix units want rows of whole 16 bytes, which the published inner width, 3,420, has not
)


def rounded_up(inner: int) -> int:
    """The width inside an MLP as it is computed."""
    return -(-inner // ALIGNED) * ALIGNED


class VisionMlp(nn.Module):
    """SwiGLU whose inner width is rounded up; what that adds is zero and stays zero."""

    def __init__(self, width: int, inner: int, placement: Placement) -> None:
        super().__init__()
        self.inner = inner
        padded = rounded_up(inner)
        self.gate_up = Linear(width, {"gate_proj": padded, "up_proj": padded}, True, placement)
        self.down = Linear(padded, {"down_proj": width}, True, placement)
        for each in (*self.gate_up.parameters(), self.down.weight):
            each.zero_()

    def forward(self, x: Tensor) -> Tensor:
        """[N, C] -> [N, C]."""
        gated = gated_linear(x, self.gate_up.weight, self.gate_up.bias)
        return F.linear(gated, self.down.weight, self.down.bias)

    def checkpoint_tensors(self, prefix: str) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self.gate_up.checkpoint_tensors(prefix):
            yield name, tensor[: self.inner]
        for name, tensor in self.down.checkpoint_tensors(prefix):
            yield name, tensor[:, : self.inner] if tensor.ndim == 2 else tensor


class VisionBlock(nn.Module):
    """Over patches of all images of a batch."""

    def __init__(self, width: int, inner: int, heads: int, placement: Placement) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = RmsNorm(width, EPS, placement)
        self.norm2 = RmsNorm(width, EPS, placement)
        self.qkv = Linear(width, {"qkv": 3 * width}, True, placement)
        self.proj = Linear(width, {"proj": width}, True, placement)
        self.mlp = VisionMlp(width, inner, placement)

    def forward(
        self, x: Tensor, residual: Tensor | None, turn: tuple[Tensor, Tensor], segments: Segments
    ) -> tuple[Tensor, Tensor]:
        """The stream is x + residual (None: x alone) [N, C]; returns (x, residual) behind the block."""
        normed, residual = (self.norm1(x), x) if residual is None else self.norm1.add(x, residual)
        normed, residual = self.norm2.add(self._attended(normed, turn, segments), residual)
        return self.mlp(normed), residual

    def checkpoint_tensors(self, prefix: str) -> Iterator[tuple[str, Tensor]]:
        yield from self.norm1.checkpoint_tensors(f"{prefix}.norm1")
        yield from self.norm2.checkpoint_tensors(f"{prefix}.norm2")
        yield from self.qkv.checkpoint_tensors(f"{prefix}.attn")
        yield from self.proj.checkpoint_tensors(f"{prefix}.attn")
        yield from self.mlp.checkpoint_tensors(f"{prefix}.mlp")

    def _attended(self, x: Tensor, turn: tuple[Tensor, Tensor], segments: Segments) -> Tensor:
        """[N, C]. Query, key and value are let go of before the next layer needs as much again."""
        qkv = F.linear(x, self.qkv.weight, self.qkv.bias).view(len(x), 3, self.heads, -1)
        rotary_qk(qkv, *turn)
        query, key, value = qkv.unbind(1)
        attended = attend_within(query, key, value, segments)
        return F.linear(attended.flatten(1), self.proj.weight, self.proj.bias)


class VisionTower(nn.Module):
    """Patches embedded, blocks, and groups of patches merged into rows of the language model."""

    def __init__(
        self,
        width: int,
        inner: int,
        heads: int,
        depth: int,
        patch: tuple[int, ...],
        group: int,
        hidden: int,
        placement: Placement,
    ) -> None:
        """
        Args:
            patch: (channels, frames, rows, columns) of the values of one.
            group: patches that are merged.
            hidden: H, of the language model.
        """
        super().__init__()
        self.patch = patch
        self.group = group
        values = int(torch.Size(patch).numel())
        self.embed = Linear(values, {"proj": width}, False, placement)
        self.blocks = nn.ModuleList(VisionBlock(width, inner, heads, placement) for _ in range(depth))
        self.norm = RmsNorm(width, EPS, placement)
        self.merge = Linear(group * width, {"0": group * width}, True, placement)
        self.project = Linear(group * width, {"2": hidden}, True, placement)

    def embedded(self, patches: Tensor) -> Tensor:
        """[N, values] -> [N, C]. A convolution over whole patches is a product, which cuDNN does not know it is."""
        return F.linear(patches, self.embed.weight)

    def merged(self, x: Tensor, residual: Tensor) -> Tensor:
        """[N, C] twice -> [N / group, H]."""
        normed, _ = self.norm.add(x, residual)
        grouped = normed.view(-1, self.group * x.shape[1])
        inner = F.gelu(F.linear(grouped, self.merge.weight, self.merge.bias))
        return F.linear(inner, self.project.weight, self.project.bias)

    def checkpoint_tensors(self, prefix: str) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self.embed.checkpoint_tensors(f"{prefix}patch_embed"):
            yield name, tensor.view(-1, *self.patch)
        for index, block in enumerate(self.blocks):
            assert isinstance(block, VisionBlock)
            yield from block.checkpoint_tensors(f"{prefix}blocks.{index}")
        yield from self.norm.checkpoint_tensors(f"{prefix}merger.ln_q")
        yield from self.merge.checkpoint_tensors(f"{prefix}merger.mlp")
        yield from self.project.checkpoint_tensors(f"{prefix}merger.mlp")
