"""The prefill graph of a draft head: its layers over the prompt's tokens, one graph per token bucket.

The target's hidden states have their own static buffer, [largest bucket, target width], which every replay fills with
what the target has just computed, so no draft reads hidden states of another prompt. Embedding, LM head and proposals
run eagerly on live rows. The graph contains neither embedding nor LM head, so both may be shared with the target.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from common.checkpoint.draft_config import DraftConfig
from common.engine.forward.batch import CaptureHiddenMode, ForwardBatch
from common.engine.forward.draft_inputs import DraftExtendInput, DraftInput
from common.engine.forward.draft_runner import DraftRunner
from common.engine.graphs.admission import BatchFacts
from common.engine.graphs.backends.base import Backend
from common.engine.graphs.graph_runner import GraphRunner
from common.engine.graphs.outputs import OutField, OutputSpec
from common.engine.graphs.slots import Fill, Inputs, Slot
from common.engine.graphs.spec import Axis, CaptureSpec, ShapeKey
from common.engine.models.eagle import DraftOutput
from prefill_node.graphs.prefill_extend import (
    BreakableAttention,
    extend_spec,
    idle_extend,
    prompt_facts,
    require_breaks,
)

OUTPUTS = OutputSpec(DraftOutput, {"last": OutField(Axis.TOKEN), "hidden": OutField(Axis.TOKEN)})


@dataclass(frozen=True, slots=True)
class DraftPrefillCall:
    """New tokens; each is one position ahead of the hidden state with which it is paired."""

    batch: ForwardBatch
    target_hidden: Tensor  # [T, target width]
    input_embeds: Tensor | None = None  # [T, H] instead of the embedding of batch.input_ids


def draft_prefill_spec(token_buckets: Sequence[int], model: str = "draft") -> CaptureSpec:
    """Return a spec that captures LAST hidden states: only the state after a prompt's last token is kept."""
    return extend_spec(token_buckets, CaptureHiddenMode.LAST, model=model)


class DraftBody:
    """A graph `Program`: projection and layers of one head over [T] tokens. Widths come from the draft's config."""

    def __init__(self, runner: DraftRunner, config: DraftConfig, page_size: int) -> None:
        self._head = runner.head
        self._config = config
        self._page_size = page_size
        self._attention = BreakableAttention(runner.attention)

    def slots(self) -> list[Slot[DraftPrefillCall]]:
        extend, placement = DraftExtendInput, self._head.placement
        width, dtype = extend.hidden_size_for(self._config), extend.dtype_for(placement)
        axes = self._config.model.rope.axes
        in_page_0 = Fill(self._page_size - 1)  # another slot of the padding page, where writes are harmless
        return [
            Slot("embeds", Axis.TOKEN, (self._config.model.hidden_size,), dtype, self._embeds),
            Slot("hidden", Axis.TOKEN, (width,), dtype, lambda call: call.target_hidden),
            Slot("positions", Axis.TOKEN, axes, torch.int64, lambda call: call.batch.positions),
            Slot("kv_slots", Axis.TOKEN, (), torch.int64, lambda call: call.batch.kv_slots, poison=in_page_0),
        ]

    def facts(self, call: DraftPrefillCall) -> BatchFacts:
        return prompt_facts(call.batch, CaptureHiddenMode.LAST, call.input_embeds)

    def idle(self, shape: ShapeKey) -> DraftPrefillCall:
        """Return one padding request. Its hidden states are zeros, never None."""
        placement, width = self._head.placement, DraftExtendInput.hidden_size_for(self._config)
        dtype = DraftExtendInput.dtype_for(placement)
        hidden = torch.zeros(shape.tokens, width, dtype=dtype, device=placement.device)
        axes = self._config.model.rope.axes
        return DraftPrefillCall(idle_extend(shape.tokens, self._page_size, placement.device, axes), hidden)

    def plan(self, call: DraftPrefillCall, inputs: Inputs) -> None:
        self._attention.plan(replace(call.batch, positions=inputs["positions"], kv_slots=inputs["kv_slots"]))

    def run(self, inputs: Inputs, variant: str) -> DraftOutput:
        hidden = self._head.project(inputs["hidden"])
        return self._head.body(inputs["embeds"], hidden, inputs["positions"], self._attention)

    def _embeds(self, call: DraftPrefillCall) -> Tensor:
        return self._head.embed(call.batch.input_ids) if call.input_embeds is None else call.input_embeds


class DraftPrefill:
    """The same forward as `DraftRunner.extend`, using graphs where they fit."""

    def __init__(
        self,
        runner: DraftRunner,
        config: DraftConfig,
        page_size: int,
        spec: CaptureSpec,
        backend: Backend,
        poisoned: bool = False,
    ) -> None:
        require_breaks(backend)
        body = DraftBody(runner, config, page_size)
        self.graphs = GraphRunner(spec, backend, body, OUTPUTS, runner.head.placement.device, poisoned)
        self._runner = runner

    @torch.inference_mode()
    def __call__(
        self, batch: ForwardBatch, target_hidden: Tensor, input_embeds: Tensor | None = None
    ) -> DraftInput:
        """Return proposals for `batch.logits_rows`. Raises SlotError if `target_hidden` has another width."""
        return self.propose(batch.logits_rows, self.forward(batch, target_hidden, input_embeds))

    @torch.inference_mode()
    def forward(
        self, batch: ForwardBatch, target_hidden: Tensor, input_embeds: Tensor | None = None
    ) -> DraftOutput:
        """Run all rows. The result is a view of static memory: read it on the same stream before the next call."""
        return self.graphs(DraftPrefillCall(batch, target_hidden, input_embeds))

    def propose(self, rows: Tensor, output: DraftOutput) -> DraftInput:
        """Propose drafts after the tokens in `rows` [R] of a forward."""
        return self._runner.propose(rows, output)
