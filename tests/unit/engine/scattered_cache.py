"""Keys and values of several requests in two forms: dense, and over shuffled pages surrounded by poison."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from common.engine.ops.fp8_codes import FP8
from common.engine.ops.kv_rounding import as_read, as_stored

BAD_PAGE = 2**31 - 1


class Cache:
    """Random keys and values, dense and scattered over shuffled pages; NaN and bad page ids elsewhere.

    Args:
        scales: of keys and of values that pages hold in eight bits; None: they hold `dtype`.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        page_size: int,
        kv_heads: int,
        dim: int,
        dtype: torch.dtype,
        scales: tuple[float, float] | None = None,
    ) -> None:
        torch.manual_seed(sum(lengths))
        self.lengths = list(lengths)
        counts = [-(-n // page_size) for n in lengths]
        self.planes = torch.full((2, 1 + sum(counts) + 2, page_size, kv_heads, dim), torch.nan, dtype=dtype)
        order = (torch.randperm(sum(counts)) + 1).tolist()
        self.page_table = torch.full((len(lengths), max(counts) + 2), BAD_PAGE, dtype=torch.int32)
        self.dense = [torch.randn(2, n, kv_heads, dim, dtype=dtype) for n in lengths]
        for row, (n, count) in enumerate(zip(lengths, counts, strict=True)):
            pages = torch.tensor([order.pop() for _ in range(count)], dtype=torch.int64)
            self.page_table[row, :count] = pages.int()
            where = torch.arange(n)
            if scales is not None:
                for part, scale in zip(self.dense[row], scales, strict=True):
                    part.copy_(as_read(as_stored(4 * part, FP8, scale), dtype, scale))
            self.planes[:, pages[where // page_size], where % page_size] = self.dense[row]
        if scales is not None:
            divided = [plane / scale for plane, scale in zip(self.planes, scales, strict=True)]
            self.planes = torch.stack(divided).to(FP8)

    def expected(self, row: int, query: Tensor, window: int | None) -> Tensor:
        """Return dense attention of query [n, heads, dim], the request's last tokens: [n, heads, dim] in float64."""
        length = self.lengths[row]
        behind = torch.arange(length - len(query), length)[:, None] - torch.arange(length)
        return self.attend(row, query, (behind >= 0) & (behind < (window or length + 1)))

    def attend(self, row: int, query: Tensor, visible: Tensor) -> Tensor:
        """Compute `expected` for queries that attend only to the positions in `visible`, bool [n, length]."""
        key, value = self.dense[row].double().repeat_interleave(query.shape[1] // self.planes.shape[3], dim=2)
        scores = torch.einsum("qhd,khd->hqk", query.double(), key) * query.shape[2] ** -0.5
        return torch.einsum("hqk,khd->qhd", scores.masked_fill(~visible, -torch.inf).softmax(-1), value)
