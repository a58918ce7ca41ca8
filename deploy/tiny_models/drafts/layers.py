"""The layers of the drafts. Attribute names are the tensor names of published checkpoints."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deploy.tiny_models.drafts.shapes import Dims

KeyValue = tuple[Tensor, Tensor]  # each [batch, heads, tokens, head_dim], repeated to the query heads


class RMSNorm(nn.Module):
    """RMSNorm as in Llama: the mean square is computed in fp32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self._eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        normed: Tensor = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self._eps) * self.weight
        return normed


class Mlp(nn.Module):
    """SiLU-gated MLP without biases."""

    def __init__(self, dims: Dims) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(dims.hidden, dims.intermediate, bias=False)
        self.up_proj = nn.Linear(dims.hidden, dims.intermediate, bias=False)
        self.down_proj = nn.Linear(dims.intermediate, dims.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Attention(nn.Module):
    """Grouped-query attention of one draft step over all positions at once.

    Step 0 is plain causal attention. At step k, row t represents position t + k: it attends to what step 0 wrote for
    positions 0..t, and to what steps 1..k of the same row wrote for t+1..t+k. This equals the cache of a real draft
    loop, in which positions up to t come from true hidden states and later ones from the draft itself.
    """

    def __init__(self, dims: Dims, inputs: int) -> None:
        super().__init__()
        self._dims = dims
        self.q_proj = nn.Linear(inputs, dims.heads * dims.head_dim, bias=False)
        self.k_proj = nn.Linear(inputs, dims.kv_heads * dims.head_dim, bias=False)
        self.v_proj = nn.Linear(inputs, dims.kv_heads * dims.head_dim, bias=False)
        self.o_proj = nn.Linear(dims.heads * dims.head_dim, dims.hidden, bias=False)

    def forward(self, x: Tensor, seen: list[KeyValue]) -> Tensor:
        """`seen` holds the keys and values of earlier steps of this round; those of this step are appended."""
        step, groups = len(seen), self._dims.heads // self._dims.kv_heads
        dims = self._dims
        cos, sin = angles_of(dims.head_dim, dims.rope_theta, x.size(1), step, x.device)
        q = rotate(self._heads(self.q_proj(x)), cos, sin)
        k = rotate(self._heads(self.k_proj(x)), cos, sin).repeat_interleave(groups, dim=1)
        v = self._heads(self.v_proj(x)).repeat_interleave(groups, dim=1)
        seen.append((k, v))
        mixed = attend(q, seen) if step else F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.o_proj(mixed.transpose(1, 2).flatten(2))
        return out

    def _heads(self, x: Tensor) -> Tensor:
        batch, tokens, _ = x.shape
        return x.view(batch, tokens, -1, self._dims.head_dim).transpose(1, 2)


def attend(q: Tensor, seen: list[KeyValue]) -> Tensor:
    """Attend from row t to rows 0..t of the first step and to row t of every later one."""
    (first_k, first_v), *own = seen
    tokens, scale = q.size(2), q.size(3) ** -0.5
    later = torch.ones(tokens, tokens, dtype=torch.bool, device=q.device).triu(1)
    scores = (q @ first_k.mT * scale).masked_fill(later, float("-inf"))
    diagonals = [(q * k).sum(-1, keepdim=True) * scale for k, _ in own]
    weights = torch.cat([scores, *diagonals], dim=-1).softmax(-1).to(q.dtype)
    mixed = weights[..., :tokens] @ first_v
    for index, (_, v) in enumerate(own):
        mixed = mixed + weights[..., tokens + index, None] * v
    return mixed


def angles_of(
    width: int, theta: float, tokens: int, first: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return cos and sin, each `[tokens, width]`, of positions from `first` on for `width` rotated values."""
    half = torch.arange(0, width, 2, device=device).float() / width
    positions = torch.arange(first, first + tokens, device=device).float()
    angles = torch.outer(positions, theta**-half).repeat(1, 2)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs of values: one in the first half of x, one in the second."""
    low, high = x.chunk(2, dim=-1)
    turned: Tensor = x * cos + torch.cat((-high, low), dim=-1) * sin
    return turned.to(x.dtype)


class DecoderLayer(nn.Module):
    """A Llama layer; in EAGLE-1 it has no norm before attention."""

    def __init__(self, dims: Dims, input_norm: bool) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(dims.hidden, dims.eps) if input_norm else None
        self.self_attn = Attention(dims, dims.hidden)
        self.post_attention_layernorm = RMSNorm(dims.hidden, dims.eps)
        self.mlp = Mlp(dims)

    def forward(self, x: Tensor, seen: list[KeyValue]) -> Tensor:
        normed = x if self.input_layernorm is None else self.input_layernorm(x)
        x = x + self.self_attn(normed, seen)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out
