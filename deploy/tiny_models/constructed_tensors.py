"""Makes the weights of a model of any family on a device.

The loader's pieces say which tensors a checkpoint of the family has. Each tensor is made when it is read, from the seed
and its name, by the counter-based generator of the device: 70 GB take seconds, and the order of the reads does not
matter. Embeddings are random with rms 1. The last product of every block is scaled by a small eps, so the residual
stream stays close to the embedding while all matrix products keep their full size. The LM head row of succ(t) is
E[t] * gap / hidden. So the greedy text is succ, one cycle over `draft_vocab` ids, whatever mixers and feed-forwards the
layers have. Routers see the embedding of the current token, so different tokens use different experts.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Container, Iterable

import torch
from torch import Tensor

from common.checkpoint.model_config import ModelConfig
from common.engine.layers.piece import Piece
from deploy.tiny_models.constructed_head import Drafting, wrong_tokens
from deploy.tiny_models.constructed_shape import EPS, GAP, Shape, draft_ids, embedding, successor

# The last parts of names of the products that end a block.
OUTPUTS = ("o_proj", "down_proj", "out_proj", "w2")
STACKS = (".experts.gate_up_proj", ".experts.down_proj")
# Columns of the hidden state that carry marks instead of text: that of the token, and that of the token before it.
MARK, PREVIOUS_MARK = 0, 1

# Returns the values of the tensor of that name and shape for a piece.
Make = Callable[[Piece], Tensor]


def shape_of(config: ModelConfig, draft_vocab: int) -> Shape:
    """Return the dimensions that a Llama-like head for this target has."""
    return Shape(
        vocab=config.vocab_size,
        hidden=config.hidden_size,
        layers=config.num_layers,
        heads=config.num_heads,
        kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        inter=config.intermediate_size,
        max_positions=config.max_position_embeddings,
        draft_vocab=draft_vocab,
    )


def mark(shape: Shape) -> float:
    """Return the size of a mark: a 64th of the energy of an embedding."""
    return math.sqrt(shape.hidden) / 8


class TargetTensors:
    """Makes the tensors of a target.

    Args:
        marks: embeddings have a mark, which is negative for the tokens after which a module drafts wrongly (see
            constructed_module.py), and which the LM head ignores. None: there are no marks.

    Raises:
        ValueError: the LM head is the embedding, so the text cannot be chosen.
    """

    def __init__(
        self,
        config: ModelConfig,
        shape: Shape,
        seed: int,
        device: torch.device,
        marks: Drafting | None,
    ) -> None:
        if config.tie_word_embeddings:
            raise ValueError("a target whose LM head is its embedding cannot be constructed")
        self.shape, self.device = shape, device
        self._seed = seed
        self._generator = torch.Generator(device)
        self.embeds = embedding(shape, seed, device)
        self._marked = marks is not None
        if marks is not None:
            ids = draft_ids(shape, seed)[wrong_tokens(shape, marks, seed)].to(device)
            self.embeds[:, MARK] = mark(shape)
            self.embeds[ids, MARK] = -mark(shape)

    def __call__(self, piece: Piece) -> Tensor:
        stem = piece.name.removesuffix(".weight")
        if stem == "model.embed_tokens":
            return self.embeds
        if stem == "lm_head":
            return self._head()
        if len(piece.whole) == 1:
            return self._vector(piece)
        scale = 1 / math.sqrt(piece.whole[-1])
        return self.random(piece, EPS * scale if stem.rpartition(".")[2] in OUTPUTS else scale)

    def random(self, piece: Piece, scale: float) -> Tensor:
        """Return normal values in bf16."""
        self._generator.manual_seed(zlib.crc32(f"{self._seed} {piece.name}".encode()))
        values = torch.empty(piece.whole, dtype=torch.bfloat16, device=self.device)
        return values.normal_(0, scale, generator=self._generator)

    def _vector(self, piece: Piece) -> Tensor:
        kind = piece.name.rpartition(".")[2]
        if kind == "A_log":
            # Decay rates from 1 to 16, as in a new model.
            heads = torch.linspace(1, 16, piece.whole[0], device=self.device)
            return heads.log()
        if kind == "dt_bias":
            return torch.zeros(piece.whole, device=self.device)
        if kind == "weight" and "norm" in piece.name:
            return torch.full(piece.whole, 1 - piece.plus, device=self.device)
        if "bias" in kind:
            return torch.zeros(piece.whole, device=self.device)
        raise ValueError(f"{piece.name}: no rule says how to construct this tensor")

    def _head(self) -> Tensor:
        shape = self.shape
        rows = torch.zeros(shape.vocab, shape.hidden, dtype=torch.bfloat16, device=self.device)
        # Several ids may have the same successor.
        following = successor(shape, self._seed).to(self.device)
        rows.index_add_(0, following, self.embeds * (GAP / shape.hidden))
        if self._marked:
            rows[:, [MARK, PREVIOUS_MARK]] = 0
        return rows


class _Names(Container[str]):
    """The names of a checkpoint, as far as models ask for them: whether experts are stacked."""

    def __init__(self, stacked: bool) -> None:
        self._stacked = stacked

    def __contains__(self, name: object) -> bool:
        return self._stacked and isinstance(name, str) and name.endswith(STACKS)


def stacks_experts(config: ModelConfig) -> bool:
    """Return whether the published checkpoints of this family have the experts of a layer in two tensors."""
    return config.gated_delta is not None and not config.gated_delta.grouped_rows


def stored_pieces(pieces: Iterable[Piece], stacked: bool) -> list[Piece]:
    """Return the pieces as a checkpoint stores their tensors, by name.

    Args:
        stacked: the checkpoint has the experts of a layer in two tensors; false: a matrix for each expert.
    """
    names = _Names(stacked)
    return sorted((each for piece in pieces for each in piece.stored_as(names)), key=lambda each: each.name)
