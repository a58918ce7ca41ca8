"""The attention block of a decoder layer; the backend does rotation, cache and attention."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from common.checkpoint.model_config import ModelConfig
from common.engine.attention.backend import AttentionBackend
from common.engine.layers.activations import Activations
from common.engine.layers.blocks import Mixer
from common.engine.layers.linear import Parts, RowBlock, WeightFormat, row_blocks
from common.engine.layers.norm import RmsNorm, model_norm
from common.engine.layers.piece import Piece
from common.engine.ops.sigmoid_gate import sigmoid_gate
from common.engine.ops.token_norm import token_norm


class Attention(Mixer):
    """Multi-head attention between its two projections.

    With `config.output_gate` the checkpoint's q_proj has a query and a gate for each head, and the output of a head is
    multiplied by sigmoid(gate). The merged weight has the rows of all gates last.

    Args:
        in_features: width of its input; None: the model's width.
    """

    def __init__(
        self,
        name: str,
        config: ModelConfig,
        layer: int,
        weights: WeightFormat,
        in_features: int | None = None,
    ) -> None:
        super().__init__()
        name, self.layer = f"{name}.self_attn", layer
        self.heads, self.kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        query, new = f"{name}.q_proj", {f"{name}.k_proj": kv_size, f"{name}.v_proj": kv_size}
        parts: Parts = {query: q_size, **new}
        self.gated = config.output_gate
        if config.fused:
            parts = {f"{name}.qkv_proj": q_size + 2 * kv_size}
        if self.gated:
            heads = [_rows_of_head(query, config, head) for head in range(config.num_heads)]
            parts = [*(rows[0] for rows in heads), *row_blocks(new), *(rows[1] for rows in heads)]
        self.qkv_proj = weights.linear(in_features or config.hidden_size, parts, config.qkv_bias)
        self.o_proj = weights.linear(q_size, {f"{name}.o_proj": config.hidden_size}, config.output_bias)
        self.norms_tokens = config.qk_norm_whole
        widths = (q_size, kv_size) if self.norms_tokens else (config.head_dim, config.head_dim)
        made = (config, weights.placement)
        self.q_norm = model_norm(f"{name}.q_norm", widths[0], *made) if config.qk_norm else None
        self.k_norm = model_norm(f"{name}.k_norm", widths[1], *made) if config.qk_norm else None
        self.reads = self.qkv_proj.reads

    def add_norm(
        self,
        x: Activations,
        stream: Tensor,
        norm: RmsNorm,
        angles: tuple[Tensor, Tensor],
        attention: AttentionBackend,
    ) -> tuple[Activations, Tensor]:
        return self.o_proj.add_norm(Activations(self._attend(x, angles, attention)), stream, norm)

    def forward(self, x: Activations, angles: tuple[Tensor, Tensor], attention: AttentionBackend) -> Tensor:
        return self.o_proj.product(Activations(self._attend(x, angles, attention)))

    def _attend(self, x: Activations, angles: tuple[Tensor, Tensor], attention: AttentionBackend) -> Tensor:
        """Return what `o_proj` reads: [T, heads * D].

        A method of its own, so that queries, keys and values are freed before `o_proj` allocates: they would add 64 MiB
        to the graphs of 8,192 tokens.
        """
        projected = self.qkv_proj.product(x)
        if not self.gated:
            return self._mix(projected, angles, attention)
        gate = projected[:, -self.heads * self.head_dim :]
        mixed = self._mix(projected[:, : -gate.shape[1]], angles, attention)
        return sigmoid_gate(mixed, gate)

    def _mix(self, projected: Tensor, angles: tuple[Tensor, Tensor], attention: AttentionBackend) -> Tensor:
        """Return the attention's output [T, heads * D] for the merged queries, keys and values."""
        qkv = projected.view(-1, self.heads + 2 * self.kv_heads, self.head_dim)
        norms = self._norm_weights()
        if self.norms_tokens and norms[0] is not None and norms[1] is not None:
            token_norm(projected, norms[0], norms[1], norms[2])
            norms = None, None, 0.0
        attention.store(self.layer, qkv, angles, *norms)
        query, new = qkv[:, : self.heads], qkv[:, self.heads :]
        key, value = new.chunk(2, dim=1)
        return attention.forward(self.layer, query, key, value).flatten(-2)

    def _norm_weights(self) -> tuple[Tensor | None, Tensor | None, float]:
        if self.q_norm is None or self.k_norm is None:
            return None, None, 0.0
        return self.q_norm.weight, self.k_norm.weight, self.q_norm.eps

    def pieces(self) -> Iterator[Piece]:
        yield from self.qkv_proj.pieces()
        yield from self.o_proj.pieces()
        if self.q_norm is not None and self.k_norm is not None:
            yield from self.q_norm.pieces()
            yield from self.k_norm.pieces()


def _rows_of_head(name: str, config: ModelConfig, head: int) -> tuple[RowBlock, RowBlock]:
    """Return the rows of a head's query and of its gate in a q_proj that has both."""
    size = config.head_dim
    query = RowBlock(name, size, 2 * head * size, 2 * config.num_heads * size)
    return query, query._replace(begin=query.begin + size)
