"""The library's FP8 products, for many rows: `torch._scaled_mm` with scales per row and channel, or per block.

Products with scales per channel add up in the matrix units only (`use_fast_accum`), as other engines do: at a depth of
14,336 a sum of numbers of one sign, the worst case, differed by 8.5 % on an H200, with blocks by 0.4 %.
"""

from __future__ import annotations

import torch
from torch import Tensor

ALIGNMENT = 16  # the library takes depths and outputs that are multiples of it
BLOCK_COLUMNS = 4  # it takes this many blocks of a row's depth, or multiples of it
BLOCK_ROWS = 4  # the same for rows of products with blocks
MIN_CAPABILITY = (9, 0)  # compute capability of the first GPU with products of blocks
BLOCKS_CUDA = (12, 9)  # the first CUDA with them
CHANNELS_LEAST = (8, 9)  # the same for any FP8 product


def library_product(
    codes: Tensor,
    row_scales: Tensor,
    weight: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
) -> Tensor | None:
    """Return what `fp8_product` returns; None if the library has no product for these shapes or this GPU."""
    size, depth = weight.shape
    if size % ALIGNMENT or depth % ALIGNMENT:
        return None
    rows, of_rows = codes.reshape(-1, depth), row_scales.reshape(-1, row_scales.shape[-1])
    if rows.shape[0] == 0:
        return codes.new_empty((*codes.shape[:-1], size), dtype=dtype)
    blocks = scales.ndim == 2
    product = _blocks if blocks else _channels
    if not _serves(rows, scales, blocks):
        return None
    out = product(rows, of_rows, weight, scales, dtype)
    out = out if bias is None else out + bias
    return out.view(*codes.shape[:-1], size)


def _serves(rows: Tensor, scales: Tensor, blocks: bool) -> bool:
    capability = torch.cuda.get_device_capability(rows.device)
    if not blocks:
        return capability >= CHANNELS_LEAST
    if capability[0] != MIN_CAPABILITY[0] or not _builds_blocks():
        return False
    # It has products of blocks for numbers of rows whose scales are aligned.
    return len(rows) % BLOCK_ROWS == 0 and scales.shape[1] % BLOCK_COLUMNS == 0


def _builds_blocks() -> bool:
    """Return whether torch was built with a CUDA that has products of blocks."""
    version = (torch.version.cuda or "0.0").split(".")
    return (int(version[0]), int(version[1])) >= BLOCKS_CUDA


def _channels(rows: Tensor, of_rows: Tensor, weight: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    if dtype == torch.bfloat16:
        return torch._scaled_mm(
            rows, weight.t(), of_rows, scales[None, :], out_dtype=dtype, use_fast_accum=True
        )
    # Scales per row come with bfloat16 outputs only.
    one = torch.ones((), device=rows.device)
    out = torch._scaled_mm(rows, weight.t(), one, one, out_dtype=torch.float32, use_fast_accum=True)
    return (out * of_rows * scales).to(dtype)


def _blocks(rows: Tensor, of_rows: Tensor, weight: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    by_group = of_rows.t().contiguous().t()  # the library reads the scales of all rows, group by group
    out = torch._scaled_mm(rows, weight.t(), by_group, scales.t(), out_dtype=torch.bfloat16)
    return out.to(dtype)
