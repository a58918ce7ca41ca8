"""Decoders: Llama, Mistral, Qwen, Gemma and other models that differ from them in options, norms or blocks.

The config names the kinds of mixer and feed-forward of each layer, and the norms around them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from common.checkpoint.model_config import ModelConfig
from common.engine.attention.backend import AttentionBackend
from common.engine.formats.format_registry import weight_format
from common.engine.layers.activations import Activations
from common.engine.layers.blocks import FeedForward, Mixer
from common.engine.layers.linear import WeightFormat
from common.engine.layers.logit_rows import LogitRows
from common.engine.layers.norm import RmsNorm, model_norm
from common.engine.layers.output_norm_layer import OutputNormLayer
from common.engine.layers.piece import Piece
from common.engine.layers.placement import Placement
from common.engine.layers.rotary import Rotary
from common.engine.models.causal_lm import BodyOutput, CausalLM
from common.kv_cache.layer_kinds import FEED_FORWARDS, mixer_record
from common.named import named


class DecoderLayer(nn.Module):
    """Norm, mixer, norm, feed-forward around one residual stream.

    Args:
        name: prefix of its tensors in the checkpoint.
        layer: index of its planes in the KV pool.
    """

    def __init__(self, name: str, config: ModelConfig, layer: int, weights: WeightFormat) -> None:
        super().__init__()
        norm = (config.hidden_size, config, weights.placement)
        mixer, feed_forward = blocks(name, config, layer, weights)
        self.input_layernorm = model_norm(f"{name}.input_layernorm", *norm, mixer.reads)
        self.mixer = mixer
        after = f"{name}.post_attention_layernorm"
        self.post_attention_layernorm = model_norm(after, *norm, feed_forward.reads)
        self.feed_forward = feed_forward

    def forward(
        self,
        x: Activations,
        stream: Tensor,
        angles: tuple[Tensor, Tensor],
        attention: AttentionBackend,
        following: RmsNorm,
    ) -> tuple[Activations, Tensor]:
        """Run the layer.

        Args:
            x: the residual stream normed by `input_layernorm`.
            stream: [T, H].
            following: the norm after this layer.

        Returns:
            The stream after the layer, normed by `following`, and the stream itself: a product, the residual
            addition and the norm of the sum are one operation.
        """
        x, stream = self.mixer.add_norm(x, stream, self.post_attention_layernorm, angles, attention)
        return self.feed_forward.add_norm(x, stream, following, attention.token_slots())

    def pieces(self) -> Iterator[Piece]:
        yield from self.input_layernorm.pieces()
        yield from self.mixer.pieces()
        yield from self.post_attention_layernorm.pieces()
        yield from self.feed_forward.pieces()


def blocks(name: str, config: ModelConfig, layer: int, weights: WeightFormat) -> tuple[Mixer, FeedForward]:
    """Make the blocks of a layer by the kinds that the config names."""
    mixer = named(mixer_record(config, layer).engine)(name, config, layer, weights)
    feed_forward = named(FEED_FORWARDS[config.kind_of(layer).feed_forward])(name, config, weights)
    assert isinstance(mixer, Mixer)
    assert isinstance(feed_forward, FeedForward)
    return mixer, feed_forward


def decoder_layer(
    name: str, config: ModelConfig, layer: int, weights: WeightFormat
) -> DecoderLayer | OutputNormLayer:
    """Make a layer with the norms that the config names."""
    if config.layer_norms.of_outputs:
        return OutputNormLayer(name, config, weights, *blocks(name, config, layer, weights))
    return DecoderLayer(name, config, layer, weights)


class Decoder(CausalLM):
    """Embedding, decoder layers, a final norm and an LM head."""

    def __init__(self, config: ModelConfig, placement: Placement, aux_layers: Sequence[int] = ()) -> None:
        super().__init__()
        if list(aux_layers) != sorted(set(aux_layers)) or not all(
            0 <= i <= config.num_layers for i in aux_layers
        ):
            raise ValueError(
                f"aux layers {tuple(aux_layers)} are not ascending boundaries of {config.num_layers} layers"
            )
        self.config = config
        self.placement = placement
        self.aux_layers = tuple(aux_layers)
        weights, size = weight_format(config, placement), config.hidden_size
        self.embed_tokens = weights.embedding("model.embed_tokens", config.vocab_size, size)
        # The product with the embeddings is exact, then rounded, as that of two values of the dtype.
        self._scale = float(torch.tensor(config.embedding_scale).to(placement.dtype))
        self.rotary = Rotary(config.rope, config.head_dim, placement)
        self.window_rotary = (
            None if config.window_rope is None else Rotary(config.window_rope, config.head_dim, placement)
        )
        self.layers = nn.ModuleList(
            decoder_layer(f"model.layers.{i}", config, i, weights) for i in range(config.num_layers)
        )
        self.norm = model_norm("model.norm", size, config, placement)
        if config.tie_word_embeddings:
            self.lm_head = weights.tied_head(self.embed_tokens)
        else:
            self.lm_head = weights.head("lm_head", size, config.vocab_size)

    def embed(self, ids: Tensor) -> Tensor:
        embeds = super().embed(ids)
        return embeds if self._scale == 1.0 else embeds * self._scale

    def forward(self, embeds: Tensor, positions: Tensor, attention: AttentionBackend) -> BodyOutput:
        angles = window_angles = self.rotary(positions)
        if self.window_rotary is not None:
            window_angles = self.window_rotary(positions)
        windows = self.config.sliding_windows
        norms = [*(_layer(each).input_layernorm for each in self.layers), self.norm]
        stream, x = embeds, Activations(norms[0](embeds))
        aux: list[Tensor] = []
        for index, layer in enumerate(self.layers):
            if index in self.aux_layers:
                aux.append(stream)
            turn = angles if windows[index] is None else window_angles
            x, stream = layer(x, stream, turn, attention, norms[index + 1])
        if self.config.num_layers in self.aux_layers:
            aux.append(stream)
        return BodyOutput(x.tensor(), torch.cat(aux, dim=-1) if aux else None)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        return self.logit_rows(hidden).whole()

    def logit_rows(self, hidden: Tensor) -> LogitRows:
        return self.lm_head.logit_rows(Activations(hidden))

    def pieces(self) -> Iterator[Piece]:
        """Yield the checkpoint pieces that it reads: each value of the model exactly once."""
        yield from self.embed_tokens.pieces()
        for layer in self.layers:
            yield from _layer(layer).pieces()
        yield from self.norm.pieces()
        yield from self.lm_head.pieces()


def _layer(module: nn.Module) -> DecoderLayer | OutputNormLayer:
    assert isinstance(module, DecoderLayer | OutputNormLayer)
    return module
