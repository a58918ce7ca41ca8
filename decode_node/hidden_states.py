"""Copies the hidden states of a step that are sent to the router, and attaches them to the tokens drawn from them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from common.engine.host_copies import on_device, on_host
from decode_node.step_result import RowTokens


class StepStates(NamedTuple):
    """The hidden states of some rows of a step, on the host once the step is complete."""

    rows: Sequence[int]  # indices of the plan's rows
    values: Tensor  # [len(rows), D, H] float32; D: the most tokens that the step draws per row

    def attach(self, results: list[RowTokens]) -> None:
        """Give the results of the plan's rows their states, one per token."""
        values = self.values.numpy()
        for index, states in zip(self.rows, values, strict=True):
            result = results[index]
            results[index] = result._replace(states=states[: len(result.tokens)])


def step_states(hidden: Tensor | None, rows: Sequence[int]) -> StepStates | None:
    """Start the copy of the states of `rows`; None without any.

    `hidden`: [R, D, H] or, of steps with one token per row, [R, H]. The next step overwrites it.
    """
    if not rows:
        return None
    assert hidden is not None, "the steps of this node return no hidden states"
    index = on_device(list(rows), hidden.device)
    chosen = hidden.index_select(0, index).to(torch.float32)
    return StepStates(rows, on_host(chosen.unsqueeze(1) if chosen.dim() == 2 else chosen))
