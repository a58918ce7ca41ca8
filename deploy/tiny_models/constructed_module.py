"""Constructs a module of multi-token prediction that drafts correctly after a chosen share of all tokens.

The module shares embedding and LM head with the target, so what it drafts is decided by its residual stream. Its
projection copies the embedding of the next token, E, into the stream: then the LM head drafts the successor, as the
target does. Every embedding has a mark in one column, which the LM head ignores, and which is negative for a share of 1
- acceptance of the tokens. The projection copies the mark of the hidden state, which is that of the token before, into
a second column; one unit of the feed-forward opens where it is negative, and adds the embedding of another token to
the stream, whose successor is then drafted. So a draft depends on the embedding and on the hidden state, and 3 steps
emit 1 + p + p^2 + p^3 tokens per round. The module's output has the mark of its own token for the next step.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from common.checkpoint.draft_config import DraftConfig
from common.engine.layers.piece import Piece
from deploy.tiny_models.constructed_shape import SPECIAL
from deploy.tiny_models.constructed_tensors import MARK, PREVIOUS_MARK, TargetTensors, mark

OPEN = 20.0  # input of the activation where the mark is negative
WRONG = 4.0  # size of the wrong embedding relative to the stream
UNIT = 0  # index of the feed-forward unit that reads the mark


class ModuleTensors:
    """Makes the tensors of the module `draft` for the target of `target`.

    Raises:
        ValueError: there are several modules, or no feed-forward that every token uses.
    """

    def __init__(self, draft: DraftConfig, target: TargetTensors) -> None:
        if draft.mtp is None or not draft.repeats:
            raise ValueError("only a single module, which runs at every step, can be constructed")
        names, layer = draft.mtp, draft.mtp.layer_prefix(0)
        block, experts = f"{layer}.mlp", draft.model.experts
        if experts is not None:
            if not experts.shared:
                raise ValueError("the module has no shared expert, so no feed-forward sees every token")
            block = f"{layer}.{experts.names.block}.{experts.names.shared}"
            gate = f"{layer}.{experts.names.block}.{experts.names.shared_gate}"
        self._target = target
        # The share of a shared expert with a gate of zero is one half.
        self._share = 0.5 if experts is not None and experts.shared_gate else 1.0
        self._embedding_first = names.embedding_first
        self._own: dict[str, Callable[[Piece], Tensor]] = {
            f"{names.prefix(0)}.{names.projection}.weight": self._projection,
            f"{block}.gate_proj.weight": self._gate,
            f"{block}.up_proj.weight": self._up,
            f"{block}.down_proj.weight": self._down,
        }
        if experts is not None and experts.shared_gate:
            self._own[f"{gate}.weight"] = lambda piece: torch.zeros(piece.whole, device=target.device)

    def __call__(self, piece: Piece) -> Tensor:
        return self._own.get(piece.name, self._target)(piece)

    def _projection(self, piece: Piece) -> Tensor:
        size = self._target.shape.hidden
        of_embedding = torch.eye(size, device=self._target.device)
        of_embedding[PREVIOUS_MARK] = 0
        of_hidden = torch.zeros_like(of_embedding)
        of_hidden[PREVIOUS_MARK, MARK] = 1
        halves = of_embedding, of_hidden
        return torch.cat(halves if self._embedding_first else halves[::-1], dim=1)

    def _gate(self, piece: Piece) -> Tensor:
        return self._with_row(piece, -OPEN / mark(self._target.shape))

    def _up(self, piece: Piece) -> Tensor:
        return self._with_row(piece, -1 / mark(self._target.shape))

    def _with_row(self, piece: Piece, value: float) -> Tensor:
        rows = self._target(piece)
        rows[UNIT] = 0
        rows[UNIT, PREVIOUS_MARK] = value
        return rows

    def _down(self, piece: Piece) -> Tensor:
        columns = self._target(piece)
        columns[:, UNIT] = self._target.embeds[SPECIAL] * (WRONG / OPEN / self._share)
        columns[[MARK, PREVIOUS_MARK], UNIT] = 0
        return columns
