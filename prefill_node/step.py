"""One forward over chunks of several prompts: target extend, then the first token of each prompt that is complete."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from common.engine.forward.batch import ForwardBatch, ForwardOutput
from common.engine.forward.draft_inputs import EagleDraftInput
from common.engine.forward.rotary_places import RotaryPlaces
from common.engine.graphs.outputs import map_tensors
from common.engine.host_copies import on_host, send
from common.engine.sampling.logit_adjustments import AdjustmentRows
from common.engine.sampling.sampler import SampleOutput, sample
from common.engine.sampling.sampling_plan import sampling_variant
from common.node.overlap import Completion
from prefill_node.draft import PrefillDraft
from prefill_node.host_batch import HostBatch, HostDraws
from prefill_node.scheduler import Chunk
from prefill_node.vision import PromptEmbeds


@dataclass(frozen=True, slots=True)
class LaunchedPrefill:
    """`sampled` has one row per chunk of `finals`, in that order; None without finals. To be read when complete."""

    chunks: Sequence[Chunk]
    finals: Sequence[Chunk]
    sampled: SampleOutput | None
    draft: EagleDraftInput | None  # as `sampled`, on the host too; None without a draft model
    completion: Completion


class PrefillStep:
    """Turns chunks into a ForwardBatch. Holds no request state."""

    def __init__(
        self,
        forward: Callable[[ForwardBatch, torch.Tensor | None], ForwardOutput],
        embeds: PromptEmbeds,
        draft: PrefillDraft,
        adjustments: AdjustmentRows,
        rotary: RotaryPlaces,
        page_size: int,
        device: torch.device,
        completion: Callable[[], Completion],
    ) -> None:
        """`adjustments` has a row for every prompt of a batch; they hold nothing from one batch to the next."""
        self._forward = forward
        self._embeds = embeds
        self._draft = draft
        self._adjustments = adjustments
        self._rotary = rotary
        self._page_size = page_size
        self._device = device
        self._completion = completion

    @property
    def rewrites(self) -> int:
        """How many computed rows before a chunk its forward may write again: see `PrefillDraft`."""
        return self._draft.rewrites

    def launch(self, chunks: Sequence[Chunk]) -> LaunchedPrefill:
        """Start the forward; nothing here waits for the device."""
        finals = [chunk for chunk in chunks if chunk.final]
        host, draws = HostBatch.of(chunks, self._page_size, self._rotary), HostDraws.of(finals)
        sent = send((*host.arrays, *draws.arrays), self._device)
        batch = host.on_device(sent[: len(host.arrays)], self._draft.hidden_mode)
        embeds = self._embeds(chunks, batch)
        output = self._forward(batch, None if embeds is None else embeds.rows)
        sampled = self._draw(finals, output, sent[len(host.arrays) :]) if finals else None
        draft = self._draft.extend(chunks, batch, output, sampled, embeds)
        drawn = None if sampled is None else sampled.on_host()
        state = None if draft is None else map_tensors(draft, on_host)
        return LaunchedPrefill(chunks, finals, drawn, state, self._completion())

    def _draw(
        self, finals: Sequence[Chunk], output: ForwardOutput, sent: Sequence[torch.Tensor]
    ) -> SampleOutput:
        variant = sampling_variant([chunk.request.sampling for chunk in finals])
        if variant.adjust is not None:
            for row, chunk in enumerate(finals, start=1):
                request = chunk.request
                self._adjustments.write(row, request.sampling, request.keys, request.emitted)
        return sample(output.logits, HostDraws.on_device(sent, variant, self._adjustments))
