"""GraphRunner with a toy model: capture order, faults that a graph would hide but tests detect, counters."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import triton
from torch import Tensor

from common.engine.forward.batch import CaptureHiddenMode, ForwardMode
from common.engine.graphs.admission import BatchFacts, Fallback
from common.engine.graphs.backends.base import Backend, CaptureError, Recording
from common.engine.graphs.backends.full import FullGraphs
from common.engine.graphs.backends.none import NoGraphs
from common.engine.graphs.backends.tape import TapeRecorder
from common.engine.graphs.graph_runner import GraphRunner
from common.engine.graphs.outputs import OutField, OutputError, OutputSpec
from common.engine.graphs.report import table
from common.engine.graphs.slots import Inputs, Slot, SlotError
from common.engine.graphs.spec import Axis, CaptureSpec, GraphKey, ShapeKey, token_shapes
from common.messages.identity import GraphTotals
from tests.fakes.fitting_graph import fitting_graph

WIDTH = 3
NULL, LAST, FULL = CaptureHiddenMode


@dataclass
class DraftBatch:
    """The input of a drafter's extend: embeddings, and the target's hidden states."""

    embeds: Tensor
    target_hidden: Tensor | None
    hidden: CaptureHiddenMode = LAST


@dataclass
class DraftOutput:
    hidden: Tensor


class Toy:
    """A draft-like program; `body` is replaced by faulty ones."""

    def __init__(self, body: Callable[[Toy, Inputs], Tensor] | None = None) -> None:
        self.weight = torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(0))
        self.planned: list[int] = []
        self.scale = 2.0
        self.buffer = torch.ones(WIDTH)
        self.body = body or (
            lambda toy, i: (i["embeds"] + i["target_hidden"] @ toy.weight).tanh() * toy.buffer
        )

    def slots(self) -> list[Slot[DraftBatch]]:
        return [
            Slot("embeds", Axis.TOKEN, (WIDTH,), torch.float32, lambda batch: batch.embeds),
            Slot("target_hidden", Axis.TOKEN, (WIDTH,), torch.float32, lambda batch: batch.target_hidden),
        ]

    def facts(self, batch: DraftBatch) -> BatchFacts:
        return BatchFacts(ForwardMode.EXTEND, ShapeKey(len(batch.embeds), 1), batch.hidden)

    def idle(self, shape: ShapeKey) -> DraftBatch:
        return DraftBatch(torch.zeros(shape.tokens, WIDTH), torch.zeros(shape.tokens, WIDTH))

    def plan(self, batch: DraftBatch, inputs: Inputs) -> None:
        self.planned.append(len(batch.embeds))
        self.scale = float(batch.embeds.sum())

    def run(self, inputs: Inputs, variant: str) -> DraftOutput:
        return DraftOutput(self.body(self, inputs))


def runner(
    toy: Toy, backend: Backend | None = None, poisoned: bool = False, tokens: tuple[int, ...] = (2, 4, 8)
) -> GraphRunner[DraftBatch, DraftOutput]:
    spec = CaptureSpec(
        "draft", "draft_prefill", ForwardMode.EXTEND, token_shapes(tokens), LAST, max_padding=2.0
    )
    outputs = OutputSpec(DraftOutput, {"hidden": OutField(Axis.TOKEN)})
    device = torch.device("cpu")
    made = GraphRunner(spec, backend or FullGraphs(TapeRecorder()), toy, outputs, device, poisoned)
    made.capture()
    return made


def batches(sizes: list[int]) -> list[DraftBatch]:
    generator = torch.Generator().manual_seed(1)
    return [
        DraftBatch(torch.randn(n, WIDTH, generator=generator), torch.randn(n, WIDTH, generator=generator))
        for n in sizes
    ]


SIZES = [8, 3, 2, 7, 1, 9, 4, 8, 20, 2]  # below, at and above the captured maximum; shrinking and growing


def differs(made: GraphRunner[DraftBatch, DraftOutput], toy: Toy) -> bool:
    """Return whether any batch has another result than an eager run."""
    eager = runner(toy, tokens=())
    wrong = False
    for batch in batches(SIZES):
        expected = eager(batch).hidden.clone()
        wrong |= not torch.equal(made(batch).hidden, expected)
    return wrong


@pytest.mark.parametrize("poisoned", [False, True])
@pytest.mark.parametrize("backend", [NoGraphs, lambda: FullGraphs(TapeRecorder())])
def test_replay_equals_eager_at_every_size(backend: Callable[[], Backend], poisoned: bool) -> None:
    """Row E4: a batch above the captured maximum has the same semantics; poison never reaches a live row."""
    toy = Toy()
    assert not differs(runner(toy, backend(), poisoned), toy)


def _leaking(toy: Toy, inputs: Inputs) -> Tensor:
    return inputs["embeds"] - inputs["embeds"].mean(0)


def _scalar(toy: Toy, inputs: Inputs) -> Tensor:
    return inputs["embeds"] * toy.scale


def _padding_count(toy: Toy, inputs: Inputs) -> Tensor:
    return inputs["embeds"] / len(inputs["embeds"])


@pytest.mark.parametrize("fault", [_leaking, _scalar, _padding_count])
def test_a_faulty_program_is_caught_on_the_cpu(fault: Callable[[Toy, Inputs], Tensor]) -> None:
    """Faults are a leaking padding row, a scalar that should be a tensor, and a size that is not the live one."""
    toy = Toy(fault)
    assert differs(runner(toy), toy)


def test_poison_shows_a_leak_in_every_live_row() -> None:
    toy = Toy(_leaking)
    batch = batches([3])[0]
    assert runner(toy, poisoned=True)(batch).hidden.isnan().all()
    assert not runner(toy)(batch).hidden.isnan().any()


def test_a_stale_buffer_is_caught_on_the_cpu() -> None:
    toy = Toy()
    made = runner(toy)
    toy.buffer = torch.zeros(WIDTH)
    assert differs(made, toy)


def test_a_host_sync_fails_the_capture_and_the_batch_runs_eagerly_and_is_counted() -> None:
    """After an exception in capture the bucket runs eagerly, counted and logged."""
    toy = Toy(
        lambda toy, i: i["embeds"] if i["embeds"].shape[0] != 4 else i["embeds"] * i["embeds"].sum().item()
    )
    made = runner(toy)
    assert [row.error != "" for row in made.rows] == [False, True, False]
    assert "waits for the device" in made.rows[1].error
    assert made.rows[1].error in table(made.rows)
    batch = batches([3])[0]
    assert fitting_graph(made, batch) == (None, Fallback.CAPTURE_FAILED)
    assert torch.equal(made(batch).hidden, batch.embeds)  # eager: three rows, not four
    assert made.counters.fallbacks == {Fallback.CAPTURE_FAILED: 1}
    assert made(batches([8])[0]).hidden.shape == (8, WIDTH)


class DoesNotFit(triton.TritonError):
    """Like Triton's OutOfResources, which is not a RuntimeError."""


@pytest.mark.parametrize("kind", [CaptureError, torch.AcceleratorError, torch.OutOfMemoryError, DoesNotFit])
def test_what_torch_and_triton_raise_in_capture_costs_only_that_graph(kind: type[Exception]) -> None:
    """It runs eagerly once before serving, because otherwise its kernels would compile at the first request."""
    seen: list[int] = []
    capturing = True

    def body(toy: Toy, inputs: Inputs) -> Tensor:
        rows = inputs["embeds"]
        seen.append(len(rows))
        if capturing and len(rows) == 4:
            raise kind("no room")
        return rows

    made = runner(Toy(body))
    assert [row.error for row in made.rows] == ["", f"{kind.__name__}: no room", ""]
    capturing = False
    seen.clear()
    made.run_missing()
    assert seen == [4]
    assert not made.counters.fallbacks, "no request was served"


def test_a_capture_that_succeeds_at_the_second_attempt_costs_nothing() -> None:
    """As with a recorder on a GPU, which lets runs precede it: they load what this capture could not."""
    seen: list[int] = []

    def body(toy: Toy, inputs: Inputs) -> Tensor:
        rows = inputs["embeds"]
        seen.append(len(rows))
        return _raise(CaptureError("not loaded")) if seen == [8, 4] else rows

    made = runner(Toy(body))
    assert seen == [8, 4, 4, 2]
    assert [row.error for row in made.rows] == ["", "", ""]
    assert made(batches([3])[0]).hidden.shape == (3, WIDTH)
    assert not made.counters.fallbacks


def test_a_second_attempt_has_the_memory_of_the_first() -> None:
    intermediate: list[weakref.ref[Tensor]] = []
    held: list[bool] = []

    def body(toy: Toy, inputs: Inputs) -> Tensor:
        held.extend(each() is not None for each in intermediate)
        rows = inputs["embeds"] + 1
        intermediate.append(weakref.ref(rows))
        raise CaptureError("no room")

    runner(Toy(body))
    assert held
    assert not any(held)


def test_programming_errors_in_capture_are_no_fallback() -> None:
    with pytest.raises(TypeError, match="ours"):
        runner(Toy(lambda toy, inputs: _raise(TypeError("ours"))))

    def body(toy: Toy, inputs: Inputs) -> Tensor:
        raise CaptureError("also eagerly")

    with pytest.raises(CaptureError, match="also eagerly"):  # what cannot run at all is an error
        runner(Toy(body)).run_missing()


def _raise(error: Exception) -> Tensor:
    raise error


def test_an_output_of_other_rows_than_declared_ends_the_start() -> None:
    """Row C3: it is not an error of a request, which would occur at the first replay."""
    with pytest.raises(OutputError, match=r"hidden: 7 rows, declared one per token of 8"):
        runner(Toy(lambda toy, i: i["embeds"][1:]))


def test_an_eager_run_takes_the_cheapest_variant() -> None:
    """`facts` names variants in that order; a graph may serve the batch with any of them."""
    ran: list[str] = []

    class Variants(Toy):
        def facts(self, batch: DraftBatch) -> BatchFacts:
            return replace(super().facts(batch), variants=("cheap", "any"))

        def run(self, inputs: Inputs, variant: str) -> DraftOutput:
            ran.append(variant)
            return super().run(inputs, variant)

    runner(Variants(), tokens=())(batches([3])[0])
    assert ran == ["cheap"]


def test_a_wrong_width_or_a_missing_hidden_state_raises() -> None:
    """Rows A4, A6, D: eager and replayed alike, never with stale hidden states of the previous batch."""
    made = runner(Toy())
    good = batches([4])[0]
    made(good)
    for count in (4, 20):
        embeds = torch.zeros(count, WIDTH)
        with pytest.raises(SlotError, match=r"'target_hidden'.*declared \(\d+, 3\)"):
            made(DraftBatch(embeds, torch.zeros(count, 2 * WIDTH)))
        with pytest.raises(SlotError, match="'target_hidden'.*has none"):
            made(DraftBatch(embeds, None))


def test_a_draft_replay_sees_the_live_hidden_states() -> None:
    """Rows A3, A5, A6: captured on the static slot, replayed on what was copied into it."""
    toy = Toy()
    made = runner(toy)
    first, second = batches([4, 4])
    mixed = DraftBatch(first.embeds, second.target_hidden)
    one, other = made(first).hidden.clone(), made(mixed).hidden.clone()
    assert not torch.equal(one, other)
    assert mixed.target_hidden is not None
    assert torch.equal(
        other, toy.run({"embeds": mixed.embeds, "target_hidden": mixed.target_hidden}, "").hidden
    )
    assert made.counters.replays.total() == 2


class FakeBackend:
    """Records what was captured, in order."""

    name = "fake"
    breaks = True
    compilation = None

    def __init__(self) -> None:
        self.shapes: list[int] = []

    def capture(self, run: Callable[[], Any]) -> Recording[Any]:
        output = run()
        self.shapes.append(len(output.hidden))
        return Recording(output, [])


def test_capture_is_largest_first_and_plans_each_shape_outside() -> None:
    """The memory pool is then sized once."""
    toy, backend = Toy(), FakeBackend()
    made = runner(toy, backend)
    assert backend.shapes == [8, 4, 2]
    assert toy.planned == [8, 4, 2]
    assert [key.shape.tokens for key in made.captured] == [8, 4, 2]


def test_counters_by_reason_and_padded_tokens() -> None:
    """Replays, fallbacks by reason and padded tokens are counted."""
    made = runner(Toy())
    for batch in batches([3, 8, 9, 1]):
        made(batch)
    full = batches([4])[0]
    full.hidden = FULL
    made(full)
    counters = made.counters
    assert counters.replays == {
        GraphKey(ShapeKey(4), "plain"): 1,
        GraphKey(ShapeKey(8), "plain"): 1,
        GraphKey(ShapeKey(2), "plain"): 1,
    }
    assert counters.fallbacks == {Fallback.TOO_LARGE: 1, Fallback.HIDDEN: 1}
    assert (counters.live_tokens, counters.padded_tokens) == (12, 2)
    assert set(made.captured) == set(counters.replays)
    assert made.totals() == GraphTotals(
        phase="draft_prefill",
        model="draft",
        replays=3,
        fallbacks={"hidden_mode": 1, "too_large": 1},
        live_tokens=12,
        padded_tokens=2,
        captured=3,
        unused=0,
    )


def test_graphs_that_never_ran_are_reported() -> None:
    """Such graphs waste memory, so a gauge counts graphs, not replays."""
    made = runner(Toy())
    for batch in batches([3, 4, 3]):
        made(batch)
    assert (made.totals().replays, made.totals().captured, made.totals().unused) == (3, 3, 2)


def test_a_mode_mismatch_is_a_fall_back_never_a_wrong_answer() -> None:
    """A batch that needs more hidden states than the graph returns runs eagerly (row B6)."""
    made, toy = runner(Toy()), Toy()
    wants_full = batches([4])[0]
    wants_full.hidden = FULL
    assert fitting_graph(made, wants_full) == (None, "hidden_mode")
    assert torch.equal(made(wants_full).hidden, runner(toy, tokens=())(wants_full).hidden)


def test_off_is_an_empty_value() -> None:
    """Row A11: without shapes nothing is captured, padded or allocated."""
    made = runner(Toy(), tokens=())
    assert made.rows == []
    assert made(batches([5])[0]).hidden.shape == (5, WIDTH)
    assert made.counters.fallbacks == {Fallback.NO_GRAPHS: 1}


def test_the_start_up_table() -> None:
    text = table(runner(Toy()).rows).splitlines()
    assert text[0].split() == [
        "phase",
        "model",
        "backend",
        "tokens",
        "/",
        "requests",
        "variant",
        "hidden",
        "s",
        "MiB",
        "state",
    ]
    assert [line.split()[3] for line in text[1:]] == ["8", "4", "2"]
    assert all("draft_prefill" in line and "LAST" in line for line in text[1:])
