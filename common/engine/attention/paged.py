"""Attention of prompts over a paged KV pool: the part that both roles run. Each role adds its own kernels to it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from common.engine.attention.backend import LayerOperation, TokenSlots
from common.engine.forward.batch import ForwardBatch, ForwardMode
from common.engine.ops.converted_attention import MIN_BATCH_TOKENS, converted_attention, converts
from common.engine.ops.ended_programs import ended_programs
from common.engine.ops.extend_attention import extend_attention, kernel_counts
from common.engine.ops.hopper_attention import hopper_serves, plan_prompts
from common.engine.ops.rotary_kv_write import rotary_kv_write
from common.engine.state.pool import KvPool
from common.named import named


class PagedAttention:
    """Attention over `pool`, whose layers see `windows[layer]` keys (None: all). Implements `AttentionBackend`.

    Serves batches of mode EXTEND without a tree. PromptAttention may compute whole prompts without pages; StepAttention
    also serves decode steps and trees.

    Args:
        scale: of scores; None: head_dim^-1/2.
    """

    def __init__(self, pool: KvPool, windows: Sequence[int | None], scale: float | None = None) -> None:
        if len(windows) < pool.num_layers:
            raise ValueError(f"{len(windows)} attention windows for a pool of {pool.num_layers} layers")
        # The counts must exist before any capture, during which they cannot be made.
        ended_programs(pool.device)
        self.pool = pool
        self._windows = tuple(windows)
        layer = pool.attention_layer
        # of a model without attention layers: no shape, and nothing below asks for one
        self._kv_heads, self._head_dim = (1, 1) if layer is None else pool.key(layer).shape[2:]
        self._scale = self._head_dim**-0.5 if scale is None else scale
        self._batch: ForwardBatch | None = None
        # The last layer that `hopper_extend` served, and its plan.
        self._prompts: tuple[int, Tensor] | None = None

    @torch.inference_mode()
    def warm_up(self, heads: int, dtype: torch.dtype, max_tokens: int, max_requests: int) -> None:
        """Compile all kernels that EXTEND batches can need, before serving: otherwise the first batch waits a second.

        `dtype` is that of queries.

        Graphs are captured with one request, so capturing does not compile all of them. Reads page 0, writes nothing.
        """
        pool = self.pool
        if pool.device.type != "cuda" or pool.attention_layer is None:
            return
        kv_heads, head_dim = self._kv_heads, self._head_dim
        sizes = heads, kv_heads, head_dim
        # From MIN_BATCH_TOKENS + 1 on, `extend_triton` has other kernels over FP8 pages.
        rest = sizes, dtype.itemsize, pool.device
        few = min(MIN_BATCH_TOKENS, max_tokens)
        steps = {*kernel_counts(1, few, *rest), *kernel_counts(few + 1, max_tokens, *rest)}
        crowds = {2, *(1 << bits for bits in range(7, (max_requests - 1).bit_length() + 1))}
        # Layers with the same window need the same kernels.
        layers = {self._windows[layer]: layer for layer in pool.attention_layers}.values()
        for layer, requests, tokens in itertools.product(layers, sorted(crowds), sorted(steps)):
            qkv = torch.zeros(tokens, heads + 2 * kv_heads, head_dim, dtype=dtype, device=pool.device)
            starts = torch.zeros(requests + 1, dtype=torch.int32, device=pool.device)
            starts[1:] = tokens
            pages = torch.zeros(requests, 1, dtype=torch.int32, device=pool.device)
            self._extend(qkv[:, :heads], layer, pages, starts, pages[:, 0].contiguous())

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
        self._batch, self._prompts = batch, None

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
        planes, scales = (self.pool.key(layer), self.pool.value(layer)), self.pool.scales(layer)
        rotary_kv_write(qkv, cos, sin, q_weight, k_weight, eps, *planes, slots, *scales)

    def forward(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return self._attend(self._planned(), query, layer)

    def _attend(self, batch: ForwardBatch, query: Tensor, layer: int) -> Tensor:
        """Attend query [T, heads, D] over the pages of a layer, which hold the new tokens."""
        if batch.mode is not ForwardMode.EXTEND or batch.tree_mask is not None:
            raise ValueError("decode steps and trees need StepAttention; this attention serves prompts")
        lengths = batch.query_start, batch.seq_lens
        return self._extend(
            query, layer, batch.page_table, *lengths, self._prompt_plan(query, layer, *lengths)
        )

    def _prompt_plan(self, query: Tensor, layer: int, query_start: Tensor, seq_lens: Tensor) -> Tensor | None:
        """Return the plan of a layer: that of the layer before it, or a new one if a run begins, or none.

        A run is not the same as a batch: a graph is captured after other runs for the same batch, and it has to plan.
        """
        keys, window, scales = self.pool.key(layer), self._windows[layer], self.pool.scales(layer)
        if converts(len(query), keys, window) or not hopper_serves(query, keys, window, scales):
            return None
        if self._prompts is None or layer <= self._prompts[0]:
            plan = plan_prompts(query, keys, query_start, seq_lens)
        else:
            plan = self._prompts[1]
        self._prompts = layer, plan
        return plan

    def _extend(
        self,
        query: Tensor,
        layer: int,
        page_table: Tensor,
        query_start: Tensor,
        seq_lens: Tensor,
        plan: Tensor | None = None,
    ) -> Tensor:
        """Run `extend_attention` over the pages of a layer; FP8 pages may be converted first."""
        keys, values, scales = self.pool.key(layer), self.pool.value(layer), self.pool.scales(layer)
        window, given = self._windows[layer], (query, keys, values, page_table, query_start, seq_lens)
        if converts(len(query), keys, window):
            return converted_attention(*given, self._scale, *scales)
        return extend_attention(*given, window, self._scale, *scales, plan)

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

    def token_slots(self) -> TokenSlots:
        return TokenSlots(self._planned().kv_slots, self.pool.page_size)

    def _planned(self) -> ForwardBatch:
        if self._batch is None:
            raise RuntimeError("call plan(batch) before store and forward")
        return self._batch
