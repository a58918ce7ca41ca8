"""Prefill graphs of a real model on the tape: replay is bitwise equal to eager, for any mix of requests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from common.engine.forward.batch import CaptureHiddenMode, ForwardMode, ForwardOutput
from common.engine.graphs import node_graphs
from common.engine.graphs.admission import Fallback
from common.engine.graphs.backends.base import Backend
from common.engine.graphs.backends.full import FullGraphs
from common.engine.graphs.backends.none import NoGraphs
from common.engine.graphs.backends.tape import TapeRecorder, TapeSegment
from common.engine.graphs.ladders import prefill_token_buckets
from common.engine.graphs.rules import Decision, Phase, PhaseSwitch
from common.engine.graphs.slots import SlotError
from common.engine.graphs.spec import ShapeKey
from common.messages.generation import SamplingParams
from decode_node.graphs.decode_graph import VARIANTS
from prefill_node.graphs import prompt_graphs
from prefill_node.graphs.backends.breakable import BreakableGraphs
from prefill_node.graphs.prefill_extend import LOADED_PER_TOKEN, ExtendCall, PrefillExtend, extend_spec
from prefill_node.graphs.static_extend import BROKEN, StaticExtend
from tests.fakes.fitting_graph import fitting_graph
from tests.fakes.rounding import expect_close
from tests.unit.engine.graphs.rig import AUX, BACKENDS, DecodeRig, extend_driver, model, piecewise, sequences
from tests.unit.engine.paged_driver import BAD_PAGE, Driver

NULL, LAST, FULL = CaptureHiddenMode
LENGTHS = (60, 41, 23, 9)
IDS = sequences(LENGTHS)
BUCKETS = (4, 8, 16, 32, 48)
# (sequences, new tokens of each): chunks, cached prefixes, growing and shrinking, below, at and above 48
STEPS = [
    ([0, 1], [20, 7]),
    ([0, 2, 1], [5, 3, 8]),
    ([3], [8]),
    ([0, 1, 2], [28, 17, 20]),
    ([0], [7]),
    ([1, 3], [9, 1]),
]


def breakable() -> Backend:
    return BreakableGraphs(TapeRecorder())


@pytest.mark.parametrize("poisoned", [False, True])
@pytest.mark.parametrize("backend", [NoGraphs, breakable, piecewise])
@pytest.mark.parametrize("aux", [(), AUX])
@pytest.mark.parametrize("unbroken", [BROKEN, ShapeKey(16, 2), ShapeKey(48, 9)])
def test_replay_equals_eager(
    backend: Callable[[], Backend], poisoned: bool, aux: tuple[int, ...], unbroken: ShapeKey
) -> None:
    """Rows A1, A6, C3: below, at and above the captured maximum, after shrinking and growing, with poisoned padding."""
    eager = Driver(model(aux), IDS, 4)
    driver, extend = extend_driver(IDS, backend(), BUCKETS, poisoned=poisoned, aux=aux, unbroken=unbroken)
    static: StaticExtend = extend.graphs.program.static  # type: ignore[attr-defined]
    for rows, lengths in STEPS:
        for_hidden = FULL if sum(lengths) % 2 else LAST
        expected = eager.run(rows, lengths, hidden_mode=for_hidden)
        # KV slots are left out: all of them are rewritten.
        for stale in (static.pages, static.starts, static.lens):
            stale.fill_(BAD_PAGE)
        actual = driver.run(rows, lengths, hidden_mode=for_hidden)
        expect_close(actual.logits, expected.logits)
        expect_close(actual.hidden, expected.hidden)
    expect_close(_live(driver), _live(eager))
    counters = extend.graphs.counters
    assert counters.replays.total() == len(STEPS) - 1
    assert counters.fallbacks == {Fallback.TOO_LARGE: 1}


@pytest.mark.parametrize("poisoned", [False, True])
def test_lengths_of_requests_that_are_not_there(poisoned: bool) -> None:
    """They are empty, on which graphs without breaks rely; their page ids may be anything, even poison."""
    driver = Driver(model(), IDS, 4)
    static = StaticExtend(ShapeKey(16, 4), driver.width + 3, torch.device("cpu"), poisoned)
    static.load(driver.batch([0, 1, 2], [9, 8, 7]))
    batch = driver.batch([1, 3], [5, 3])
    loaded = static.load(batch)
    assert (loaded.query_start.tolist(), loaded.seq_lens.tolist()) == ([0, 5, 8, 8, 8], [5, 3, 0, 0])
    assert torch.equal(loaded.page_table[:2, : driver.width], batch.page_table)
    rest = torch.cat((loaded.page_table[2:].flatten(), loaded.page_table[:2, driver.width :].flatten()))
    assert bool((rest == BAD_PAGE).all()) is poisoned


def _live(driver: Driver) -> torch.Tensor:
    return driver.pool.storage.view(torch.float32).nan_to_num(7.0)


def values(output: ForwardOutput) -> list[torch.Tensor]:
    return [output.logits] if output.hidden is None else [output.logits, output.hidden]


@settings(max_examples=15, deadline=None)
@given(st.data())
def test_any_mix_of_requests_equals_eager(data: st.DataObject) -> None:
    """For several requests lengths, prefixes and chunks do not matter, only the number of tokens.

    Results are bitwise equal to those of the same padding without graphs, and up to rounding to those without padding.
    """
    eager = Driver(model(AUX), IDS, 4)
    unbroken = data.draw(st.sampled_from([BROKEN, ShapeKey(16, 2), ShapeKey(48, 4)]))
    driver, _ = extend_driver(
        IDS, breakable(), BUCKETS, poisoned=data.draw(st.booleans()), aux=AUX, unbroken=unbroken
    )
    padded, _ = extend_driver(IDS, NoGraphs(), BUCKETS, aux=AUX, unbroken=unbroken)
    for _ in range(6):
        left = [row for row in range(len(IDS)) if eager.done[row] < LENGTHS[row]]
        if not left:
            break
        rows = data.draw(st.lists(st.sampled_from(left), min_size=1, unique=True))
        lengths = [data.draw(st.integers(1, LENGTHS[row] - eager.done[row])) for row in rows]
        mode = data.draw(st.sampled_from(CaptureHiddenMode))
        actual, same, expected = (
            each.run(rows, lengths, hidden_mode=mode) for each in (driver, padded, eager)
        )
        for ours, bits, close in zip(*(values(output) for output in (actual, same, expected)), strict=True):
            assert torch.equal(ours, bits)
            torch.testing.assert_close(ours, close, atol=1e-4, rtol=0)


def test_small_graphs_have_no_breaks_and_hold_so_many_requests() -> None:
    """More requests than rows of the static page table take the next graph with breaks, if it fits."""
    driver, extend = extend_driver(IDS, breakable(), BUCKETS, unbroken=ShapeKey(16, 2))
    assert {row.tokens: row.breaks for row in extend.graphs.rows} == {4: 0, 8: 0, 16: 0, 32: 2, 48: 2}
    expected = {(8, 8): 16, (1, 1): 4, (6, 6, 6): 32, (5, 5, 6): 32, (3, 3, 3): None}
    for lengths, tokens in expected.items():
        shape, _ = fitting_graph(extend.graphs, ExtendCall(driver.batch(range(len(lengths)), lengths)))
        assert (shape and shape.tokens) == tokens


class CountedSegments(TapeRecorder):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[int] = []  # of each segment

    def end(self) -> TapeSegment:
        segment = super().end()
        self.calls.append(len(segment.calls))
        return segment


def test_a_graph_without_breaks_has_a_short_first_segment() -> None:
    """The device begins with it while the host launches the rest."""
    recorder = CountedSegments()
    extend_driver(IDS, BreakableGraphs(recorder), (16,), unbroken=ShapeKey(16, 2))
    first, rest = recorder.calls
    assert 0 < first < rest


def test_few_tokens_take_a_graph_with_breaks_beside_a_long_load() -> None:
    """There each layer waits for its own copies from host memory; a graph without breaks would wait for all."""
    eager, (driver, extend) = (
        Driver(model(), IDS, 4),
        extend_driver(IDS, breakable(), BUCKETS, unbroken=ShapeKey(16, 2)),
    )
    loaded = {LOADED_PER_TOKEN * 32 - 1: 4, LOADED_PER_TOKEN * 32: 32}
    for tokens, expected in loaded.items():
        batch = replace(driver.batch([0], [3]), loaded_tokens=tokens)
        shape, _ = fitting_graph(extend.graphs, ExtendCall(batch))
        assert shape is not None
        assert shape.tokens == expected
        expect_close(extend(batch).logits, eager.runner(eager.batch([0], [3])).logits)
    assert [key.shape.tokens for key in extend.graphs.counters.replays] == [4, 32]
    more = replace(driver.batch([0], [40]), loaded_tokens=1 << 20)
    assert fitting_graph(extend.graphs, ExtendCall(more)) == (ShapeKey(48), "")


def test_without_a_graph_with_breaks_a_load_changes_nothing() -> None:
    driver, extend = extend_driver(IDS, breakable(), (4, 8, 16), unbroken=ShapeKey(16, 2))
    batch = replace(driver.batch([0], [3]), loaded_tokens=1 << 20)
    assert fitting_graph(extend.graphs, ExtendCall(batch)) == (ShapeKey(4, 2), "")


@pytest.mark.parametrize("backend", [breakable, piecewise])
def test_given_embeddings_replay_the_same_graph_as_text(backend: Callable[[], Backend]) -> None:
    """Row A7: text is embedded into the slot too, so neither sees zeros or rows of the other."""
    eager, (driver, extend) = Driver(model(), IDS, 4), extend_driver(IDS, backend(), BUCKETS)
    generator = torch.Generator().manual_seed(3)
    for round_, count in enumerate((7, 12, 5)):
        batch = driver.batch([0], [count])
        embeds = torch.randn(count, 32, generator=generator) if round_ % 2 == 0 else None
        assert extend.graphs.counters.replays.total() == round_
        expect_close(extend(batch, embeds).logits, eager.runner(eager.batch([0], [count]), embeds).logits)
        driver.done[0] = eager.done[0] = driver.done[0] + count
    with pytest.raises(SlotError, match=r"'embeds'.*found \(5, 31\), declared \(5, 32\)"):
        extend(driver.batch([0], [5]), torch.zeros(5, 31))


def test_a_batch_gets_a_shape_or_a_reason() -> None:
    """Rows B4, B6, and padding above twice the live tokens."""
    driver, extend = extend_driver(IDS, breakable(), BUCKETS, hidden=LAST)
    expected = {
        (1, NULL): (None, "padding"),
        (2, NULL): (4, ""),
        (9, LAST): (16, ""),
        (9, FULL): (None, "hidden_mode"),
        (48, NULL): (48, ""),
        (49, NULL): (None, "too_large"),
    }
    for (tokens, mode), (shape, reason) in expected.items():
        found, why = fitting_graph(extend.graphs, ExtendCall(driver.batch([0], [tokens], hidden_mode=mode)))
        assert (found and found.tokens, why) == (shape, reason)
    decode = driver.batch([0], [1], ForwardMode.DECODE)
    assert fitting_graph(extend.graphs, ExtendCall(decode)) == (None, "forward_mode")
    assert not extend.graphs.counters.fallbacks


def test_only_prefill_is_captured_and_full_chunks_have_no_padding() -> None:
    """Row A10: every key is a token bucket of this phase; the chunk size is a bucket."""
    driver, extend = extend_driver(IDS, breakable(), prefill_token_buckets(50))
    assert {(row.phase, row.model, row.requests) for row in extend.graphs.rows} == {("prefill", "target", 0)}
    assert {row.breaks for row in extend.graphs.rows} == {2}  # one per layer
    driver.run([0], [50])
    assert extend.graphs.counters.padded_tokens == 0


def test_default_ladder_replays_at_least_95_percent() -> None:
    """This holds with default flags and FULL hidden states, which an EAGLE drafter reads."""
    ids = sequences([37, 50, 64, 12, 5, 90, 33, 71], seed=4)
    driver, extend = extend_driver(ids, breakable(), prefill_token_buckets(64))
    for row, prompt in enumerate(ids):
        while left := len(prompt) - driver.done[row]:
            driver.run([row], [min(left, 64)], hidden_mode=FULL)
    counters = extend.graphs.counters
    assert 20 * counters.fallbacks.total() <= counters.replays.total()
    assert "hidden_mode" not in counters.fallbacks


def test_every_captured_graph_replays() -> None:
    """Over a mixed load every captured graph replays."""
    buckets = prefill_token_buckets(64)
    driver, extend = extend_driver(sequences([sum(buckets)]), breakable(), buckets)
    for count in buckets:
        driver.run([0], [count])
    assert (extend.graphs.totals().captured, extend.graphs.totals().unused) == (len(buckets), 0)


def test_a_backend_without_breaks_is_refused() -> None:
    """It would contain the lengths of the captured batch."""
    driver = Driver(model(), IDS, 4)
    with pytest.raises(ValueError, match="'tape' has no break points.*breakable"):
        PrefillExtend(driver.runner, extend_spec(BUCKETS, NULL), FullGraphs(TapeRecorder()))


def test_without_shapes_every_prompt_is_eager() -> None:
    """A node without graphs behaves as if graphs did not exist (row A11)."""
    driver, extend = extend_driver(IDS, NoGraphs(), ())
    assert driver.run([0], [9]).logits.shape[0] == 9
    assert extend.graphs.counters.fallbacks == {Fallback.NO_GRAPHS: 1}


def test_a_trial_captures_two_shapes_and_counts_for_all() -> None:
    """Row B8: the memory of graphs is known before the KV pool is sized."""
    driver = Driver(model(), IDS, 4)
    made = []

    def build() -> list[node_graphs.NodeGraphs[PrefillExtend]]:
        made.append(prompt_graphs.prefill_graphs(driver.runner, PhaseSwitch("breakable"), 32, 8, NULL))
        return made

    # before, after the largest shape, after the next one, at the end
    reserved = iter([500, 1500, 1510, 1510])
    nbytes = node_graphs.trial(build, lambda: next(reserved))
    (graphs,) = (each.forward.graphs for each in made)
    shapes = graphs.spec.shapes
    assert [key.shape for key in graphs.captured] == [shapes[-1], shapes[-2]]
    assert nbytes == 1010 + 10 * (len(shapes) - 2) + node_graphs.GRAPH_BYTES * len(shapes)


def test_a_trial_counts_all_families_shapes_and_variants() -> None:
    """Row B8: memory is reserved for the graphs of every phase of a node, not only for the first one's."""
    prefill = prompt_graphs.prefill_graphs(
        Driver(model(), IDS, 4).runner, PhaseSwitch("breakable"), 32, 8, NULL
    )
    decode = DecodeRig(IDS[:1], [SamplingParams(max_tokens=9, seed=1)], BACKENDS["tape"](), (1, 2))
    both: list[node_graphs.NodeGraphs[Any]] = [
        prefill,
        node_graphs.NodeGraphs(decode.graphs, Decision(Phase.DECODE, "full")),
    ]
    graphs = len(prefill.forward.graphs.spec.shapes) + 2 * len(VARIANTS)
    assert node_graphs.trial(lambda: both, lambda: 7) == node_graphs.GRAPH_BYTES * graphs


def test_a_trial_without_graphs_takes_nothing() -> None:
    driver = Driver(model(), IDS, 4)
    assert (
        node_graphs.trial(
            lambda: [prompt_graphs.prefill_graphs(driver.runner, PhaseSwitch("none"), 32, 8, NULL)], lambda: 7
        )
        == 0
    )
