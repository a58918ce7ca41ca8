"""Attention of a prefill node's target: whole prompts without pages where that is faster."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from common.engine.attention.paged import PagedAttention
from common.engine.attention.whole_prompt import MAX_HEAD_DIM, attend_padded_prompt, whole_prompt_rows
from common.engine.ops.fp8_codes import FP8
from common.engine.ops.hopper_attention import hopper_reads
from common.engine.state.pool import KvPool


class PromptAttention(PagedAttention):
    """PagedAttention that computes a whole prompt over the forward's own keys and values, as `store` rounded them.

    Args:
        whole_prompt_tokens: token counts of batches, including padding, at which a whole prompt is computed
            without pages, except where `hopper_extend` serves, which is faster. These are the prefill buckets; each
            is run once before serving, since its first call is slow.
    """

    def __init__(
        self,
        pool: KvPool,
        windows: Sequence[int | None],
        whole_prompt_tokens: Collection[int] = (),
        scale: float | None = None,
    ) -> None:
        super().__init__(pool, windows, scale)
        able = pool.device.type == "cuda" and self._head_dim <= MAX_HEAD_DIM
        self._whole_prompt_tokens = frozenset(whole_prompt_tokens) if able else frozenset()

    def tokens_on_device(self, heads: int, dtype: torch.dtype, most: int) -> int:
        """Return up to how many tokens attention decides nothing on the host, so that graphs need no breaks.

        That is `most` or 0. For models that keep a state per request it is 0.

        Args:
            heads: query heads.
            dtype: that of queries.
        """
        pool = self.pool
        if pool.attention_layer is None or pool.state_bytes:
            return 0
        query = torch.empty(0, heads, self._head_dim, dtype=dtype, device=pool.device)
        served = (self._on_hopper(query, layer, self._windows[layer]) for layer in pool.attention_layers)
        return most if all(served) else 0

    def _on_hopper(self, query: Tensor, layer: int, window: int | None) -> bool:
        """Return whether `hopper_extend` computes long prompts over a layer's pages, if need be after conversion."""
        plane = self.pool.key(layer)
        return plane.dtype in (query.dtype, FP8) and hopper_reads(query, plane.shape[1:], window)

    def forward(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if (live := self._whole_prompt_rows(query, self._windows[layer])) is not None:
            return attend_padded_prompt(query, key, value, live, self._scale)
        return super().forward(layer, query, key, value)

    def _whole_prompt_rows(self, query: Tensor, window: int | None) -> int | None:
        """Return the live rows of a whole prompt that may be computed without pages, or None."""
        rows = query.shape[0]
        if rows not in self._whole_prompt_tokens or (window is not None and window < rows):
            return None
        if query.dtype not in (torch.float16, torch.bfloat16):
            return None
        layer = self.pool.attention_layer
        assert layer is not None
        if self._on_hopper(query, layer, window):
            return None
        return whole_prompt_rows(self._planned(), rows)
