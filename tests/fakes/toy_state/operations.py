"""What the mixers do with planes: under graphs too, so in torch operations that read nothing on the host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from common.engine.attention.step_attention import StoredPlanes, attend_pages
from common.engine.forward.batch import BatchState, ForwardBatch, ForwardMode
from tests.fakes.toy_state.record import KEY, LATENT_VALUES, VALUE


def attend_latents(
    batch: ForwardBatch,
    layer: int,
    planes: Mapping[str, Tensor],
    projected: Tensor,
    weights: Sequence[Tensor],
    eps: float,
    /,
) -> Tensor:
    """`projected` [T, (heads + 1) * LATENT_VALUES] holds the queries of all heads and the token's latent."""
    plane = planes["latent"]
    latent = projected[:, -LATENT_VALUES:]
    slots = batch.kv_slots
    kept = torch.where((slots >= plane.shape[1])[:, None], latent, 0)  # page 0 stays zero
    plane.view(-1, LATENT_VALUES).index_copy_(0, slots, kept)
    query = projected[:, :-LATENT_VALUES].unflatten(1, (-1, LATENT_VALUES))
    one_head = plane.unsqueeze(2)
    return attend_pages(batch, query, StoredPlanes(one_head, one_head), None, LATENT_VALUES**-0.5).flatten(1)


def recur(
    batch: ForwardBatch,
    layer: int,
    planes: Mapping[str, Tensor],
    projected: Tensor,
    weights: Sequence[Tensor],
    eps: float,
    /,
) -> Tensor:
    """`projected` [T, heads * (2 * KEY + VALUE + 1)] holds queries, then what each token adds to the state."""
    assert batch.state is not None
    queries = projected.shape[1] // (2 * KEY + VALUE + 1) * KEY
    query, added = projected[:, :queries], projected[:, queries:]
    if batch.mode is ForwardMode.EXTEND:
        return _extend(batch, batch.state, planes["state"], query, added)
    return _step(batch.state, layer, planes["state"], query, added)


def _parts(added: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Split [..., heads * (KEY + VALUE + 1)] into keys [..., heads, KEY], values [..., heads, VALUE] and log decay."""
    heads = added.shape[-1] // (KEY + VALUE + 1)
    key, value, decay = added.split((heads * KEY, heads * VALUE, heads), dim=-1)
    return key.unflatten(-1, (heads, KEY)), value.unflatten(-1, (heads, VALUE)), F.logsigmoid(decay)


def _extend(batch: ForwardBatch, at: BatchState, state: Tensor, query: Tensor, added: Tensor) -> Tensor:
    """Compute any number of tokens per request at once; the state in the slots holds the earlier tokens."""
    slots = at.slots
    starts = batch.query_start.to(torch.int64)
    index = torch.arange(len(query), device=query.device)
    live = index < starts[-1]
    # Padding rows get an arbitrary owner.
    owner = torch.bucketize(index, starts[1:-1], right=True)
    query = torch.where(live[:, None], query, 0)
    key, value, log_decay = _parts(torch.where(live[:, None], added, 0))
    query = query.unflatten(1, (-1, KEY))
    # [T, heads]: only differences of these sums are used.
    until = log_decay.double().cumsum(0)
    # [B + 1, heads]: the sum up to each request's first token.
    before = F.pad(until, (0, 0, 1, 0)).index_select(0, starts)
    begun = batch.seq_lens > starts[1:] - starts[:-1]
    old = torch.where(begun[:, None, None, None], state.index_select(0, slots), 0)

    seen = (owner[:, None] == owner) & (index[:, None] >= index) & live & live[:, None]
    since = torch.where(seen[..., None], until[:, None] - until, -torch.inf).exp().float()  # [T, T, heads]
    mixed = torch.einsum("tuh,thk,uhk,uhv->thv", since, query, key, value)
    reach = (until - before[:-1].index_select(0, owner)).exp().float()
    mixed = mixed + reach[..., None] * torch.einsum("thk,thkv->thv", query, old.index_select(0, owner))

    ours = (torch.arange(len(slots), device=query.device)[:, None] == owner) & live

    def keep(slots: Tensor, ends: Tensor) -> None:
        """Store the states after the tokens before `ends` [B]."""
        end = F.pad(until, (0, 0, 1, 0)).index_select(0, ends)  # [B, heads]
        counted = (ours & (index < ends[:, None]))[..., None]
        left = torch.where(counted, end[:, None] - until, -torch.inf).exp().float()  # [B, T, heads]
        new = torch.einsum("buh,uhk,uhv->bhkv", left, key, value)
        new = new + (end - before[:-1]).exp().float()[..., None, None] * old
        state.index_copy_(0, slots, torch.where((slots > 0)[:, None, None, None], new, 0))

    keep(slots, starts[1:])
    if at.saves is not None:
        for save in at.saves.unbind(1):
            into, count = save.unbind(1)
            keep(into, starts[:-1] + count)
    return mixed.flatten(1)


def _step(at: BatchState, layer: int, state: Tensor, query: Tensor, added: Tensor) -> Tensor:
    """Add the accepted tokens of the window to the state, then compute the new ones (equally many per request).

    The new tokens' values replace those in the window.
    """
    assert at.rows is not None
    assert at.pending is not None
    window, live = at.windows[layer], at.rows > 0
    count = len(at.rows)
    new = added.unflatten(0, (count, -1))  # [B, N, width]
    held = state.index_select(0, at.slots)
    kept = window.index_select(0, at.rows)
    for place in range(kept.shape[1]):
        held = torch.where((at.pending > place)[:, None, None, None], _added(held, kept[:, place]), held)
    state.index_copy_(0, at.slots, torch.where(live[:, None, None, None], held, 0))
    window[:, : new.shape[1]].index_copy_(0, at.rows, torch.where(live[:, None, None], new, 0))
    queries = query.unflatten(0, (count, -1)).unflatten(2, (-1, KEY))
    mixed = []
    for place in range(new.shape[1]):
        held = _added(held, new[:, place])
        mixed.append(torch.einsum("bhk,bhkv->bhv", queries[:, place], held))
    return torch.stack(mixed, 1).flatten(0, 1).flatten(1)


def _added(state: Tensor, added: Tensor) -> Tensor:
    """Return the state [B, heads, KEY, VALUE] after one more token."""
    key, value, log_decay = _parts(added)
    return log_decay.exp()[..., None, None] * state + key[..., None] * value[..., None, :]
