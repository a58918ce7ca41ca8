"""The decode graph: one launch per step, from relay rows to relay rows.

    gather   last token, length, pages and sampling parameters of the rows, on the device
    forward  embedding, layers, LM head
    draw     one token per row
    scatter  token and length back to the relay rows

The only input is the rows. What the host knows of a batch chooses the variant, each a graph of its own:

    greedy    argmax
    random    temperature, Gumbel draw; serves greedy rows too
    filtered  the same with min-p, top-k and top-p, exact where they are off; serves everything but the next
    logits    ends with the logits; drawing, logprobs and scatter follow eagerly. For batches that want logprobs (their
              number is a shape) or adjust logits (common.engine.logit_adjustments: state of shapes that the host
              chooses), and wherever a dearer variant was not captured
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from common.engine.cuda_graph.admission import BatchFacts
from common.engine.cuda_graph.backends.base import Backend
from common.engine.cuda_graph.graph_runner import GraphRunner
from common.engine.cuda_graph.outputs import OutField, OutputSpec
from common.engine.cuda_graph.slots import ROW0, Inputs, Slot, StaticInputs
from common.engine.cuda_graph.spec import Axis, CaptureSpec, ShapeKey, request_shapes
from common.engine.forward.batch import CaptureHiddenMode, ForwardBatch, ForwardMode
from common.engine.kv_cache.relay_state import RelayState
from common.engine.kv_cache.request_table import RequestTable
from common.engine.model_runner import ModelRunner
from common.engine.relay_sampling import sampling_batch
from common.engine.sampler import SampleOutput, sample
from common.engine.sampling_plan import SamplingVariant

GREEDY, RANDOM, FILTERED, LOGITS = "greedy", "random", "filtered", "logits"
VARIANTS = (GREEDY, RANDOM, FILTERED, LOGITS)


@dataclass(frozen=True, slots=True)
class DecodeCall:
    """One step of the requests in `rows`."""

    rows: Tensor  # [R] int64 on the device, rows of relay state and request table
    sampling: SamplingVariant


@dataclass(frozen=True, slots=True)
class DecodeResult:
    """Either tokens, or logits that are still to be drawn from."""

    token_ids: Tensor | None = None  # [R] int64
    invalid: Tensor | None = None  # [R] bool, as in SampleOutput
    logits: Tensor | None = None  # [R, V] float32


# The host reads tokens one step behind, when the next replay is under way: they are kept.
OUTPUTS = OutputSpec(
    DecodeResult,
    {
        "token_ids": OutField(Axis.REQUEST, kept=True),
        "invalid": OutField(Axis.REQUEST, kept=True),
        "logits": OutField(Axis.REQUEST),
    },
)


def decode_spec(request_buckets: Sequence[int], variants: Sequence[str] = VARIANTS) -> CaptureSpec:
    """Plain decoding of a target model."""
    return CaptureSpec(
        model="target",
        phase="decode",
        mode=ForwardMode.DECODE,
        shapes=request_shapes(tuple(request_buckets)),
        variants=tuple(variants),
        tokens_per_request=1,
    )


def serving_variants(sampling: SamplingVariant) -> tuple[str, ...]:
    """The variants that serve a batch, the cheapest first."""
    if sampling.num_logprobs is not None or sampling.adjust is not None:
        return (LOGITS,)
    return VARIANTS[0 if sampling.all_greedy else 2 if sampling.any_filter else 1 :]


class DecodeProgram:
    """A `Program`: one decode step over device state. `max_seq_len` bounds every request's length on this node."""

    def __init__(
        self, runner: ModelRunner, relay: RelayState, table: RequestTable, max_rows: int, max_seq_len: int
    ) -> None:
        self._runner = runner
        self._relay = relay
        self._pages = table.pages
        self._page_size = runner.pool.page_size
        device, width = relay.seq_len.device, table.pages.shape[1]
        steps = torch.arange(max_rows + 1, device=device)
        self._static = ForwardBatch(
            mode=ForwardMode.DECODE,
            input_ids=torch.zeros(max_rows, dtype=torch.int64, device=device),
            positions=torch.zeros(max_rows, dtype=torch.int64, device=device),
            kv_slots=torch.zeros(max_rows, dtype=torch.int64, device=device),
            page_table=torch.zeros(max_rows, width, dtype=torch.int32, device=device),
            seq_lens=torch.zeros(max_rows, dtype=torch.int32, device=device),
            query_start=steps.to(torch.int32),
            logits_rows=steps[:max_rows],
            max_seq_len=max_seq_len,
        )
        # of one token each, where its KV goes; the rotary positions too, unless they have gaps (rotary_places.py)
        self._places = self._static.positions
        self._turned = bool(runner.model.config.rope.axes)
        if self._turned:
            self._places = torch.zeros_like(self._static.positions)

    def slots(self) -> list[Slot[DecodeCall]]:
        return [Slot("rows", Axis.REQUEST, (), torch.int64, lambda call: call.rows, ROW0, poison="keep")]

    def facts(self, call: DecodeCall) -> BatchFacts:
        count = call.rows.shape[0]
        return BatchFacts(
            ForwardMode.DECODE, ShapeKey(count, count), variants=serving_variants(call.sampling)
        )

    def idle(self, shape: ShapeKey) -> DecodeCall:
        rows = torch.zeros(shape.requests, dtype=torch.int64, device=self._relay.seq_len.device)
        return DecodeCall(rows, SamplingVariant(all_greedy=True, any_filter=False, num_logprobs=None))

    def plan(self, call: DecodeCall, inputs: Inputs) -> None:
        """Attention reads static tensors that `run` fills: no host data."""
        self._runner.attention.plan(self._view(inputs["rows"].shape[0]))

    def run(self, inputs: Inputs, variant: str) -> DecodeResult:
        rows = inputs["rows"]
        batch = self._gather(rows)
        body = self._runner.body(self._runner.model.embed(batch.input_ids), batch.positions)
        logits = self._runner.finish(batch, body).logits
        if variant == LOGITS:
            return DecodeResult(logits=logits)
        facts = SamplingVariant(variant == GREEDY, variant == FILTERED, None)
        sampled = self.draw(rows, logits, facts)
        return DecodeResult(sampled.token_ids, sampled.invalid)

    def draw(self, rows: Tensor, logits: Tensor, sampling: SamplingVariant) -> SampleOutput:
        """Draw from logits [R, V] and write tokens and lengths to the relay rows; row 0 stays zero."""
        relay = self._relay
        seq_lens = relay.seq_len.index_select(0, rows) + 1  # with the token whose KV this step wrote
        sampled = sample(logits, sampling_batch(relay, rows, seq_lens.to(torch.int64), sampling))
        if sampling.adjust is not None and sampling.adjust.penalties:
            relay.adjustments.count(rows, sampled.token_ids[:, None])
        live = rows > 0
        relay.last_token.index_copy_(0, rows, torch.where(live, sampled.token_ids, 0))
        relay.seq_len.index_copy_(0, rows, torch.where(live, seq_lens, 0))
        return sampled

    def _gather(self, rows: Tensor) -> ForwardBatch:
        """Fill the static batch of R rows from the relay: a padding row is a request of one token in page 0."""
        batch, relay = self._view(rows.shape[0]), self._relay
        torch.index_select(relay.last_token, 0, rows, out=batch.input_ids)
        torch.index_select(relay.seq_len, 0, rows, out=batch.seq_lens)
        torch.index_select(self._pages, 0, rows, out=batch.page_table)
        places = self._places[: rows.shape[0]]
        places.copy_(batch.seq_lens)
        batch.seq_lens.add_(1)
        entry = torch.div(places, self._page_size, rounding_mode="floor")
        page = batch.page_table.gather(1, entry[:, None])[:, 0].to(torch.int64)
        torch.add(places % self._page_size, page, alpha=self._page_size, out=batch.kv_slots)
        if self._turned:
            torch.add(places, relay.rope_delta.index_select(0, rows), out=batch.positions)
        return batch

    def _view(self, count: int) -> ForwardBatch:
        static = self._static
        return ForwardBatch(
            mode=static.mode,
            input_ids=static.input_ids[:count],
            positions=static.positions[:count],
            kv_slots=static.kv_slots[:count],
            page_table=static.page_table[:count],
            seq_lens=static.seq_lens[:count],
            query_start=static.query_start[: count + 1],
            logits_rows=static.logits_rows[:count],
            max_seq_len=static.max_seq_len,
            hidden_mode=CaptureHiddenMode.NULL,
        )


class DecodeGraphs:
    """A decode step over device state: call it with rows, read the tokens after the completion."""

    def __init__(
        self,
        runner: ModelRunner,
        relay: RelayState,
        table: RequestTable,
        spec: CaptureSpec,
        backend: Backend,
        max_seq_len: int,
    ) -> None:
        device = relay.seq_len.device
        largest = spec.largest if spec.shapes else ShapeKey(0, 0)
        max_rows = max(len(relay.seq_len), largest.requests)
        self._program = DecodeProgram(runner, relay, table, max_rows, max_seq_len)
        inputs = StaticInputs(self._program.slots(), largest, device)
        self.graphs = GraphRunner(spec, backend, self._program, inputs, OUTPUTS)

    @torch.inference_mode()
    def __call__(self, rows: Tensor, sampling: SamplingVariant) -> SampleOutput:
        """One step of the requests in rows [R] int64, on the device; `RequestTable.flush` comes before."""
        result = self.graphs(DecodeCall(rows, sampling))
        if result.logits is not None:
            return self._program.draw(rows, result.logits, sampling)
        assert result.token_ids is not None
        assert result.invalid is not None
        return SampleOutput(result.token_ids, result.invalid)
