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
              number is a shape) or adjust logits (common/engine/sampling/logit_adjustments.py: state of shapes that
              the host chooses), and wherever a dearer variant was not captured
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
from common.engine.graphs.slots import ROW0, Inputs, Slot, StaticInputs
from common.engine.graphs.spec import Axis, CaptureSpec, ShapeKey, request_shapes
from common.engine.ops.step_rows import advance_rows, step_rows
from common.engine.sampling.sampler import SampleOutput, sample
from common.engine.sampling.sampling_plan import SamplingVariant
from common.engine.state.relay_state import RelayState
from decode_node.page_table import PageTable
from decode_node.relay_sampling import sampling_batch

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
        self, runner: ModelRunner, relay: RelayState, table: PageTable, max_rows: int, max_seq_len: int
    ) -> None:
        self._runner = runner
        self._relay = relay
        self._pages = table.pages
        self._max_seq_len = max_seq_len
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
        """Attention reads what `run` gathers: no host data."""

    def run(self, inputs: Inputs, variant: str) -> DecodeResult:
        rows = inputs["rows"]
        batch = self._gather(rows)
        logits = self._runner(batch).logits
        if variant == LOGITS:
            return DecodeResult(logits=logits)
        facts = SamplingVariant(variant == GREEDY, variant == FILTERED, None)
        sampled = self._draw(rows, batch.seq_lens, logits, facts)
        return DecodeResult(sampled.token_ids, sampled.invalid)

    def draw(self, rows: Tensor, logits: Tensor, sampling: SamplingVariant) -> SampleOutput:
        """Draw from the logits [R, V] of a step that ended with them."""
        seq_lens = self._relay.seq_len.index_select(0, rows) + 1  # with the token whose KV this step wrote
        return self._draw(rows, seq_lens, logits, sampling)

    def _draw(
        self, rows: Tensor, seq_lens: Tensor, logits: Tensor, sampling: SamplingVariant
    ) -> SampleOutput:
        """Draw, and write tokens and lengths to the relay rows; row 0 stays zero."""
        relay = self._relay
        sampled = sample(logits, sampling_batch(relay, rows, seq_lens.to(torch.int64), sampling))
        if sampling.adjust is not None and sampling.adjust.penalties:
            relay.adjustments.count(rows, sampled.token_ids[:, None])
        advance_rows(rows, sampled.token_ids, seq_lens, relay.last_token, relay.seq_len)
        return sampled

    def _gather(self, rows: Tensor) -> ForwardBatch:
        """A padding row is a request of one token in page 0."""
        relay, count = self._relay, rows.shape[0]
        columns = relay.last_token, relay.seq_len, relay.rope_delta
        ids, positions, slots, lengths, table = step_rows(
            rows, *columns, self._pages, self._runner.pool.page_size
        )
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
        )


class DecodeGraphs:
    """A decode step over device state: call it with rows, read the tokens after the completion."""

    def __init__(
        self,
        runner: ModelRunner,
        relay: RelayState,
        table: PageTable,
        spec: CaptureSpec,
        backend: Backend,
        max_seq_len: int,
        poisoned: bool = False,
    ) -> None:
        device = relay.seq_len.device
        largest = spec.largest if spec.shapes else ShapeKey(0, 0)
        max_rows = max(len(relay.seq_len), largest.requests)
        self._program = DecodeProgram(runner, relay, table, max_rows, max_seq_len)
        inputs = StaticInputs(self._program.slots(), largest, device, poisoned)
        self.graphs = GraphRunner(spec, backend, self._program, inputs, OUTPUTS)

    @torch.inference_mode()
    def __call__(self, rows: Tensor, sampling: SamplingVariant) -> SampleOutput:
        """One step of the requests in rows [R] int64, on the device; `PageTable.write` comes before."""
        result = self.graphs(DecodeCall(rows, sampling))
        if result.logits is not None:
            return self._program.draw(rows, result.logits, sampling)
        assert result.token_ids is not None
        assert result.invalid is not None
        return SampleOutput(result.token_ids, result.invalid)
