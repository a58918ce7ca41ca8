"""The attention block of a decoder layer; the backend does rotation, cache and attention."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from common.checkpoint.model_config import ModelConfig
from common.engine.attention.backend import AttentionBackend
from common.engine.layers.activations import Activations
from common.engine.layers.blocks import Mixer
from common.engine.layers.linear import WeightFormat
from common.engine.layers.norm import RmsNorm, model_norm
from common.engine.layers.parts import Parts, runs_of
from common.engine.layers.piece import Piece
from common.engine.layers.token_norms import TokenNorms
from common.engine.ops.sigmoid_gate import sigmoid_gate
from common.kv_cache.plane import HeadGroup


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
        self.head_dim, self.gated = config.head_dim, config.output_gate
        queries = HeadGroup(config.num_heads, config.head_dim)
        keys = HeadGroup(config.num_kv_heads, config.head_dim)
        shard = weights.placement.shard
        self.heads, self.kv_heads = len(shard.heads(queries, name)), len(shard.heads(keys, name))
        parts = _parts(name, config, queries, keys)
        self.qkv_proj = weights.linear(in_features or config.hidden_size, parts, config.qkv_bias)
        self.o_proj = weights.linear(queries, {f"{name}.o_proj": config.hidden_size}, config.output_bias)
        self._value_scale = config.value_scale
        self.norms_tokens = config.qk_norm_whole
        widths = (config.head_dim, config.head_dim)
        if self.norms_tokens:
            widths = (self.heads * self.head_dim, self.kv_heads * self.head_dim)
        made = (config, weights.placement)
        self.q_norm = model_norm(f"{name}.q_norm", widths[0], *made) if config.qk_norm else None
        self.k_norm = model_norm(f"{name}.k_norm", widths[1], *made) if config.qk_norm else None
        self.token_norms: TokenNorms | None = None
        if self.norms_tokens and self.q_norm is not None and self.k_norm is not None:
            self.token_norms = weights.placement.ranks.summed(TokenNorms(self.q_norm, self.k_norm))
        # (first, number) of the values on all ranks that the norms of this rank's queries and keys belong to
        self._normed = [
            (group.width * shard.heads(group, name).start, group.heads * group.width)
            for group in (queries, keys)
        ]
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
        norms = self._head_norms()
        if self.token_norms is not None:
            self.token_norms.apply_to(projected)
        attention.store(self.layer, qkv, angles, *norms)
        query, new = qkv[:, : self.heads], qkv[:, self.heads :]
        key, value = new.chunk(2, dim=1)
        mixed = attention.forward(self.layer, query, key, value).flatten(-2)
        # The output is linear in the values, which the cache keeps as they are.
        return mixed if self._value_scale == 1.0 else mixed * self._value_scale

    def _head_norms(self) -> tuple[Tensor | None, Tensor | None, float]:
        """Return the scales of the norms of each query and key, and their eps; None without such norms."""
        if self.norms_tokens or self.q_norm is None or self.k_norm is None:
            return None, None, 0.0
        return self.q_norm.scale, self.k_norm.scale, self.q_norm.eps

    def pieces(self) -> Iterator[Piece]:
        yield from self.qkv_proj.pieces()
        yield from self.o_proj.pieces()
        if self.q_norm is not None and self.k_norm is not None:
            for norm, (first, whole) in zip((self.q_norm, self.k_norm), self._normed, strict=True):
                for piece in norm.pieces():
                    yield piece._replace(whole=(whole,), begin=(first,)) if self.norms_tokens else piece


def _parts(name: str, config: ModelConfig, queries: HeadGroup, keys: HeadGroup) -> Parts:
    """Return the rows of the merged projection: queries, keys, values and, if there are any, gates."""
    query, key, value = (f"{name}.{each}_proj" for each in "qkv")
    if config.output_gate:
        # The checkpoint stores the query and the gate of a head together.
        rows, gates = runs_of(query, queries, queries, bundles=queries.heads)
        return [rows, *runs_of(key, keys), *runs_of(value, keys), gates]
    if config.fused:
        return runs_of(f"{name}.qkv_proj", queries, keys, keys)
    return {query: queries, key: keys, value: keys}
