"""Attention over gathered pages in torch: the code that the extend and decode references share."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from common.engine.ops.kv_rounding import as_read, selected

QUERY_BLOCK = 512  # rows per mask: bounds its memory and skips keys that no row of a block sees


def first_visible(position: int, window: int | None) -> int:
    """Return the first position that a query at `position` sees."""
    return 0 if window is None else max(0, position - window + 1)


def gather(
    plane: Tensor, pages: Tensor, begin: int, end: int, dtype: torch.dtype, scale: float = 1.0
) -> Tensor:
    """Return positions begin .. end - 1 of the request with pages [max_pages]: [end - begin, kv_heads, D].

    Args:
        dtype: of the result, if the plane holds eight bits.
        scale: of the plane.
    """
    page_size = plane.shape[1]
    first = begin // page_size
    rows = selected(plane, pages[first : -(-end // page_size)])
    flat = rows.view(-1, plane.shape[2], plane.shape[3])
    return as_read(flat[begin - first * page_size : end - first * page_size], dtype, scale)


def attend(
    query: Tensor, key: Tensor, value: Tensor, offset: int, window: int | None, scale: float
) -> Tensor:
    """Compute causal attention of query [n, heads, D] over key, value [m, kv_heads, D]; query i has the position of key
    offset + i.

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
        begin, end = first_visible(offset + first, window), offset + last
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
