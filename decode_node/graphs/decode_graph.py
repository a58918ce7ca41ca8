"""The decode graph: one launch per step, which reads and updates relay rows.

    gather   last token, length, pages and sampling parameters of the rows, on the device
    forward  embedding, layers, LM head
    draw     one token per row
    scatter  token and length back to the relay rows

Its only input is the row indices. The host knows the sampling parameters of a batch and chooses one of these variants,
each a graph of its own:

    greedy    argmax
    random    temperature and Gumbel sampling; also serves greedy rows
    filtered  random plus min-p, top-k and top-p, exact where these are off; serves everything except `logits` batches
    logits    ends with the logits; sampling, logprobs and scatter run eagerly. For batches with logprobs (their number
              is a shape) or adjusted logits (common/engine/sampling/logit_adjustments.py: the host chooses the shapes
              of their state) or with grammars (the host computes their masks while the forward runs), and wherever a
              more expensive variant was not captured
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from common.engine.forward.batch import CaptureHiddenMode, ForwardBatch, ForwardMode
from common.engine.forward.model_runner import ModelRunner
from common.engine.graphs.admission import BatchFacts
from common.engine.graphs.backends.base import Backend
from common.engine.graphs.graph_runner import GraphRunner
from common.engine.graphs.outputs import OutField, OutputSpec
from common.engine.graphs.slots import ROW0, Inputs, Slot
from common.engine.graphs.spec import Axis, CaptureSpec, ShapeKey, request_shapes
from common.engine.layers.logit_rows import LogitRows
from common.engine.ops.step_rows import advance_rows, step_rows
from common.engine.sampling.logit_masks import LogitMasks
from common.engine.sampling.sampler import SampleOutput, sample_rows
from common.engine.sampling.sampling_plan import SamplingVariant
from common.engine.state.relay_state import RelayState
from decode_node.page_table import PageTable
from decode_node.relay_sampling import sampling_batch

GREEDY, RANDOM, FILTERED, LOGITS = "greedy", "random", "filtered", "logits"
VARIANTS = (GREEDY, RANDOM, FILTERED, LOGITS)


@dataclass(frozen=True, slots=True)
class DecodeCall:
    """One step of the requests in `rows`."""

    rows: Tensor  # [R] int64 on the device, rows of the relay state and the page table
    sampling: SamplingVariant


@dataclass(frozen=True, slots=True)
class DecodeResult:
    """Sampled tokens, or logits that remain to be sampled."""

    token_ids: Tensor | None = None  # [R] int64
    invalid: Tensor | None = None  # [R] bool, as in SampleOutput
    logits: Tensor | None = None  # [R, V] float32
    hidden: Tensor | None = None  # [R, H] the hidden states that the LM head read, if the node returns them


# The host reads the tokens one step later, while the next replay runs, so these outputs are kept.
OUTPUTS = OutputSpec(
    DecodeResult,
    {
        "token_ids": OutField(Axis.REQUEST, kept=True),
        "invalid": OutField(Axis.REQUEST, kept=True),
        "logits": OutField(Axis.REQUEST),
        "hidden": OutField(Axis.REQUEST),
    },
)


def decode_spec(
    request_buckets: Sequence[int], variants: Sequence[str] = VARIANTS, hidden_states: bool = False
) -> CaptureSpec:
    """Return the captured shapes and variants of plain decoding. `hidden_states`: the graphs return them."""
    return CaptureSpec(
        model="target",
        phase="decode",
        mode=ForwardMode.DECODE,
        shapes=request_shapes(tuple(request_buckets)),
        hidden=CaptureHiddenMode.FULL if hidden_states else CaptureHiddenMode.NULL,
        variants=tuple(variants),
        tokens_per_request=1,
    )


def serving_variants(sampling: SamplingVariant) -> tuple[str, ...]:
    """Return the variants that can serve a batch, cheapest first."""
    if sampling.num_logprobs is not None or sampling.adjust is not None or sampling.masked:
        return (LOGITS,)
    return VARIANTS[0 if sampling.all_greedy else 2 if sampling.any_filter else 1 :]


class DecodeProgram:
    """One decode step over device state. `max_seq_len` bounds the length of every request on this node."""

    def __init__(
        self,
        runner: ModelRunner,
        relay: RelayState,
        table: PageTable,
        max_rows: int,
        max_seq_len: int,
        hidden_states: bool = False,
    ) -> None:
        """`hidden_states`: a step returns the states that its tokens are drawn from."""
        self._runner = runner
        self._relay = relay
        self._pages = table.pages
        self._max_seq_len = max_seq_len
        self._hidden_states = hidden_states
        self._steps = torch.arange(max_rows + 1, device=relay.seq_len.device)
        self._steps32 = self._steps.to(torch.int32)

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
        """No-op: `run` gathers everything that attention reads, so no host data is needed."""

    def run(self, inputs: Inputs, variant: str) -> DecodeResult:
        rows = inputs["rows"]
        batch = self._gather(rows)
        output = self._runner(batch)
        hidden = output.last if self._hidden_states else None
        if variant == LOGITS:
            return DecodeResult(logits=output.logits, hidden=hidden)
        facts = SamplingVariant(variant == GREEDY, variant == FILTERED, None)
        sampled = self._draw(rows, batch.seq_lens, output.rows, facts)
        return DecodeResult(sampled.token_ids, sampled.invalid, hidden=hidden)

    def draw(
        self, rows: Tensor, logits: Tensor, sampling: SamplingVariant, masks: LogitMasks | None = None
    ) -> SampleOutput:
        """Sample from logits [R, V] of a step of the `logits` variant."""
        # including the token whose KV this step wrote
        seq_lens = self._relay.seq_len.index_select(0, rows) + 1
        return self._draw(rows, seq_lens, LogitRows(logits), sampling, masks)

    def _draw(
        self,
        rows: Tensor,
        seq_lens: Tensor,
        logits: LogitRows,
        sampling: SamplingVariant,
        masks: LogitMasks | None = None,
    ) -> SampleOutput:
        """Sample, and write tokens and lengths to the relay rows; row 0 stays zero."""
        relay = self._relay
        batch = sampling_batch(relay, rows, seq_lens.to(torch.int64), sampling, masks=masks)
        sampled = sample_rows(logits, batch)
        if sampling.adjust is not None and sampling.adjust.penalties:
            relay.adjustments.count(rows, sampled.token_ids[:, None])
        advance_rows(rows, sampled.token_ids, seq_lens, relay.last_token, relay.seq_len)
        return sampled

    def _gather(self, rows: Tensor) -> ForwardBatch:
        """Build the batch. A padding row is a request of one token in page 0."""
        relay, count = self._relay, rows.shape[0]
        columns = relay.last_token, relay.seq_len, relay.rope_delta
        ids, positions, slots, lengths, table = step_rows(
            rows, *columns, self._pages, self._runner.pool.page_size
        )
        state = None
        if relay.state is not None:
            state = relay.state.open_window(rows, lengths.to(torch.int64) - 1)
        return ForwardBatch(
            mode=ForwardMode.DECODE,
            input_ids=ids,
            positions=positions,
            kv_slots=slots,
            page_table=table,
            seq_lens=lengths,
            query_start=self._steps32[: count + 1],
            logits_rows=self._steps[:count],
            max_seq_len=self._max_seq_len,
            hidden_mode=CaptureHiddenMode.NULL,
            state=state,
        )


class DecodeGraphs:
    """The decode step over device state: call it with rows, and read the tokens after the completion."""

    def __init__(
        self,
        runner: ModelRunner,
        relay: RelayState,
        table: PageTable,
        spec: CaptureSpec,
        backend: Backend,
        max_seq_len: int,
        poisoned: bool = False,
        hidden_states: bool = False,
    ) -> None:
        max_rows = max(len(relay.seq_len), spec.largest.requests)
        self._program = DecodeProgram(runner, relay, table, max_rows, max_seq_len, hidden_states)
        self.graphs = GraphRunner(spec, backend, self._program, OUTPUTS, relay.seq_len.device, poisoned)

    @torch.inference_mode()
    def forward(self, rows: Tensor, sampling: SamplingVariant) -> DecodeResult:
        """Run a masked step up to its logits, for `draw`; nothing else may run on the device in between."""
        assert sampling.masked, "other steps draw in their graph"
        return self.graphs(DecodeCall(rows, sampling))

    @torch.inference_mode()
    def draw(
        self, rows: Tensor, result: DecodeResult, sampling: SamplingVariant, masks: LogitMasks
    ) -> SampleOutput:
        assert result.logits is not None
        return self._program.draw(rows, result.logits, sampling, masks)

    @torch.inference_mode()
    def __call__(self, rows: Tensor, sampling: SamplingVariant) -> SampleOutput:
        """Run one step for rows [R] int64 on the device; `PageTable.write` must have been called before."""
        result = self.graphs(DecodeCall(rows, sampling))
        if result.logits is not None:
            sampled = self._program.draw(rows, result.logits, sampling)
            sampled.hidden = result.hidden
            return sampled
        assert result.token_ids is not None
        assert result.invalid is not None
        return SampleOutput(result.token_ids, result.invalid, hidden=result.hidden)
