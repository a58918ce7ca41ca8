"""Runs sequences through a `ModelRunner` over shuffled pages, as the nodes do: chunks, then decode."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from torch import Tensor

from common.engine.attention.step_attention import StepAttention
from common.engine.forward.batch import (
    BatchState,
    CaptureHiddenMode,
    ForwardBatch,
    ForwardMode,
    ForwardOutput,
)
from common.engine.forward.model_runner import ModelRunner
from common.engine.models.causal_lm import CausalLM
from common.engine.state.state_rows import StateRows, WindowShape
from common.kv_cache.kv_values import AS_COMPUTED, KvValues
from common.kv_cache.layer_kinds import window_widths
from tests.fakes.pools import model_pool

BAD_PAGE = 2**31 - 1  # in every page table entry that must not be read


class Driver:
    """Sequences with known ids; `run` computes the next tokens of some of them in one batch."""

    def __init__(
        self,
        model: CausalLM,
        sequences: Sequence[Tensor],
        page_size: int,
        seed: int = 0,
        kv: KvValues = AS_COMPUTED,
    ) -> None:
        self.sequences = list(sequences)
        self.page_size = page_size
        self.width = max(-(-len(ids) // page_size) for ids in sequences) + 2
        num_pages = 1 + sum(-(-len(ids) // page_size) for ids in sequences) + 3
        slots = len(sequences) + 1
        self.pool = model_pool(model.config, page_size, num_pages, model.placement, slots, kv)
        self.pool.storage.fill_(255)  # NaN of every dtype: unwritten KV must not be read
        for layer in range(model.config.num_layers):
            for plane in self.pool.planes(layer).values():
                plane[0].zero_()
        window = WindowShape(window_widths(model.config, model.placement.shard), 1, model.placement.dtype)
        self.rows = StateRows.allocate(len(sequences), window, model.placement.device)
        for kept in self.rows.windows.values():
            kept[1:] = torch.nan
        self.joined: set[int] = set()  # sequences whose state has a row
        config = model.config
        attention = StepAttention(self.pool, config.sliding_windows, config.attention_scale)
        self.runner = ModelRunner(model, self.pool, attention)
        free = list(range(1, num_pages))
        random.Random(seed).shuffle(free)
        self.pages = [[free.pop() for _ in range(-(-len(ids) // page_size))] for ids in sequences]
        self.done = [0] * len(sequences)

    def batch(
        self,
        rows: Sequence[int],
        lengths: Sequence[int],
        mode: ForwardMode = ForwardMode.EXTEND,
        hidden_mode: CaptureHiddenMode = CaptureHiddenMode.NULL,
    ) -> ForwardBatch:
        """Return a batch of the next lengths[i] tokens of sequence rows[i], with logits for each of them."""
        ids, positions, slots, ends = [], [], [], []
        table = torch.full((len(rows), self.width), BAD_PAGE, dtype=torch.int32)
        for line, (row, length) in enumerate(zip(rows, lengths, strict=True)):
            begin, end = self.done[row], self.done[row] + length
            where = torch.arange(begin, end)
            used = torch.tensor(self.pages[row][: -(-end // self.page_size)])
            table[line, : len(used)] = used.int()
            ids.append(self.sequences[row][begin:end])
            positions.append(where)
            slots.append(used[where // self.page_size] * self.page_size + where % self.page_size)
            ends.append(end)
        starts = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
        extend = mode is ForwardMode.EXTEND
        return ForwardBatch(
            mode=mode,
            input_ids=torch.cat(ids),
            positions=torch.cat(positions),
            kv_slots=torch.cat(slots),
            page_table=table,
            seq_lens=torch.tensor(ends, dtype=torch.int32),
            query_start=starts,
            logits_rows=torch.arange(sum(lengths)),
            max_seq_len=max(ends),
            hidden_mode=hidden_mode,
            query_lens_host=tuple(lengths) if extend else None,
            seq_lens_host=tuple(ends) if extend else None,
            state=self.state(rows, mode) if self.pool.state_bytes else None,
        )

    def state(self, rows: Sequence[int], mode: ForwardMode) -> BatchState:
        """The state of sequence i is in slot i + 1 and, once it decodes, in row i + 1."""
        slots = torch.tensor(rows) + 1
        if mode is ForwardMode.EXTEND:
            return BatchState(slots)
        for row in rows:
            if row not in self.joined:
                self.rows.write_row(row + 1, row + 1, self.done[row])
                self.joined.add(row)
        return self.rows.open_window(slots, torch.tensor([self.done[row] for row in rows]))

    def run(
        self,
        rows: Sequence[int],
        lengths: Sequence[int],
        mode: ForwardMode = ForwardMode.EXTEND,
        hidden_mode: CaptureHiddenMode = CaptureHiddenMode.NULL,
    ) -> ForwardOutput:
        output = self.runner(self.batch(rows, lengths, mode, hidden_mode))
        for row, length in zip(rows, lengths, strict=True):
            self.done[row] += length
        return output

    def run_all(self, chunk: int | None, prompts: Sequence[int]) -> list[Tensor]:
        """Run prompts of given lengths in chunks (None: whole), then decode to the end: logits [n, V] each."""
        logits: list[list[Tensor]] = [[] for _ in self.sequences]

        def step(rows: list[int], lengths: list[int], mode: ForwardMode) -> None:
            parts = self.run(rows, lengths, mode).logits.split(lengths)
            for row, part in zip(rows, parts, strict=True):
                logits[row].append(part)

        while rows := [row for row, prompt in enumerate(prompts) if self.done[row] < prompt]:
            left = [prompts[row] - self.done[row] for row in rows]
            step(rows, [min(n, chunk or n) for n in left], ForwardMode.EXTEND)
        while rows := [row for row, ids in enumerate(self.sequences) if self.done[row] < len(ids)]:
            step(rows, [1] * len(rows), ForwardMode.DECODE)
        return [torch.cat(parts) for parts in logits]
