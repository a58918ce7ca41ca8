"""Attention without a mask within runs of rows, such as windows of an image or whole images: no cache, not causal.

On a GPU this is one launch of torch's flash kernel, which finds the runs on the device; nothing is padded.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

# Not cuDNN, which plans each new shape: images of new sizes would wait for it, and its plans are never released.
KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
MAX_HEAD_DIM = 256  # limit of the flash kernel, which takes multiples of 8


@dataclass(frozen=True, slots=True)
class Segments:
    """S consecutive runs of rows. Rows past the last run belong to none, and their result is undefined."""

    starts: Tensor  # [S + 1] int32 on the device: the first row of each run, and the end of the last
    longest: int  # maximum rows of a run
    lengths: tuple[int, ...] | None = None  # [S], on the host; None in a graph, where the runs change


def segments_of(lengths: tuple[int, ...], starts: Tensor) -> Segments:
    """Return segments of runs whose lengths the host knows."""
    return Segments(starts, max(lengths), lengths)


def takes_flash(dtype: torch.dtype, head_dim: int, device: torch.device) -> bool:
    """Return whether `attend_within` is one launch that finds the runs on the device."""
    half = dtype in (torch.float16, torch.bfloat16)
    return device.type == "cuda" and half and head_dim % 8 == 0 and head_dim <= MAX_HEAD_DIM


def attend_within(query: Tensor, key: Tensor, value: Tensor, segments: Segments) -> Tensor:
    """Attend every row to all rows of its run. query, key, value: [N, heads, D], D adjacent.

    Never waits for the device.
    """
    if takes_flash(query.dtype, query.shape[-1], query.device):
        starts, longest = segments.starts, segments.longest
        out: Tensor = torch.ops.aten._flash_attention_forward(
            query, key, value, starts, starts, longest, longest, 0.0, False, False
        )[0]
        return out
    if segments.lengths is None:
        return attend_masked(query, key, value, segments.starts)
    return attend_by_length(query, key, value, segments.lengths)


def attend_by_length(query: Tensor, key: Tensor, value: Tensor, lengths: tuple[int, ...]) -> Tensor:
    """Compute the same in torch; consecutive runs of one length are one product."""
    equal = [(length, len(list(run))) for length, run in itertools.groupby(lengths)]
    split = (torch.split(each, [length * count for length, count in equal]) for each in (query, key, value))
    parts = []
    with sdpa_kernel(KERNELS):
        for (length, count), *three in zip(equal, *split, strict=True):
            q, k, v = (each.view(count, length, *each.shape[1:]).transpose(1, 2) for each in three)
            attended = F.scaled_dot_product_attention(q, k, v)  # [count, heads, length, D]
            parts.append(attended.transpose(1, 2).flatten(0, 1))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def attend_masked(query: Tensor, key: Tensor, value: Tensor, starts: Tensor) -> Tensor:
    """Compute the same with runs read on the device, for the tape: N by N attention for any runs."""
    row = torch.arange(query.shape[0], dtype=torch.int32, device=query.device)
    owner = torch.bucketize(row, starts, right=True)
    real = (row < starts[-1])[:, None, None]  # other rows are undefined, and 0 * NaN is NaN
    key, value = torch.where(real, key, 0.0), torch.where(real, value, 0.0)
    q, k, v = (each.transpose(0, 1)[None] for each in (query, key, value))
    attended = F.scaled_dot_product_attention(q, k, v, owner[:, None] == owner)
    return attended[0].transpose(0, 1)
