"""Checkpoints in memory, of random values: every rank of a model reads its share of the same one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from common.checkpoint.model_config import ModelConfig
from common.engine.layers.piece import Piece
from common.engine.layers.ranks import ONE_RANK, Ranks
from common.engine.models.causal_lm import CausalLM
from common.engine.models.model_registry import build_model
from common.engine.weights import fill_piece
from tests.fakes.tiny_model import PLACEMENT


class MemoryTensors:
    """A `TensorSource` in memory."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = tensors

    def get_tensor(self, name: str) -> Tensor:
        return self.tensors[name]

    def get_slice(self, name: str) -> Any:
        return self.tensors[name]


def drawn_tensors(pieces: Iterable[Piece], seed: int = 3) -> dict[str, Tensor]:
    """Return random tensors of the shapes that the pieces of one rank have in their checkpoint."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {piece.name: piece.whole for piece in pieces}
    return {
        name: torch.randn(shape, generator=generator) * 0.3 + ("norm" in name)
        for name, shape in shapes.items()
    }


def drawn_checkpoint(config: ModelConfig) -> dict[str, Tensor]:
    """Return random tensors for a model."""
    return drawn_tensors(build_model(config, PLACEMENT).pieces())


def fill(pieces: Iterable[Piece], tensors: Mapping[str, Tensor]) -> None:
    """Fill the pieces from a checkpoint that has a tensor of the right shape for each."""
    for piece in pieces:
        for each in piece.stored_as(tensors):
            assert each.whole == tensors[each.name].shape
            fill_piece(each, MemoryTensors(tensors))


def filled_model(config: ModelConfig, tensors: Mapping[str, Tensor], ranks: Ranks = ONE_RANK) -> CausalLM:
    """Return a rank's share of a model."""
    model = build_model(config, replace(PLACEMENT, ranks=ranks)).eval()
    fill(model.pieces(), tensors)
    return model
