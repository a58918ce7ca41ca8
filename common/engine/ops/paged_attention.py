"""Attention of new tokens over the paged cache that holds them: extend (many per request), decode (one).

Both read only slots below a request's length: whatever lies in other pages, in the tail of the last page or
in unused entries of the page table cannot reach a result, not even as 0 * NaN. On the CPU the numbers of a
request depend on its own length and nothing else in the batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from common.engine.ops.registration import register_op

QUERY_BLOCK = 512  # rows of one mask: bounds its memory and skips keys that a whole block may not see
SHORT = 256  # decode: requests up to this length are gathered together in buckets, longer ones one by one
BUCKET = 64


def extend_reference(
    query: Tensor,
    key_plane: Tensor,
    value_plane: Tensor,
    page_table: Tensor,
    query_lens: Sequence[int],
    kv_lens: Sequence[int],
    window: int | None,
    scale: float,
) -> Tensor:
    """Causal attention of each request's last query_lens[b] positions over its kv_lens[b] cached ones.

    Args:
        query: [T, heads, D], requests one after another; rows behind the last request are padding.
        key_plane, value_plane: [num_pages, page_size, kv_heads, D], already holding the new tokens.
        page_table: [B, max_pages] int32.
        window: keys that a query sees, itself included; None: all before it.

    Returns [T, heads, D]; padding rows are zero.
    """
    out = torch.zeros_like(query, memory_format=torch.contiguous_format)
    start = 0
    for row, (num_new, length) in enumerate(zip(query_lens, kv_lens, strict=True)):
        if num_new == 0:
            continue
        new = query[start : start + num_new]
        begin = _first_visible(length - num_new, window)
        key = _gather(key_plane, page_table[row], begin, length)
        value = _gather(value_plane, page_table[row], begin, length)
        out[start : start + num_new] = _attend(new, key, value, length - num_new - begin, window, scale)
        start += num_new
    return out


def decode_reference(
    query: Tensor,
    key_plane: Tensor,
    value_plane: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    max_seq_len: int,
    window: int | None,
    scale: float,
) -> Tensor:
    """Attention of one new token per request over its seq_lens[b] cached positions, itself included.

    Vectorised over the batch and free of host synchronisation. A padding row (length 0) gives some finite or
    NaN row.

    Args:
        query: [B, heads, D].
        page_table: [B, max_pages] int32.
        seq_lens: [B] int32, at most max_pages * page_size.
        max_seq_len: host bound of seq_lens that sizes the gather.

    Returns [B, heads, D].
    """
    batch, _, head_dim = query.shape
    page_size, kv_heads = key_plane.shape[1], key_plane.shape[2]
    bound = max_seq_len  # not cut to the width of the table: a row's sums must not depend on other rows
    position = torch.arange(bound, device=query.device)  # [L]
    entry = (position // page_size).clamp(max=page_table.shape[1] - 1)
    slot = page_table.long()[:, entry] * page_size + position % page_size  # [B, L]
    last = seq_lens.long().clamp(1, bound)[:, None] - 1  # [B, 1]
    visible = position <= last
    if window is not None:
        visible &= position > last - window
    slot = torch.where(visible, slot, slot.gather(1, last)).view(-1)  # hidden ones read the token's own slot
    key = key_plane.view(-1, kv_heads, head_dim).index_select(0, slot).view(batch, bound, kv_heads, head_dim)
    value = (
        value_plane.view(-1, kv_heads, head_dim).index_select(0, slot).view(batch, bound, kv_heads, head_dim)
    )
    grouped = query.reshape(batch, kv_heads, -1, head_dim)  # the heads of a group are rows of one product
    mask = visible[:, None, None, :]
    out = F.scaled_dot_product_attention(
        grouped, key.transpose(1, 2), value.transpose(1, 2), attn_mask=mask, scale=scale
    )
    return out.reshape(query.shape).contiguous()


def _decode_cpu(
    query: Tensor,
    key_plane: Tensor,
    value_plane: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    max_seq_len: int,
    window: int | None,
    scale: float,
) -> Tensor:
    """The same on the CPU, where lengths can be read: no request pays for the longest one of the batch."""
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    buckets: dict[int, list[int]] = {}
    for row, length in enumerate(seq_lens.tolist()):
        if length <= SHORT:
            buckets.setdefault(-(-max(length, 1) // BUCKET) * BUCKET, []).append(row)
            continue
        begin = _first_visible(length - 1, window)
        key = _gather(key_plane, page_table[row], begin, length)
        value = _gather(value_plane, page_table[row], begin, length)
        out[row] = _attend(query[row : row + 1], key, value, length - 1 - begin, window, scale)[0]
    for bound, rows in buckets.items():
        index = torch.tensor(rows)
        rest = page_table[index], seq_lens[index], bound, window, scale
        out[index] = decode_reference(query[index], key_plane, value_plane, *rest)
    return out


def _first_visible(position: int, window: int | None) -> int:
    """The first position that a query at `position` sees."""
    return 0 if window is None else max(0, position - window + 1)


def _gather(plane: Tensor, pages: Tensor, begin: int, end: int) -> Tensor:
    """Positions begin .. end - 1 of the request with pages [max_pages]: [end - begin, kv_heads, D]."""
    page_size = plane.shape[1]
    first = begin // page_size
    rows = plane.index_select(0, pages[first : -(-end // page_size)])
    return rows.view(-1, plane.shape[2], plane.shape[3])[begin - first * page_size : end - first * page_size]


def _attend(
    query: Tensor, key: Tensor, value: Tensor, offset: int, window: int | None, scale: float
) -> Tensor:
    """Causal attention of query [n, heads, D] over key, value [m, kv_heads, D]; query i is key offset + i.

    Returns [n, heads, D].
    """
    num_new, num_heads, head_dim = query.shape
    kv_heads = key.shape[1]
    keys, values = key.transpose(0, 1)[None], value.transpose(0, 1)[None]  # [1, kv_heads, m, D]
    if num_new == 1:  # every gathered key is visible
        grouped = query.reshape(1, kv_heads, num_heads // kv_heads, head_dim)
        return F.scaled_dot_product_attention(grouped, keys, values, scale=scale).reshape(query.shape)
    queries, gqa = query.transpose(0, 1)[None], num_heads != kv_heads
    if offset == 0 and (window is None or num_new <= window):
        out = F.scaled_dot_product_attention(
            queries, keys, values, is_causal=True, scale=scale, enable_gqa=gqa
        )
        return out[0].transpose(0, 1)
    blocks = []
    for first in range(0, num_new, QUERY_BLOCK):
        last = min(first + QUERY_BLOCK, num_new)
        begin, end = _first_visible(offset + first, window), offset + last
        row = torch.arange(offset + first, end, device=query.device)[:, None]
        column = torch.arange(begin, end, device=query.device)
        mask = column <= row if window is None else (column <= row) & (column > row - window)
        blocks.append(
            F.scaled_dot_product_attention(
                queries[:, :, first:last],
                keys[:, :, begin:end],
                values[:, :, begin:end],
                attn_mask=mask,
                scale=scale,
                enable_gqa=gqa,
            )
        )
    return torch.cat(blocks, dim=2)[0].transpose(0, 1)


def _fake(query: Tensor, *_rest: object) -> Tensor:
    return torch.empty_like(query, memory_format=torch.contiguous_format)


extend_attention = register_op("extend_attention", extend_reference, mutates=(), fake=_fake)
decode_attention = register_op("decode_attention", decode_reference, mutates=(), fake=_fake, cpu=_decode_cpu)
