"""A decoder layer that norms what its blocks add to the stream, with or without norms before them (Gemma, OLMo2)."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

from common.checkpoint.model_config import ModelConfig
from common.engine.attention.backend import AttentionBackend
from common.engine.layers.activations import Activations, Reads
from common.engine.layers.blocks import FeedForward, Mixer
from common.engine.layers.linear import WeightFormat
from common.engine.layers.norm import NoNorm, RmsNorm, model_norm
from common.engine.layers.piece import Piece


class OutputNormLayer(nn.Module):
    """stream + norm(mixer(norm(stream))), then the same with the feed-forward.

    Args:
        name: prefix of its tensors in the checkpoint.
    """

    def __init__(
        self, name: str, config: ModelConfig, weights: WeightFormat, mixer: Mixer, feed_forward: FeedForward
    ) -> None:
        super().__init__()
        names, made = config.layer_norms, (config.hidden_size, config, weights.placement)

        def norm_before(norm: str, reads: Reads) -> RmsNorm | NoNorm:
            return model_norm(f"{name}.{norm}", *made, reads) if norm else NoNorm()

        self.input_layernorm = norm_before(names.mixer_input, mixer.reads)
        self.mixer = mixer
        self.mixer_output = model_norm(f"{name}.{names.mixer_output}", *made)
        self.feed_forward_input = norm_before(names.feed_forward_input, feed_forward.reads)
        self.feed_forward = feed_forward
        self.feed_forward_output = model_norm(f"{name}.{names.feed_forward_output}", *made)

    def forward(
        self,
        x: Activations,
        stream: Tensor,
        angles: tuple[Tensor, Tensor],
        attention: AttentionBackend,
        following: RmsNorm | NoNorm,
    ) -> tuple[Activations, Tensor]:
        """Return the stream after the layer, normed by `following`, and the stream itself; see `DecoderLayer`."""
        mixed = self.mixer(x, angles, attention)
        normed, stream = self.feed_forward_input.add_normed(mixed, stream, self.mixer_output)
        fed = self.feed_forward(Activations(normed))
        normed, stream = following.add_normed(fed, stream, self.feed_forward_output)
        return Activations(normed), stream

    def pieces(self) -> Iterator[Piece]:
        yield from self.input_layernorm.pieces()
        yield from self.mixer.pieces()
        yield from self.mixer_output.pieces()
        yield from self.feed_forward_input.pieces()
        yield from self.feed_forward.pieces()
        yield from self.feed_forward_output.pieces()
