"""A round of speculation, shared by its phases: the requests, their positions and their KV slots.

    draft -> verify -> draft-extend      one graph launch each; without graphs the same programs are called directly

Every phase gathers what it needs from the relay rows and the page table. The host passes one tensor: the rows, and the
number of pages that each request holds. Positions past these pages map to padding page 0, so that nothing is written to
pages of another request. (Such positions are never emitted, because max_tokens comes first.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor

from common.engine.forward.batch import CaptureHiddenMode, ForwardBatch, ForwardMode
from common.engine.graphs.admission import BatchFacts
from common.engine.graphs.graph_runner import GraphRunner
from common.engine.graphs.node_graphs import NodeGraphs
from common.engine.graphs.outputs import OutputSpec
from common.engine.graphs.rules import Phase
from common.engine.graphs.slots import ROW0, Inputs, Slot
from common.engine.graphs.spec import PLAIN, Axis, CaptureSpec, ShapeKey, request_shapes
from common.engine.ops.round_inputs import gather_rows, window_places
from common.engine.sampling.sampling_plan import SamplingVariant
from common.engine.state.relay_state import RelayState
from decode_node.graphs.step_graphs import PhasePlan
from decode_node.page_table import PageTable

Output = TypeVar("Output")


@dataclass(frozen=True, slots=True)
class RoundCall:
    """The host inputs of a round of R requests."""

    placed: Tensor  # [R, 2] int64 on the device: (row of relay state and page table, number of pages held)
    sampling: SamplingVariant
    drafts: Tensor | None = None  # [R, n] int64 on the device: drafts found by the host
    # [R, n] int64 on the device: tokens that replace drafts of a draft model, -1 for those that stay; None: all stay
    forced: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Round:
    """R requests at the start of a round. A padding row is a request without tokens, in page 0."""

    rows: Tensor  # [R] int64
    last_token: Tensor  # [R] int64, drawn but without KV
    seq_len: Tensor  # [R] int64, tokens with KV, which is the position of last_token
    rope_delta: Tensor  # [R] int64, rotary position minus sequence index, for all tokens from here on
    page_table: Tensor  # [R, pages] int32, page 0 past a request's own pages
    page_size: int
    longest: int  # host upper bound of every position
    index: Tensor  # [n] int64: 0, 1, 2, ..., where n exceeds the number of rows of any forward of a round
    index32: Tensor  # `index` as int32

    @property
    def count(self) -> int:
        return self.rows.shape[0]

    @property
    def live(self) -> Tensor:
        """[R] bool: True for requests, False for padding rows."""
        return self.rows > 0

    def places(self, depth: Tensor, first: int = 0) -> tuple[Tensor, Tensor, Tensor]:
        """Locate N tokens from slot seq_len + first: rotary positions [R, N], KV slots [R, N], lengths [R] int32.

        depth: [R, N] or [N], the offset of each token's position from seq_len.
        """
        depth = depth.expand(self.count, -1)
        return window_places(self.seq_len, self.rope_delta, self.page_table, depth, first, self.page_size)

    def singles(self, count: int) -> list[ForwardBatch]:
        """Build `count` forwards of one token per request, at positions from seq_len on.

        The caller sets `input_ids`.
        """
        by_request, slots_by_request, _ = self.places(self.index[:count])
        positions, slots = by_request.t().contiguous(), slots_by_request.t().contiguous()
        lengths = (self.index[1 : count + 1, None] + self.seq_len).to(torch.int32)
        return [
            ForwardBatch(
                mode=ForwardMode.DECODE,
                input_ids=self.last_token,
                positions=positions[step],
                kv_slots=slots[step],
                page_table=self.page_table,
                seq_lens=lengths[step],
                query_start=self.index32[: self.count + 1],
                logits_rows=self.index[: self.count],
                max_seq_len=self.longest,
            )
            for step in range(count)
        ]

    def window(
        self,
        ids: Tensor,
        depth: Tensor,
        mask: Tensor,
        logits_rows: Tensor,
        hidden_mode: CaptureHiddenMode = CaptureHiddenMode.NULL,
    ) -> ForwardBatch:
        """Build a forward of N tokens per request, in the last N of the W slots from seq_len on.

        Args:
            ids: [R, N].
            depth: [R, N] or [N], the offset of each token's position from seq_len.
            mask: [R, N, W] bool, the slots that each token attends to.
        """
        nodes, width = mask.shape[1:]
        # Slots are consecutive; positions follow the depth.
        positions, slots, lengths = self.places(depth, width - nodes)
        return ForwardBatch(
            mode=ForwardMode.VERIFY,
            input_ids=ids.flatten(),
            positions=positions.flatten(),
            kv_slots=slots.flatten(),
            page_table=self.page_table,
            seq_lens=lengths,
            query_start=self.index32[: self.count * nodes + 1 : nodes],
            logits_rows=logits_rows,
            max_seq_len=self.longest,
            hidden_mode=hidden_mode,
            tree_mask=mask,
        )


@dataclass(frozen=True, slots=True)
class Nothing:
    """The output of a phase that leaves all results in device state."""


NOTHING: OutputSpec[Nothing] = OutputSpec(Nothing, {})
Run = Callable[[Round, Inputs, str], Output]


@dataclass(frozen=True, slots=True)
class PhaseForward:
    """The forward of a phase."""

    mode: ForwardMode
    nodes: int = 1  # tokens per request
    hidden: CaptureHiddenMode = CaptureHiddenMode.NULL


@dataclass(frozen=True, slots=True)
class Variants:
    """The variants of a phase, and those that can serve a batch, cheapest first."""

    names: tuple[str, ...]
    serving: Callable[[SamplingVariant], tuple[str, ...]]


ONE_VARIANT = Variants((PLAIN,), lambda sampling: (PLAIN,))


class Rounds:
    """State shared by the phases of one node. `capture` returns how each phase is captured.

    Args:
        max_seq_len: longest request on this node.
        lookahead_slots: most slots past a request's length that a round may use.
    """

    def __init__(
        self,
        relay: RelayState,
        table: PageTable,
        page_size: int,
        max_seq_len: int,
        lookahead_slots: int,
        capture: Callable[[Phase], PhasePlan],
    ) -> None:
        self.relay = relay
        self.device = relay.seq_len.device
        self.max_rows = relay.seq_len.shape[0]
        # A round is launched while an unread one may still run past the end of the request.
        self._longest = max_seq_len + 2 * lookahead_slots
        if table.pages.shape[1] * page_size < self._longest:
            raise ValueError(
                f"a page table of {table.pages.shape[1]} pages cannot hold {self._longest} tokens: max_seq_len plus "
                "the slots of two rounds"
            )
        self._pages = table.pages
        self._page_size = page_size
        self._capture = capture
        most = max(self.max_rows * lookahead_slots + 1, table.pages.shape[1])
        self._index = torch.arange(most, device=self.device)
        self._index32 = self._index.to(torch.int32)

    def gather(self, placed: Tensor) -> Round:
        """Gather the requests of placed [R, 2], as in RoundCall."""
        rows, relay = placed[:, 0], self.relay
        columns = relay.last_token, relay.seq_len, relay.rope_delta
        last_token, seq_len, rope_delta, table = gather_rows(placed, *columns, self._pages)
        return Round(
            rows=rows,
            last_token=last_token,
            seq_len=seq_len,
            rope_delta=rope_delta,
            page_table=table,
            page_size=self._page_size,
            longest=self._longest,
            index=self._index,
            index32=self._index32,
        )

    def phase(
        self,
        phase: Phase,
        model: str,
        run: Run[Output],
        outputs: OutputSpec[Output],
        forward: PhaseForward,
        variants: Variants = ONE_VARIANT,
        slots: Sequence[Slot[RoundCall]] = (),
    ) -> RoundPhase[Output]:
        """Build one phase, not captured yet. `slots`: inputs in addition to `placed`."""
        plan = self._capture(phase)
        spec = CaptureSpec(
            model=model,
            phase=phase.value,
            mode=forward.mode,
            shapes=request_shapes(plan.buckets, forward.nodes),
            hidden=forward.hidden,
            variants=variants.names,
            tokens_per_request=forward.nodes,
        )
        if spec.largest.requests > self.max_rows:
            raise ValueError(
                f"{phase}: graphs for {spec.largest.requests} requests exceed the {self.max_rows} batch rows"
            )
        program = _RoundProgram(self, spec, run, variants.serving, slots)
        graphs = GraphRunner(spec, plan.backend(), program, outputs, self.device, plan.poisoned)
        return RoundPhase(graphs, plan)


class RoundPhase(Generic[Output]):
    """A phase; call it with a round, on the current stream."""

    def __init__(self, graphs: GraphRunner[RoundCall, Output], plan: PhasePlan) -> None:
        self.graphs = graphs
        self._plan = plan

    def __call__(self, call: RoundCall) -> Output:
        return self.graphs(call)

    @property
    def node_graphs(self) -> NodeGraphs[RoundPhase[Output]]:
        """The graphs of this phase, for capture and reports."""
        return NodeGraphs(self, self._plan.decision)


class _RoundProgram(Generic[Output]):
    """A graph `Program` over a round: gathers the requests, then calls `run`."""

    def __init__(
        self,
        rounds: Rounds,
        spec: CaptureSpec,
        run: Run[Output],
        serving: Callable[[SamplingVariant], tuple[str, ...]],
        slots: Sequence[Slot[RoundCall]],
    ) -> None:
        self._rounds = rounds
        self._spec = spec
        self._run = run
        self._serving = serving
        self._slots = slots

    def slots(self) -> list[Slot[RoundCall]]:
        placed: Slot[RoundCall] = Slot(
            "placed", Axis.REQUEST, (2,), torch.int64, lambda call: call.placed, ROW0, poison="keep"
        )
        return [placed, *self._slots]

    def facts(self, call: RoundCall) -> BatchFacts:
        count = call.placed.shape[0]
        live = ShapeKey(count * (self._spec.tokens_per_request or 1), count)
        return BatchFacts(self._spec.mode, live, self._spec.hidden, variants=self._serving(call.sampling))

    def idle(self, shape: ShapeKey) -> RoundCall:
        placed = torch.zeros(shape.requests, 2, dtype=torch.int64, device=self._rounds.device)
        return RoundCall(placed, SamplingVariant(all_greedy=True, any_filter=False, num_logprobs=None))

    def plan(self, call: RoundCall, inputs: Inputs) -> None:
        """No-op: everything that attention reads is gathered on the device."""

    def run(self, inputs: Inputs, variant: str) -> Output:
        return self._run(self._rounds.gather(inputs["placed"]), inputs, variant)
