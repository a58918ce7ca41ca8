"""The acceptance oracle: computes what a greedy draft-and-verify loop accepts without running one.

A draft is run once over prompt and answer, reading the answer's tokens (`heads`, or anything else that yields
proposals). The prefix that a verify step accepts equals the answer by definition. So up to the first rejected token the
true input is also the loop's input, and walking the comparison gives exactly the loop's result. Chains only (topk 1).

Indices: x is prompt + answer. In a round at t, x[t+1] is the newest known token (the bonus token of the previous round,
or the first token from the prefill) and the target's hidden states are known up to x[t]. Step k of the round proposes
x[t+2+k].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Round:
    """One verify step."""

    at: int  # t
    accepted: int  # drafts that the target agreed with, 0..steps
    emitted: int  # tokens, bonus included; less than accepted + 1 only where the answer ends


def ok_matrix(proposals: Tensor, ids: Tensor) -> Tensor:
    """`ok[k, t]`: whether step k at t proposes the correct token. Both `[steps, tokens]`; False past the end.

    `proposals[k, t]` is the token id that step k of a round at t proposes, given the true tokens before it.
    """
    steps, tokens = proposals.shape
    if ids.shape != (tokens,):
        raise ValueError(f"the proposals have {tokens} positions, but ids has shape {tuple(ids.shape)}")
    ok = torch.zeros(steps, tokens, dtype=torch.bool)
    for step in range(steps):
        known = max(0, tokens - 2 - step)
        ok[step, :known] = (proposals[step, :known] == ids[2 + step :]).cpu()
    return ok


def perfect(steps: int, tokens: int) -> Tensor:
    """Return the `ok` matrix of a draft that is always right. Its accept length is below steps + 1: answers end."""
    ids = torch.arange(tokens)
    return ok_matrix(torch.stack([ids + 2 + step for step in range(steps)]), ids)


def walk(ok: Tensor, prompt_tokens: int) -> list[Round]:
    """Return the rounds of a greedy loop over one answer, whose first token comes from the prefill."""
    steps, tokens = ok.shape
    table = ok.tolist()
    rounds = []
    at = prompt_tokens - 1
    while (left := tokens - (at + 2)) > 0:
        accepted = 0
        while accepted < steps and table[accepted][at]:
            accepted += 1
        rounds.append(Round(at, accepted, emitted=min(accepted + 1, left)))
        at += accepted + 1
    return rounds


def accept_length(rounds: Sequence[Round]) -> float:
    """Return the tokens emitted per verify step, bonus included, as `avg_spec_accept_length` reports."""
    return sum(one.emitted for one in rounds) / max(1, len(rounds))


def accepted_at(rounds: Sequence[Round], steps: int) -> list[float]:
    """Return for each step the share of rounds in which its draft was accepted."""
    return [sum(one.accepted > step for one in rounds) / max(1, len(rounds)) for step in range(steps)]
