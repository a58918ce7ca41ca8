"""One forward over chunks of several prompts: target extend, then the first token of each prompt that is complete."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from common.engine.draft_runner import DraftState
from common.engine.forward.batch import ForwardBatch, ForwardMode, ForwardOutput
from common.engine.logit_adjustments import AdjustmentRows, Adjustments
from common.engine.overlap import Completion
from common.engine.sampler import SampleOutput, SamplingBatch, sample
from common.engine.sampling_plan import sampling_variant
from prefill_node.draft import PrefillDraft
from prefill_node.scheduler import Chunk
from prefill_node.upload import upload
from prefill_node.vision import PromptEmbeds


@dataclass(frozen=True, slots=True)
class LaunchedPrefill:
    """`sampled` has one row per chunk of `finals`, in that order; None without finals."""

    chunks: Sequence[Chunk]
    finals: Sequence[Chunk]
    sampled: SampleOutput | None
    draft: DraftState | None  # rows as `sampled`; None without a draft model, too
    completion: Completion


class PrefillStep:
    """Turns chunks into a ForwardBatch. Holds no request state."""

    def __init__(
        self,
        forward: Callable[[ForwardBatch, torch.Tensor | None], ForwardOutput],
        embeds: PromptEmbeds,
        draft: PrefillDraft,
        adjustments: AdjustmentRows,
        page_size: int,
        device: torch.device,
        completion: Callable[[], Completion],
    ) -> None:
        """`adjustments` has a row for every prompt of a batch; they hold nothing from one batch to the next."""
        self._forward = forward
        self._embeds = embeds
        self._draft = draft
        self._adjustments = adjustments
        self._page_size = page_size
        self._device = device
        self._completion = completion

    def launch(self, chunks: Sequence[Chunk]) -> LaunchedPrefill:
        """Start the forward; nothing here waits for the device."""
        finals = [chunk for chunk in chunks if chunk.final]
        batch = self._batch(chunks)
        embeds = self._embeds(chunks, batch)
        output = self._forward(batch, None if embeds is None else embeds.rows)
        sampled = sample(output.logits, self._sampling(finals)) if finals else None
        draft = self._draft.extend(chunks, batch, output, sampled, embeds)
        drawn = None if sampled is None else sampled.on_host()
        return LaunchedPrefill(chunks, finals, drawn, draft, self._completion())

    def _batch(self, chunks: Sequence[Chunk]) -> ForwardBatch:
        lengths = [chunk.length for chunk in chunks]
        ends = [chunk.start + chunk.length for chunk in chunks]
        ids = np.concatenate([chunk.request.keys[chunk.start : end] for chunk, end in zip(chunks, ends)])
        positions = np.concatenate([np.arange(chunk.start, end) for chunk, end in zip(chunks, ends)])
        width = max(-(-end // self._page_size) for end in ends)
        table = np.zeros((len(chunks), width), dtype=np.int32)
        for row, (chunk, end) in enumerate(zip(chunks, ends)):
            assert chunk.request.lease is not None
            pages = chunk.request.lease.pages[: -(-end // self._page_size)]
            table[row, : len(pages)] = pages
        owner = np.repeat(np.arange(len(chunks)), lengths)  # token -> row of the batch
        slots = table[owner, positions // self._page_size].astype(np.int64) * self._page_size
        slots += positions % self._page_size
        starts = np.concatenate([[0], np.cumsum(lengths)])
        last_rows = [starts[i + 1] - 1 for i, chunk in enumerate(chunks) if chunk.final]
        return ForwardBatch(
            mode=ForwardMode.EXTEND,
            input_ids=self._to_device(ids),
            positions=self._to_device(positions),
            kv_slots=self._to_device(slots),
            page_table=self._to_device(table),
            seq_lens=self._to_device(np.asarray(ends, dtype=np.int32)),
            query_start=self._to_device(starts.astype(np.int32)),
            logits_rows=self._to_device(np.asarray(last_rows, dtype=np.int64)),
            max_seq_len=max(ends),
            hidden_mode=self._draft.hidden_mode,
            query_lens_host=tuple(lengths),
            seq_lens_host=tuple(ends),
        )

    def _sampling(self, finals: Sequence[Chunk]) -> SamplingBatch:
        params = [chunk.request.sampling for chunk in finals]
        positions = [chunk.request.num_tokens for chunk in finals]  # the drawn token's index in its sequence
        variant = sampling_variant(params)
        adjust = None
        if variant.adjust is not None:
            rows = np.arange(1, len(finals) + 1)
            for row, chunk in zip(rows.tolist(), finals):
                request = chunk.request
                self._adjustments.write(row, request.sampling, request.keys, request.emitted)
            owners = self._to_device(rows)
            adjust = Adjustments(self._adjustments, owners, variant.adjust, owners.new_empty(len(rows), 0))
        return SamplingBatch(
            temperature=self._to_device(np.asarray([p.temperature for p in params], dtype=np.float32)),
            top_p=self._to_device(np.asarray([p.top_p for p in params], dtype=np.float32)),
            top_k=self._to_device(np.asarray([p.top_k for p in params], dtype=np.int32)),
            min_p=self._to_device(np.asarray([p.min_p for p in params], dtype=np.float32)),
            seed=self._to_device(np.asarray([p.seed for p in params], dtype=np.int64)),
            position=self._to_device(np.asarray(positions, dtype=np.int64)),
            all_greedy=variant.all_greedy,
            any_filter=variant.any_filter,
            num_logprobs=variant.num_logprobs,
            adjust=adjust,
        )

    def _to_device(self, array: np.ndarray[tuple[int, ...], np.dtype[np.generic]]) -> torch.Tensor:
        return upload(array, self._device)
