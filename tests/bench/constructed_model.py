"""Fills models with constructed weights, without files."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from common.engine.layers.piece import Piece
from common.engine.weights import fill_piece
from deploy.tiny_models.constructed_tensors import Make, stored_pieces


class _Source:
    """A checkpoint whose tensors are made when they are read; keeps the last one, which several pieces may read."""

    def __init__(self, pieces: Iterable[Piece], make: Make) -> None:
        self._by_name = {piece.name: piece for piece in pieces}
        self._make = make
        self._last: tuple[str, Tensor] | None = None

    def get_tensor(self, name: str) -> Tensor:
        if self._last is None or self._last[0] != name:
            self._last = None
            self._last = name, self._make(self._by_name[name])
        return self._last[1]

    def get_slice(self, name: str) -> Tensor:
        return self.get_tensor(name)


@torch.no_grad()
def fill(pieces: Iterable[Piece], make: Make, stacked: bool) -> None:
    """Fill every piece as the loader does, each tensor made once.

    Args:
        stacked: as in `stored_pieces`.
    """
    found = stored_pieces(pieces, stacked)
    source = _Source(found, make)
    for piece in found:
        fill_piece(piece, source)
