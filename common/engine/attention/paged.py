"""The attention backend over a paged KV pool, by the ops of `engine/ops`."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from common.engine.forward.batch import ForwardBatch, ForwardMode
from common.engine.kv_cache.pool import KvPool
from common.engine.ops.kv_write import kv_write
from common.engine.ops.paged_attention import decode_attention, extend_attention


class PagedAttention:
    """Attention over `pool`, whose layers see `windows[layer]` keys (None: all). An `AttentionBackend`."""

    def __init__(self, pool: KvPool, windows: Sequence[int | None]) -> None:
        if len(windows) != pool.num_layers:
            raise ValueError(f"{len(windows)} attention windows for a pool of {pool.num_layers} layers")
        self.pool = pool
        self._windows = tuple(windows)
        self._scale = pool.head_dim**-0.5
        self._batch: ForwardBatch | None = None
        self._query_lens: tuple[int, ...] = ()
        self._kv_lens: tuple[int, ...] = ()

    def plan(self, batch: ForwardBatch) -> None:
        """Raises ValueError where an EXTEND batch lacks its host lengths or they do not fit its tensors."""
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
            self._query_lens, self._kv_lens = new, total
        self._batch = batch

    def forward(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        batch = self._batch
        if batch is None:
            raise RuntimeError("plan(batch) comes before forward")
        planes = self.pool.key(layer), self.pool.value(layer)
        kv_write(key, value, *planes, batch.kv_slots)
        window = self._windows[layer]
        if batch.mode is ForwardMode.DECODE:
            lengths = batch.seq_lens, batch.max_seq_len
            out: Tensor = decode_attention(query, *planes, batch.page_table, *lengths, window, self._scale)
        else:
            host = self._query_lens, self._kv_lens
            out = extend_attention(query, *planes, batch.page_table, *host, window, self._scale)
        return out
