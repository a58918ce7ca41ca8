"""Scatter new keys and values into the paged cache."""

from __future__ import annotations

import torch
from torch import Tensor

from common.engine.ops.registration import register_op


def kv_write_reference(
    key: Tensor, value: Tensor, key_plane: Tensor, value_plane: Tensor, slots: Tensor
) -> None:
    """Write token t's key and value into slot slots[t]; slots in page 0 are padding and keep it zero.

    Args:
        key, value: [T, kv_heads, D].
        key_plane, value_plane: [num_pages, page_size, kv_heads, D], mutated.
        slots: [T] int64, page * page_size + offset; live slots are distinct.
    """
    live = (slots >= key_plane.shape[1])[:, None, None]
    for new, plane in ((key, key_plane), (value, value_plane)):
        flat = plane.view(-1, plane.shape[2], plane.shape[3])
        flat.index_copy_(0, slots, torch.where(live, new.to(plane.dtype), 0))


def _fake(key: Tensor, value: Tensor, key_plane: Tensor, value_plane: Tensor, slots: Tensor) -> None:
    return None


kv_write = register_op("kv_write", kv_write_reference, mutates=("key_plane", "value_plane"), fake=_fake)
