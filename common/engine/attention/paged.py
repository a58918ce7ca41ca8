"""The attention backend over a paged KV pool, by the ops of `engine/ops`."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from common.engine.attention.backend import LayerOperation
from common.engine.attention.whole_prompt import MAX_HEAD_DIM, attend_padded_prompt, whole_prompt_rows
from common.engine.forward.batch import ForwardBatch, ForwardMode
from common.engine.ops.decode_attention import decode_attention
from common.engine.ops.extend_attention import extend_attention, shape_steps
from common.engine.ops.rotary_kv_write import rotary_kv_write
from common.engine.ops.triton_kernel import multiprocessors
from common.engine.ops.verify_attention import verify_attention
from common.engine.state.pool import KvPool
from common.named import named


class PagedAttention:
    """Attention over `pool`, whose layers see `windows[layer]` keys (None: all). Implements `AttentionBackend`.

    Args:
        whole_prompt_tokens: token counts of batches, including padding, at which a whole prompt is computed
            without pages. These are the prefill buckets; each is run once before serving, since its first call is slow.
    """

    def __init__(
        self, pool: KvPool, windows: Sequence[int | None], whole_prompt_tokens: Collection[int] = ()
    ) -> None:
        if len(windows) < pool.num_layers:
            raise ValueError(f"{len(windows)} attention windows for a pool of {pool.num_layers} layers")
        self.pool = pool
        self._windows = tuple(windows)
        layer = pool.attention_layer
        # of a model without attention layers: no shape, and nothing below asks for one
        self._kv_heads, self._head_dim = (1, 1) if layer is None else pool.key(layer).shape[2:]
        self._dtype = torch.uint8 if layer is None else pool.key(layer).dtype
        self._scale = self._head_dim**-0.5
        able = (
            pool.device.type == "cuda"
            and self._dtype in (torch.float16, torch.bfloat16)
            and self._head_dim <= MAX_HEAD_DIM
        )
        self._whole_prompt_tokens = frozenset(whole_prompt_tokens) if able else frozenset()
        self._batch: ForwardBatch | None = None

    @torch.inference_mode()
    def warm_up(self, heads: int, max_tokens: int, max_requests: int) -> None:
        """Compile all kernels that EXTEND batches can need, before serving: otherwise the first batch waits a second.

        Graphs are captured with one request, so capturing does not compile all of them. Reads page 0, writes nothing.
        """
        pool, first = self.pool, self.pool.attention_layer
        if pool.device.type != "cuda" or first is None:
            return
        kv_heads, head_dim = self._kv_heads, self._head_dim
        processors = multiprocessors(pool.device)
        steps = shape_steps(max_tokens, heads, kv_heads, head_dim * self._dtype.itemsize, processors)
        crowds = {2, *(1 << bits for bits in range(7, (max_requests - 1).bit_length() + 1))}
        for window, requests, tokens in itertools.product(set(self._windows), sorted(crowds), steps):
            qkv = torch.zeros(tokens, heads + 2 * kv_heads, head_dim, dtype=self._dtype, device=pool.device)
            starts = torch.zeros(requests + 1, dtype=torch.int32, device=pool.device)
            starts[1:] = tokens
            pages = torch.zeros(requests, 1, dtype=torch.int32, device=pool.device)
            planes = pool.key(first), pool.value(first)
            extend_attention(
                qkv[:, :heads], *planes, pages, starts, pages[:, 0].contiguous(), window, self._scale
            )

    def plan(self, batch: ForwardBatch) -> None:
        """Set the batch. Raises ValueError if an EXTEND batch lacks host lengths or they do not fit its tensors."""
        if batch.mode is ForwardMode.EXTEND:
            new, total = batch.query_lens_host, batch.seq_lens_host
            if new is None or total is None:
                raise ValueError("an EXTEND batch needs query_lens_host and seq_lens_host")
            if len(new) != len(total) or sum(new) > batch.input_ids.shape[0]:
                raise ValueError(
                    f"query lengths {new} do not fit {batch.input_ids.shape[0]} tokens, lengths {total}"
                )
            if max(total, default=0) > batch.page_table.shape[1] * self.pool.page_size:
                raise ValueError(
                    f"a request of {max(total)} tokens does not fit {batch.page_table.shape[1]} pages"
                )
        self._batch = batch

    def store(
        self,
        layer: int,
        qkv: Tensor,
        angles: tuple[Tensor, Tensor],
        q_weight: Tensor | None,
        k_weight: Tensor | None,
        eps: float,
    ) -> None:
        slots, (cos, sin) = self._planned().kv_slots, angles
        planes = self.pool.key(layer), self.pool.value(layer)
        rotary_kv_write(qkv, cos, sin, q_weight, k_weight, eps, *planes, slots)

    def forward(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        window = self._windows[layer]
        if (live := self._whole_prompt_rows(query.shape[0], window)) is not None:
            return attend_padded_prompt(query, key, value, live, self._scale)
        planes = self.pool.key(layer), self.pool.value(layer)
        return attend_pages(self._planned(), query, *planes, window, self._scale)

    def mix(
        self,
        layer: int,
        operation: str,
        projected: Tensor,
        width: int,
        weights: Sequence[Tensor] = (),
        eps: float = 0.0,
    ) -> Tensor:
        run: LayerOperation = named(operation)
        return run(self._planned(), layer, self.pool.planes(layer), projected, weights, eps)

    def _whole_prompt_rows(self, rows: int, window: int | None) -> int | None:
        """Return the live rows of a whole prompt that may be computed without pages, or None."""
        if rows not in self._whole_prompt_tokens or (window is not None and window < rows):
            return None
        return whole_prompt_rows(self._planned(), rows)

    def _planned(self) -> ForwardBatch:
        if self._batch is None:
            raise RuntimeError("call plan(batch) before store and forward")
        return self._batch


def attend_pages(
    batch: ForwardBatch, query: Tensor, keys: Tensor, values: Tensor, window: int | None, scale: float
) -> Tensor:
    """Attend query [T, heads, D] over planes [num_pages, page_size, kv_heads, D] that hold the batch's new tokens."""
    table, lengths, longest = batch.page_table, batch.seq_lens, batch.max_seq_len
    if batch.mode is ForwardMode.DECODE:
        out: Tensor = decode_attention(query, keys, values, table, lengths, longest, window, scale)
    elif batch.tree_mask is not None:
        tree = batch.tree_mask
        out = verify_attention(query, keys, values, table, lengths, tree, longest, window, scale)
    else:
        out = extend_attention(query, keys, values, table, batch.query_start, lengths, window, scale)
    return out
