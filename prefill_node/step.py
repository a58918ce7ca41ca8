"""Runs one forward over chunks of several prompts, then draws the first token of each prompt that is complete."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from common.engine.forward.batch import CaptureHiddenMode, ForwardBatch, ForwardOutput
from common.engine.forward.draft_inputs import DraftInput
from common.engine.forward.rotary_places import RotaryPlaces
from common.engine.graphs.outputs import map_tensors
from common.engine.host_copies import on_host, send
from common.engine.sampling.logit_adjustments import AdjustmentRows
from common.engine.sampling.logit_masks import LogitMasks
from common.engine.sampling.sampler import SampleOutput, read_tokens, sample_rows
from common.engine.sampling.sampling_plan import SamplingVariant
from common.engine.state.draft_row import NO_DRAFT
from common.engine.state.relay_state import draft_rows
from common.kv_cache.host_plan import NOTHING_LOADED, Comparison
from common.node.overlap import Completion
from common.node.stopwatch import Stopwatch, stopwatch_for
from prefill_node.draft import PrefillDraft
from prefill_node.host_batch import HostBatch, HostDraws
from prefill_node.prompt_scores import PromptScorer, Scores
from prefill_node.step_plan import FirstDraw, PlannedChunk, PromptPlan
from prefill_node.step_result import Drawn, PromptResult
from prefill_node.vision import PromptEmbeds


@dataclass(frozen=True, slots=True)
class LaunchedPrefill:
    """A launched forward. Once it is complete, its results are on the host, one row per draw."""

    draws: Sequence[FirstDraw]
    sampled: SampleOutput | None  # None without draws
    draft: DraftInput | None  # None without draws, and without a draft model
    completion: Completion
    watch: Stopwatch
    scores: Sequence[Scores | None] = ()  # per chunk; empty if no chunk is scored
    # per chunk [n, H] float32, the hidden states of its last n positions; empty if no chunk sends any
    states: Sequence[torch.Tensor | None] = ()
    comparison: Comparison = NOTHING_LOADED

    def read(self) -> PromptResult:
        scores = [() if each is None else each.read() for each in self.scores]
        states = [None if each is None else each.numpy() for each in self.states]
        damage, ms = self.comparison.read(), 1e3 * self.watch.seconds()[0]
        return PromptResult(self._drawn(), scores, states, damage, ms)

    def _drawn(self) -> list[Drawn]:
        if self.sampled is None:
            return []
        wanted = [draw.sampling for draw in self.draws]
        tokens = read_tokens(
            self.sampled, [each.logprobs for each in wanted], [len(each.logprob_ids) for each in wanted]
        )
        if self.draft is None:
            return [Drawn(token, NO_DRAFT) for token in tokens]
        rows = draft_rows(self.draft)
        return [Drawn(token, row) for token, row in zip(tokens, rows, strict=True)]


class PrefillStep:
    """Turns the chunks of a plan into a ForwardBatch and runs it."""

    def __init__(
        self,
        forward: Callable[[ForwardBatch, torch.Tensor | None], ForwardOutput],
        embeds: PromptEmbeds,
        draft: PrefillDraft,
        adjustments: AdjustmentRows,
        rotary: RotaryPlaces,
        page_size: int,
        completion: Callable[[], Completion],
        scorer: PromptScorer | None = None,
    ) -> None:
        """Run on the device of `adjustments`.

        Args:
            adjustments: has a row for every prompt of a batch and keeps nothing between batches.
            scorer: for plans that have chunks to score.
        """
        self._forward = forward
        self._embeds = embeds
        self._draft = draft
        self._adjustments = adjustments
        self._rotary = rotary
        self._page_size = page_size
        self._device = device = adjustments.free_at.device
        self._completion = completion
        self._start_watch = stopwatch_for(device)
        self._scorer = scorer

    def forget(self, keys: Sequence[int]) -> None:
        """Drop what is kept for prompts that end before their last chunk."""
        if keys:
            self._embeds.forget(keys)
            self._draft.forget(keys)

    def launch(
        self, plan: PromptPlan, load: Callable[[], Comparison] = lambda: NOTHING_LOADED
    ) -> LaunchedPrefill:
        """Launch the forward over the plan's chunks, without waiting for the device.

        `load` starts copies from host memory that the forward reads.
        """
        chunks = plan.chunks
        draws = [chunk.draw for chunk in chunks if chunk.draw is not None]
        host = HostBatch.of(chunks, self._page_size, self._rotary)
        watch = self._start_watch()
        sent = send(host.arrays, self._device)
        # Not before the inputs: the device copies in order, so the forward would begin after all pages.
        comparison = load()
        returned = any(chunk.states for chunk in chunks)
        mode = CaptureHiddenMode.FULL if returned else self._draft.hidden_mode
        batch = host.on_device(sent, mode)
        embeds = self._embeds(chunks, batch)
        output = self._forward(batch, None if embeds is None else embeds.rows)
        scores = self._scores(plan, output)
        states = _states(chunks, output) if returned else ()
        sampled = None
        if plan.sampling is not None:
            sampled = self._sample(
                draws, [chunk.end for chunk in chunks if chunk.final], output, plan.sampling
            )
        draft = self._draft.extend(chunks, batch, output, sampled, embeds)
        copied = None if sampled is None else sampled.on_host()
        state = None if draft is None else map_tensors(draft, on_host)
        watch.lap()
        comparison.follow()
        return LaunchedPrefill(draws, copied, state, self._completion(), watch, scores, states, comparison)

    def _scores(self, plan: PromptPlan, output: ForwardOutput) -> Sequence[Scores | None]:
        if all(chunk.scored is None for chunk in plan.chunks):
            return ()
        assert self._scorer is not None
        assert output.last is not None
        return self._scorer.score(plan.chunks, output.last)

    def _sample(
        self,
        draws: Sequence[FirstDraw],
        lengths: Sequence[int],
        output: ForwardOutput,
        variant: SamplingVariant,
    ) -> SampleOutput:
        """`lengths`: tokens of each prompt. What only the draw needs is sent while the device runs the forward."""
        if variant.adjust is not None:
            for row, draw in enumerate(draws, start=1):
                self._adjustments.write(row, draw.sampling, draw.tokens(), draw.outputs)
        sent = send(HostDraws.of(draws, lengths).arrays, self._device)
        batch = HostDraws.on_device(sent, variant, self._adjustments)
        if variant.masked:
            batch.masks = _masks(draws, self._device)
        return sample_rows(output.rows, batch)


def _states(chunks: Sequence[PlannedChunk], output: ForwardOutput) -> list[torch.Tensor | None]:
    """Copy the hidden states that the router gets: the next forward overwrites their memory."""
    assert output.last is not None
    found: list[torch.Tensor | None] = []
    end = 0
    for chunk in chunks:
        end += chunk.length
        rows = output.last[end - chunk.states : end]
        found.append(on_host(rows.to(torch.float32, copy=True)) if chunk.states else None)
    return found


def _masks(draws: Sequence[FirstDraw], device: torch.device) -> LogitMasks:
    rows = [row for row, draw in enumerate(draws) if draw.mask]
    words = np.stack([np.frombuffer(draws[row].mask, dtype=np.int32) for row in rows])
    return LogitMasks.on_device(words, rows, len(draws), device)
