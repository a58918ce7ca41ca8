"""The host arrays of a forward and of the draws that follow it: each go to the device in one copy, unpacked by name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from common.engine.forward.batch import (
    SAVES,
    BatchState,
    CaptureHiddenMode,
    ForwardBatch,
    ForwardMode,
)
from common.engine.forward.rotary_places import RotaryPlaces
from common.engine.host_copies import Array
from common.engine.sampling.logit_adjustments import AdjustmentRows, Adjustments
from common.engine.sampling.sampler import SamplingBatch
from common.engine.sampling.sampling_plan import SamplingVariant
from prefill_node.step_plan import FirstDraw, PlannedChunk


@dataclass(frozen=True, slots=True)
class HostBatch:
    """The inputs of a forward over T tokens of B prompts."""

    lengths: tuple[int, ...]  # [B] new tokens
    ends: tuple[int, ...]  # [B] length after the forward
    loaded_tokens: int  # see ForwardBatch
    # ids, positions, slots, page table, lengths, starts, last rows of final chunks; state slots and saves where there
    # are any
    arrays: Sequence[Array]

    @classmethod
    def of(cls, chunks: Sequence[PlannedChunk], page_size: int, rotary: RotaryPlaces) -> HostBatch:
        lengths, ends = [chunk.length for chunk in chunks], [chunk.end for chunk in chunks]
        ids = np.concatenate([chunk.own_tokens() for chunk in chunks])
        positions = np.concatenate(
            [rotary.positions(chunk.images, chunk.start, chunk.end) for chunk in chunks]
        )
        width = max(-(-end // page_size) for end in ends)
        table = np.zeros((len(chunks), width), dtype=np.int32)
        slots, starts = np.empty(len(ids), dtype=np.int64), np.zeros(len(chunks) + 1, dtype=np.int32)
        np.cumsum(lengths, out=starts[1:])
        first = 0
        for row, chunk in enumerate(chunks):
            pages = np.asarray(chunk.pages, dtype=np.int64)
            table[row, : len(pages)] = pages
            page, offset = divmod(chunk.start, page_size)
            of_pages = (pages[page:, None] * page_size + np.arange(page_size)).reshape(-1)
            slots[first : first + chunk.length] = of_pages[offset : offset + chunk.length]
            first += chunk.length
        last_rows = [int(starts[i + 1]) - 1 for i, chunk in enumerate(chunks) if chunk.final]
        lens, rows = np.asarray(ends, dtype=np.int32), np.asarray(last_rows, dtype=np.int64)
        arrays = [ids, positions, slots, table, lens, starts, rows]
        state = [chunk.slot for chunk in chunks]
        if any(state):
            saves = np.zeros((len(chunks), SAVES, 2), dtype=np.int64)
            for row, chunk in enumerate(chunks):
                saves[row, : len(chunk.saves)] = np.asarray(chunk.saves, dtype=np.int64).reshape(-1, 2)
            arrays += [np.asarray(state, dtype=np.int64), saves]
        loaded = sum(len(chunk.load.pages) for chunk in chunks if chunk.load is not None)
        return cls(tuple(lengths), tuple(ends), loaded * page_size, arrays)

    def on_device(self, sent: Sequence[Tensor], hidden_mode: CaptureHiddenMode) -> ForwardBatch:
        """Return the batch of a forward. `sent` holds `arrays` as device tensors."""
        ids, positions, slots, table, lens, starts, rows, *state = sent
        return ForwardBatch(
            mode=ForwardMode.EXTEND,
            input_ids=ids,
            positions=positions,
            kv_slots=slots,
            page_table=table,
            seq_lens=lens,
            query_start=starts,
            logits_rows=rows,
            max_seq_len=max(self.ends),
            hidden_mode=hidden_mode,
            query_lens_host=self.lengths,
            seq_lens_host=self.ends,
            state=BatchState(state[0], state[1]) if state else None,
            loaded_tokens=self.loaded_tokens,
        )


@dataclass(frozen=True, slots=True)
class HostDraws:
    """The parameters with which the first tokens of R prompts are drawn."""

    # temperature, top_p, top_k, min_p, seed, the drawn token's index in its sequence, its row of AdjustmentRows; if any
    # prompt wants some, the tokens whose log-probabilities are wanted
    arrays: Sequence[Array]

    @classmethod
    def of(cls, draws: Sequence[FirstDraw], lengths: Sequence[int]) -> HostDraws:
        """`lengths`: tokens of each prompt."""
        params = [draw.sampling for draw in draws]
        arrays: list[Array] = [
            np.asarray([p.temperature for p in params], dtype=np.float32),
            np.asarray([p.top_p for p in params], dtype=np.float32),
            np.asarray([p.top_k for p in params], dtype=np.int32),
            np.asarray([p.min_p for p in params], dtype=np.float32),
            np.asarray([p.seed for p in params], dtype=np.int64),
            np.asarray(lengths, dtype=np.int64),
            np.arange(1, len(draws) + 1, dtype=np.int64),
        ]
        longest = max((len(p.logprob_ids) for p in params), default=0)
        if longest:
            ids = np.zeros((len(params), longest), dtype=np.int64)
            for row, each in enumerate(params):
                ids[row, : len(each.logprob_ids)] = each.logprob_ids
            arrays.append(ids)
        return cls(arrays)

    @staticmethod
    def on_device(
        sent: Sequence[Tensor], variant: SamplingVariant, adjustments: AdjustmentRows
    ) -> SamplingBatch:
        """Return the parameters on the device. `sent` holds `arrays`, `adjustments` the prompts' logit adjustments."""
        temperature, top_p, top_k, min_p, seed, position, rows, *ids = sent
        adjust = None
        if variant.adjust is not None:
            adjust = Adjustments(adjustments, rows, variant.adjust, rows.new_empty(len(rows), 0))
        return SamplingBatch(
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            min_p=min_p,
            seed=seed,
            position=position,
            all_greedy=variant.all_greedy,
            any_filter=variant.any_filter,
            num_logprobs=variant.num_logprobs,
            adjust=adjust,
            logprob_ids=ids[0] if ids else None,
        )
