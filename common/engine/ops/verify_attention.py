"""Verify attention: N new tokens per request that form a tree (or a chain) behind a cached prefix of any length.

Node n of a request lies in the slot of position prefix + n, but stands at prefix + its depth. It sees the whole prefix,
itself and its ancestors. Only slots below a request's length are read.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from common.engine.ops.paged_gather import gather
from common.engine.ops.registration import register_op


def verify_reference(
    query: Tensor,
    key_plane: Tensor,
    value_plane: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    tree_mask: Tensor,
    max_seq_len: int,
    window: int | None,
    scale: float,
) -> Tensor:
    """Vectorised over the batch, free of host synchronisation. A padding row (length 0) gives some finite or NaN row.

    Args:
        query: [B * N, heads, D], the nodes of a request one after another, the root first.
        key_plane, value_plane: [num_pages, page_size, kv_heads, D], already holding the new tokens.
        page_table: [B, max_pages] int32.
        seq_lens: [B] int32, the N new tokens included.
        tree_mask: [B, N, N] bool, row n true for node n and its ancestors.
        max_seq_len: host upper bound of seq_lens.
        window: positions that a query sees, its own included; None: all before it.

    Returns [B * N, heads, D].
    """
    batch, nodes, _ = tree_mask.shape
    page_size, kv_heads, head_dim = key_plane.shape[1:]
    position = torch.arange(max_seq_len, device=query.device)  # slot order
    entry = (position // page_size).clamp(max=page_table.shape[1] - 1)
    slot = page_table.long()[:, entry] * page_size + position % page_size  # [B, L]
    length = seq_lens.long().clamp(nodes, max_seq_len)[:, None]
    prefix = length - nodes  # [B, 1]
    # what lies behind a request's length must not be read, not even as 0 * NaN
    slot = torch.where(position < length, slot, slot.gather(1, length - 1))
    visible = _visible(position, prefix, tree_mask, window)  # [B, N, L]
    key = key_plane.view(-1, kv_heads, head_dim)[slot].transpose(1, 2)  # [B, kv_heads, L, D]
    value = value_plane.view(-1, kv_heads, head_dim)[slot].transpose(1, 2)
    queries = query.view(batch, nodes, -1, head_dim).transpose(1, 2)
    out = F.scaled_dot_product_attention(
        queries,
        key,
        value,
        attn_mask=visible[:, None],
        scale=scale,
        enable_gqa=queries.shape[1] != kv_heads,
    )
    return out.transpose(1, 2).reshape(query.shape).contiguous()


def _visible(position: Tensor, prefix: Tensor, tree_mask: Tensor, window: int | None) -> Tensor:
    """[B, N, L] bool: which slots, in position order, a node sees."""
    batch, nodes, _ = tree_mask.shape
    node = (position - prefix).clamp(0, nodes - 1)  # [B, L]
    in_tree = tree_mask.gather(2, node[:, None, :].expand(batch, nodes, -1))
    behind = position >= prefix  # [B, L]
    visible = torch.where(behind[:, None], in_tree & (position < prefix + nodes)[:, None], True)
    if window is not None:
        depth = tree_mask.sum(-1) - 1  # [B, N]
        stands = torch.where(behind, prefix + depth.gather(1, node), position)  # [B, L]
        visible &= stands[:, None] > (prefix + depth)[:, :, None] - window
    return visible


def _verify_cpu(
    query: Tensor,
    key_plane: Tensor,
    value_plane: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    tree_mask: Tensor,
    max_seq_len: int,
    window: int | None,
    scale: float,
) -> Tensor:
    """The same where lengths can be read: no request pays for the longest, or differs in its company."""
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    nodes = tree_mask.shape[1]
    for row, length in enumerate(seq_lens.tolist()):
        length = max(length, nodes)
        first, last = row * nodes, (row + 1) * nodes
        prefix = torch.tensor([[length - nodes]])
        visible = _visible(torch.arange(length), prefix, tree_mask[row : row + 1], window)
        key = gather(key_plane, page_table[row], 0, length).transpose(0, 1)[None]
        value = gather(value_plane, page_table[row], 0, length).transpose(0, 1)[None]
        queries = query[first:last].transpose(0, 1)[None]
        attended = F.scaled_dot_product_attention(
            queries,
            key,
            value,
            attn_mask=visible[:, None],
            scale=scale,
            enable_gqa=queries.shape[1] != key.shape[1],
        )
        out[first:last] = attended[0].transpose(0, 1)
    return out


def _fake(query: Tensor, *_rest: object) -> Tensor:
    return torch.empty_like(query, memory_format=torch.contiguous_format)


verify_attention = register_op("verify_attention", verify_reference, mutates=(), fake=_fake, cpu=_verify_cpu)
