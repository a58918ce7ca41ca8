"""Log-probabilities of prompt tokens, computed from the hidden states of a forward on its device.

Row i of a prompt predicts token i + 1. Logits are computed for a bounded number of rows at a time, and only the values
of the prompt's own tokens, their ranks, the likeliest tokens and those that the request names leave the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from common.engine.host_copies import on_host, send
from common.messages.generation import PromptLogprob
from prefill_node.step_plan import PlannedChunk

LOGITS = 1 << 22  # values of one block of rows: 16 MiB in float32
LOWEST = -9999.0  # replaces what is not a number


@dataclass(frozen=True, slots=True)
class Scores:
    """The scores of R rows, on the host once the forward is complete."""

    logprobs: Tensor  # [R] float32
    ranks: Tensor  # [R] int64: 1 for the likeliest token
    top_ids: Tensor  # [R, k] int64, likeliest first
    top_logprobs: Tensor  # [R, k] float32
    chosen: Tensor  # [R, m] float32, of the tokens that the request names

    def read(self) -> list[PromptLogprob]:
        columns = (self.logprobs, self.ranks, self.top_ids, self.top_logprobs, self.chosen)
        rows = zip(*(column.tolist() for column in columns), strict=True)
        return [
            PromptLogprob(value, rank, tuple(ids), tuple(top), tuple(chosen))
            for value, rank, ids, top, chosen in rows
        ]


class PromptScorer:
    """Scores the prompt tokens that requests ask for."""

    def __init__(self, compute_logits: Callable[[Tensor], Tensor], vocab_size: int) -> None:
        """`compute_logits` maps hidden states [R, H] after the last norm to logits [R, V] float32."""
        self._compute_logits = compute_logits
        self._rows = max(LOGITS // vocab_size, 1)

    @torch.inference_mode()
    def score(self, chunks: Sequence[PlannedChunk], hidden: Tensor) -> list[Scores | None]:
        """Launch the scoring of each chunk that asks for it. `hidden`: [T, H] of all chunks' tokens."""
        found: list[Scores | None] = []
        first = 0
        for chunk in chunks:
            found.append(self._score(chunk, hidden[first : first + chunk.length]))
            first += chunk.length
        return found

    def _score(self, chunk: PlannedChunk, hidden: Tensor) -> Scores | None:
        if chunk.scored is None:
            return None
        tokens = np.frombuffer(chunk.ids, np.int64)[1 : chunk.length + 1]
        named = np.asarray(chunk.logprob_ids, np.int64)
        targets, ids = send((tokens.copy(), named), hidden.device)
        # A prompt of one token has one block without rows.
        blocks = [
            self._block(hidden[at : at + self._rows], targets[at : at + self._rows], chunk.scored, ids)
            for at in range(0, max(len(tokens), 1), self._rows)
        ]
        return Scores(*(on_host(torch.cat(column)) for column in zip(*blocks, strict=True)))

    def _block(self, hidden: Tensor, targets: Tensor, top: int, named: Tensor) -> tuple[Tensor, ...]:
        """Return the columns of Scores. `targets`: [R]; `named`: [m]."""
        logprobs = self._compute_logits(hidden[: len(targets)]).log_softmax(-1).nan_to_num(nan=LOWEST)
        own = logprobs.gather(-1, targets[:, None])
        ranks = (logprobs > own).sum(-1) + 1
        values, ids = logprobs.topk(min(top, logprobs.shape[-1]), dim=-1)
        return own[:, 0], ranks, ids, values, logprobs[:, named]
