"""The prefill graph of a target model: its layers, per token bucket. Embedding, LM head and sampling are eager.

Attention is a break point: there the live batch's page table and lengths are read, so one bucket serves any mix of
requests, cached prefixes and chunks. Small buckets, and on some GPUs all of them (`unbroken_tokens` in
`prompt_graphs.py`), have no breaks and read both from static tensors. Embeddings are always computed into their slot,
from ids or from given rows (images), so text and images replay the same graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from common.engine.forward.batch import (
    SAVES,
    BatchState,
    CaptureHiddenMode,
    ForwardBatch,
    ForwardMode,
    ForwardOutput,
)
from common.engine.forward.model_runner import ModelRunner
from common.engine.graphs.admission import BatchFacts
from common.engine.graphs.backends.base import Backend
from common.engine.graphs.graph_runner import GraphRunner
from common.engine.graphs.outputs import OutField, OutputSpec
from common.engine.graphs.slots import Fill, Inputs, Slot
from common.engine.graphs.spec import Axis, CaptureSpec, Feature, ShapeKey, token_shapes
from common.engine.models.causal_lm import BodyOutput
from prefill_node.around_attention import AroundAttention
from prefill_node.graphs.backends.body_point import run_body
from prefill_node.graphs.backends.break_point import break_point, next_segment
from prefill_node.graphs.static_extend import BROKEN, StaticExtend
from prefill_node.signalled_attention import SignalledAttention

MAX_PADDING = 2.0  # with more padding than this, an eager run is cheaper
# A forward that has this many tokens of its prefixes copied from host memory, for each token of the smallest graph with
# breaks, runs in that graph, where each layer waits for its own copies only. For an 8B model on an H200, 9,216 tokens
# take 23 ms to copy, and its 576 tokens 9 ms longer than 128 in a graph without breaks, which would wait for all.
LOADED_PER_TOKEN = 16
# The first segment of a graph without breaks has one in this many of its layers. Launching all 260 kernels of an 8B
# model takes the host 0.1 to 0.2 ms, and the device begins none of them before that.
LAYERS_PER_FIRST = 8
OUTPUTS = OutputSpec(BodyOutput, {"last": OutField(Axis.TOKEN), "aux": OutField(Axis.TOKEN)})


class BreakableAttention(AroundAttention):
    """An attention backend of whose calls `forward` and `mix` are break points."""

    @break_point
    def forward(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return super().forward(layer, query, key, value)

    @break_point
    def mix(
        self,
        layer: int,
        operation: str,
        projected: Tensor,
        width: int,
        weights: Sequence[Tensor] = (),
        eps: float = 0.0,
    ) -> Tensor:
        return super().mix(layer, operation, projected, width, weights, eps)


@dataclass(frozen=True, slots=True)
class ExtendCall:
    """One forward over new tokens."""

    batch: ForwardBatch
    input_embeds: Tensor | None = None  # [T, H] instead of the embedding of batch.input_ids


def extend_spec(
    token_buckets: Sequence[int],
    hidden: CaptureHiddenMode,
    model: str = "target",
    unbroken: ShapeKey = BROKEN,
) -> CaptureSpec:
    """Describe the captured shapes. Given embeddings are always supported, because they are computed eagerly.

    `unbroken`: graphs with at most `unbroken.tokens` tokens have no breaks and hold at most `unbroken.requests`
    requests.
    """
    return CaptureSpec(
        model=model,
        phase="prefill",
        mode=ForwardMode.EXTEND,
        shapes=token_shapes(tuple(token_buckets), unbroken),
        hidden=hidden,
        features=frozenset((Feature.INPUT_EMBEDS,)),
        max_padding=MAX_PADDING,
    )


def idle_extend(
    tokens: int, page_size: int, device: torch.device, axes: tuple[int, ...] = (), state: bool = False
) -> ForwardBatch:
    """Return a padding batch: one request whose tokens are all in page 0.

    Args:
        axes: of the model's RopeConfig.
        state: the model keeps a state per request; here it is in slot 0.
    """
    zeros = torch.zeros(tokens, dtype=torch.int64, device=device)
    return ForwardBatch(
        mode=ForwardMode.EXTEND,
        input_ids=zeros,
        positions=zeros.new_zeros(tokens, *axes),
        kv_slots=zeros,
        page_table=torch.zeros(1, -(-tokens // page_size), dtype=torch.int32, device=device),
        seq_lens=torch.tensor([tokens], dtype=torch.int32, device=device),
        query_start=torch.tensor([0, tokens], dtype=torch.int32, device=device),
        logits_rows=zeros[:0],
        max_seq_len=tokens,
        query_lens_host=(tokens,),
        seq_lens_host=(tokens,),
        state=BatchState(zeros[:1], zeros.new_zeros(1, SAVES, 2)) if state else None,
    )


def prompt_facts(
    batch: ForwardBatch, hidden: CaptureHiddenMode, input_embeds: Tensor | None, least: int = 0
) -> BatchFacts:
    """Return what decides whether a captured graph serves a prompt batch whose output is read at mode `hidden`.

    `least`: tokens of the smallest graph that may serve it.
    """
    return BatchFacts(
        mode=batch.mode,
        live=ShapeKey(batch.input_ids.shape[0], batch.page_table.shape[0]),
        hidden=hidden,
        features=frozenset() if input_embeds is None else frozenset((Feature.INPUT_EMBEDS,)),
        least=least,
    )


def require_breaks(backend: Backend) -> None:
    """Raise ValueError for a backend without break points, which cannot capture prompts."""
    if not backend.breaks:
        raise ValueError(
            f"backend {backend.name!r} has no break points: attention would replay the captured lengths; prefill needs "
            "a breakable one"
        )


class ExtendBody:
    """A graph `Program`: the layers of one model over [T] tokens."""

    def __init__(self, runner: ModelRunner, static: StaticExtend, shapes: Sequence[ShapeKey]) -> None:
        """`shapes`: those that are captured, in ascending order."""
        self._runner = runner
        self._broken = BreakableAttention(runner.attention)
        self._unbroken = SignalledAttention(runner.attention)
        # the layer in which the second segment of a graph without breaks begins
        self._second = runner.model.config.num_layers // LAYERS_PER_FIRST
        self.static = static
        # tokens of the smallest graph with breaks; 0: there is none
        self._least_broken = next((each.tokens for each in shapes if not static.serves(each.tokens)), 0)

    def slots(self) -> list[Slot[ExtendCall]]:
        placement, config = self._runner.model.placement, self._runner.model.config
        # another slot of the padding page, where writes are harmless
        in_page_0 = Fill(self._runner.pool.page_size - 1)
        return [
            Slot("embeds", Axis.TOKEN, (config.hidden_size,), placement.dtype, self._embeds),
            Slot("positions", Axis.TOKEN, config.rope.axes, torch.int64, lambda call: call.batch.positions),
            Slot("kv_slots", Axis.TOKEN, (), torch.int64, lambda call: call.batch.kv_slots, poison=in_page_0),
        ]

    def facts(self, call: ExtendCall) -> BatchFacts:
        batch, broken = call.batch, self._least_broken
        least = broken if batch.loaded_tokens >= LOADED_PER_TOKEN * broken else 0
        return prompt_facts(batch, batch.hidden_mode, call.input_embeds, least)

    def idle(self, shape: ShapeKey) -> ExtendCall:
        """Return one request of `shape.tokens` tokens, all in page 0."""
        model, page_size = self._runner.model, self._runner.pool.page_size
        axes = model.config.rope.axes
        return ExtendCall(
            idle_extend(
                shape.tokens, page_size, model.placement.device, axes, self._runner.pool.state_bytes > 0
            )
        )

    def plan(self, call: ExtendCall, inputs: Inputs) -> None:
        """Plan attention over the live requests. Keys and values of all rows, padding included, go to `kv_slots`."""
        positions, kv_slots = inputs["positions"], inputs["kv_slots"]
        batch = self.static.load(call.batch) if self.static.serves(len(positions)) else call.batch
        self._runner.attention.plan(replace(batch, positions=positions, kv_slots=kv_slots))

    def run(self, inputs: Inputs, variant: str) -> BodyOutput:
        positions = inputs["positions"]
        if not self.static.serves(len(positions)):
            return run_body(self._runner.model, inputs["embeds"], positions, self._broken)
        with self._unbroken.heard_by(self._divide):
            return run_body(self._runner.model, inputs["embeds"], positions, self._unbroken)

    def _divide(self, layer: int) -> None:
        if layer == self._second:
            next_segment()

    def _embeds(self, call: ExtendCall) -> Tensor:
        if call.input_embeds is not None:
            return call.input_embeds
        return self._runner.model.embed(call.batch.input_ids)


class PrefillExtend:
    """The same forward as a ModelRunner, using graphs where they fit.

    `ForwardOutput.hidden` at mode FULL is a view of static memory: consume it on the same stream before the next call,
    or clone it.
    """

    def __init__(
        self,
        runner: ModelRunner,
        spec: CaptureSpec,
        backend: Backend,
        poisoned: bool = False,
        unbroken: ShapeKey = BROKEN,
    ) -> None:
        """`unbroken`: see `extend_spec`."""
        require_breaks(backend)
        device = runner.model.placement.device
        longest = max(runner.model.config.max_position_embeddings, unbroken.tokens)
        max_pages = -(-longest // runner.pool.page_size)
        body = ExtendBody(runner, StaticExtend(unbroken, max_pages, device, poisoned), spec.shapes)
        self.graphs = GraphRunner(spec, backend, body, OUTPUTS, device, poisoned)
        self._runner = runner

    @torch.inference_mode()
    def __call__(self, batch: ForwardBatch, input_embeds: Tensor | None = None) -> ForwardOutput:
        return self._runner.finish(batch, self.graphs(ExtendCall(batch, input_embeds)))
