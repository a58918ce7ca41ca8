"""The prompt form of a gated delta layer: chunks of 64 tokens, one after another (arXiv 2412.06464, section 3.3).

Inside a chunk all tokens are computed at once, with a triangular system in place of their updates of the state. It
equals token-by-token updates up to rounding, so prompts are cut only where chunks end: the grid begins at position 0.

The chunks of a batch are numbered without reading lengths on the host: those of request i begin at
starts[i] // 64 + i, so T // 64 + B numbers are enough, of which some have no tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from common.engine.ops.delta_chunks import delta_extend_triton
from common.engine.ops.delta_heads import DeltaHeads, convolve, delta_heads, gated_norm
from common.engine.ops.delta_tiles import CHUNK
from common.engine.ops.registration import register_op


def delta_extend_reference(
    projected: Tensor,
    taps: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    norm: Tensor,
    eps: float,
    conv: Tensor,
    recurrent: Tensor,
    slots: Tensor,
    starts: Tensor,
    lengths: Tensor,
    saves: Tensor | None = None,
) -> Tensor:
    """Return [T, Hv * dv], the gated outputs of the new tokens of B requests; zero past the last of them.

    Args:
        projected: [T, C + 2 * Hv + Hv * dv] = [queries | keys | values | b | a | gates].
        taps: [C, 4] of the convolution.
        a_log: [Hv] float32; so is dt_bias.
        norm: [dv] float32, weight of the output norm, which adds `eps` to the mean square.
        conv: [slots, C, 3], the inputs before the new tokens; mutated.
        recurrent: [slots, Hv, dk, dv] float32, the state before the new tokens; mutated.
        slots: [B] int64 of both; 0: padding, which stays as it is.
        starts: [B + 1] int32, prefix sums of new tokens; rows from starts[B] on are padding.
        lengths: [B] int32, tokens of each request including the new ones. A slot whose request has only new tokens
            may hold anything.
        saves: [B, n, 2] int64: (slot, count) pairs. The state after `count` of the new tokens, a multiple of CHUNK,
            is also stored in that slot; slot 0: nothing is stored.
    """
    heads, channels, starts = recurrent.shape[1], conv.shape[1], starts.to(torch.int64)
    shape = (heads, recurrent.shape[2], recurrent.shape[3])
    counts = starts[1:] - starts[:-1]
    begun = lengths > counts
    index = torch.arange(len(projected), device=projected.device)
    live = index < starts[-1]
    owner = torch.bucketize(index, starts[1:-1], right=True)
    tidy = torch.where(live[:, None], projected, 0)
    inputs, gate = torch.split(tidy, [channels + 2 * heads, heads * shape[2]], dim=-1)
    columns = torch.where(begun[:, None, None], conv.index_select(0, slots).transpose(1, 2), 0)  # [B, 3, C]
    place = index - starts.index_select(0, owner)  # a token's index among the new ones of its request
    x = inputs[:, :channels]
    seen = torch.stack([_before(x, columns, index, owner, place, back) for back in (3, 2, 1, 0)], 1)
    b, a = inputs[:, channels:].chunk(2, dim=-1)
    tokens = delta_heads(convolve(seen, taps)[:, 0], b, a, a_log, dt_bias, shape)
    ends = torch.stack([_ending(x, columns, starts[1:], counts, back) for back in (3, 2, 1)], 2)  # [B, C, 3]
    conv.index_copy_(0, slots, torch.where((slots > 0)[:, None, None], ends, 0))

    grid = _Grid.of(starts, index.shape[0])
    state = torch.where(begun[:, None, None, None], recurrent.index_select(0, slots), 0)
    if saves is not None:
        _save_columns(x, conv, starts, saves)
    out, state = _scan(grid, grid.cut(tokens), state, recurrent, saves)
    recurrent.index_copy_(0, slots, torch.where((slots > 0)[:, None, None, None], state, 0))
    chunk = grid.first.index_select(0, owner) + place // CHUNK
    rows = out.transpose(1, 2).flatten(0, 1)  # [chunks * CHUNK, Hv, dv]
    mine = rows.index_select(0, torch.where(live, chunk * CHUNK + place % CHUNK, 0))
    return torch.where(live[:, None], gated_norm(mine, gate, norm, eps), 0)


def _before(x: Tensor, columns: Tensor, index: Tensor, owner: Tensor, place: Tensor, back: int) -> Tensor:
    """Return [T, C], the input `back` tokens before each: of this forward, or from the columns before it."""
    if back == 0:
        return x
    new = x.index_select(0, (index - back).clamp(min=0))
    old = columns[owner, (place - back + columns.shape[1]).clamp(max=columns.shape[1] - 1)]
    return torch.where((place >= back)[:, None], new, old)


def _ending(x: Tensor, columns: Tensor, ends: Tensor, counts: Tensor, back: int) -> Tensor:
    """Return [B, C], the input `back` tokens before the end of each request."""
    new = x.index_select(0, (ends - back).clamp(min=0))
    rows = torch.arange(len(ends), device=ends.device)
    old = columns[rows, (counts - back + columns.shape[1]).clamp(max=columns.shape[1] - 1)]
    return torch.where((counts >= back)[:, None], new, old)


def _save_columns(x: Tensor, conv: Tensor, starts: Tensor, saves: Tensor) -> None:
    """Store the last three inputs before each place that `saves` names."""
    slots, tokens = saves.unbind(-1)  # [B, n] each
    ends = starts[:-1, None] + tokens
    rows = ends[..., None] + torch.arange(-3, 0, device=x.device)  # [B, n, 3]
    columns = x.index_select(0, rows.clamp(min=0).flatten()).view(*rows.shape, -1).transpose(-1, -2)
    columns = torch.where((slots > 0)[..., None, None], columns, 0)
    conv.index_copy_(0, slots.flatten(), columns.flatten(0, 1))


class _Grid(NamedTuple):
    """The chunks of a batch."""

    first: Tensor  # [B] number of each request's first chunk
    owner: Tensor  # [chunks] request
    within: Tensor  # [chunks] index of a chunk among those of its request
    token: Tensor  # [chunks, CHUNK] row of each token
    held: Tensor  # [chunks, CHUNK] bool: there is such a token

    @classmethod
    def of(cls, starts: Tensor, tokens: int) -> _Grid:
        requests = len(starts) - 1
        numbers = torch.arange(requests, device=starts.device)
        first = starts[:-1] // CHUNK + numbers
        chunk = torch.arange(tokens // CHUNK + requests, device=starts.device)
        owner = torch.bucketize(chunk, first[1:], right=True)
        within = chunk - first.index_select(0, owner)
        begin = starts.index_select(0, owner) + within * CHUNK
        token = begin[:, None] + torch.arange(CHUNK, device=starts.device)
        held = token < starts.index_select(0, owner + 1)[:, None]
        return cls(first, owner, within, token.clamp(max=tokens - 1), held)

    def cut(self, tokens: DeltaHeads) -> DeltaHeads:
        """Return the tokens by chunks, [chunks, Hv, CHUNK, ...]; zero where there is none, which changes no state."""
        return DeltaHeads(*(self._cut(values) for values in tokens))

    def _cut(self, values: Tensor) -> Tensor:
        held = self.held.view(*self.held.shape, *(1 for _ in values.shape[1:]))
        return torch.where(held, values[self.token], 0).transpose(1, 2)


def _scan(
    grid: _Grid, tokens: DeltaHeads, states: Tensor, recurrent: Tensor, saves: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the outputs [chunks, Hv, CHUNK, dv], and the states [B, Hv, dk, dv] after each request.

    Stores the states that `saves` names in `recurrent`.
    """
    query, key, value, beta, decay = tokens
    since = decay.cumsum(-1)  # [chunks, Hv, CHUNK] from the start of the chunk
    later = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=key.device).triu(1)
    between = (since[..., :, None] - since[..., None, :]).masked_fill(later, -torch.inf).exp()
    weighted = key * beta[..., None]
    system = (weighted @ key.mT) * between
    fresh = _solved(system, value * beta[..., None])  # what the tokens add, were the state zero
    through = _solved(system, weighted * since.exp()[..., None])  # how they see the state before the chunk
    inside = (query @ key.mT) * between
    query = query * since.exp()[..., None]
    key = key * (since[..., -1:] - since).exp()[..., None]
    left = since[..., -1].exp()[..., None, None]

    done, state, outputs = states.clone(), states[:1], []
    for chunk in range(len(key)):
        at = grid.owner[chunk : chunk + 1]
        state = torch.where(grid.within[chunk] == 0, states.index_select(0, at), state)
        added = fresh[chunk] - through[chunk] @ state
        outputs.append(query[chunk] @ state + inside[chunk] @ added)
        state = left[chunk] * state + key[chunk].mT @ added
        done.index_copy_(0, at, state)
        if saves is not None:
            slots, counts = saves.index_select(0, at)[0].unbind(-1)  # [n] each
            into = torch.where(counts == (grid.within[chunk] + 1) * CHUNK, slots, 0)
            kept = torch.where((into > 0)[:, None, None, None], state, 0)
            recurrent.index_copy_(0, into, kept)
    return torch.cat(outputs), done


def _solved(system: Tensor, right: Tensor) -> Tensor:
    """Solve the lower triangular system, whose diagonal counts as ones."""
    solved: Tensor = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    return solved


def _fake(
    projected: Tensor,
    taps: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    norm: Tensor,
    eps: float,
    conv: Tensor,
    recurrent: Tensor,
    slots: Tensor,
    starts: Tensor,
    lengths: Tensor,
    saves: Tensor | None = None,
) -> Tensor:
    return projected.new_empty((projected.shape[0], recurrent.shape[1] * recurrent.shape[3]))


delta_extend = register_op(
    "delta_extend",
    delta_extend_reference,
    mutates=("conv", "recurrent"),
    fake=_fake,
    cuda=delta_extend_triton,
)
