"""Attention without a mask within runs of rows, such as the windows of images or whole images: no cache, no causality.

On a GPU one launch of the flash kernel that torch brings, which finds the runs by itself; nothing is padded.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

# Not cuDNN, which plans anew for every shape: images of new sizes would wait for it, and its plans are kept for ever.
KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
MAX_HEAD_DIM = 256  # of the flash kernel, which takes multiples of 8


@dataclass(frozen=True, slots=True)
class Segments:
    """S runs of rows, one behind the other."""

    lengths: tuple[int, ...]  # [S], on the host
    starts: Tensor  # [S + 1] int32 on the device: the first row of each, and the number of rows


def attend_within(query: Tensor, key: Tensor, value: Tensor, segments: Segments) -> Tensor:
    """[N, heads, D] each, D adjacent: every row attends to all rows of its run. Nothing waits for the device."""
    head_dim = query.shape[-1]
    if (
        query.device.type == "cuda"
        and query.dtype in (torch.float16, torch.bfloat16)
        and head_dim % 8 == 0
        and head_dim <= MAX_HEAD_DIM
    ):
        longest, starts = max(segments.lengths), segments.starts
        out: Tensor = torch.ops.aten._flash_attention_forward(
            query, key, value, starts, starts, longest, longest, 0.0, False, False
        )[0]
        return out
    return attend_within_reference(query, key, value, segments)


def attend_within_reference(query: Tensor, key: Tensor, value: Tensor, segments: Segments) -> Tensor:
    """The same in torch; runs of one length that follow each other are one product."""
    equal = [(length, len(list(run))) for length, run in itertools.groupby(segments.lengths)]
    split = (torch.split(each, [length * count for length, count in equal]) for each in (query, key, value))
    parts = []
    with sdpa_kernel(KERNELS):
        for (length, count), *three in zip(equal, *split, strict=True):
            q, k, v = (each.view(count, length, *each.shape[1:]).transpose(1, 2) for each in three)
            attended = F.scaled_dot_product_attention(q, k, v)  # [count, heads, length, D]
            parts.append(attended.transpose(1, 2).flatten(0, 1))
    return parts[0] if len(parts) == 1 else torch.cat(parts)
