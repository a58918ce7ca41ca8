"""Decode graphs of a real model on the tape: one graph reads and updates relay rows."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from common.engine.graphs.admission import Fallback
from common.engine.graphs.ladders import decode_request_buckets
from common.engine.sampling.sampler import SampleOutput
from common.engine.sampling.sampling_plan import AdjustmentFacts, SamplingVariant
from common.messages.generation import SamplingParams
from decode_node.graphs.decode_graph import (
    FILTERED,
    GREEDY,
    LOGITS,
    RANDOM,
    DecodeCall,
    decode_spec,
    serving_variants,
)
from tests.fakes.fitting_graph import fitting_graph
from tests.unit.engine.graphs.rig import BACKENDS, DecodeRig, sequences

PROMPTS = sequences([21, 9, 30, 4, 13])
PARAMS = {
    GREEDY: SamplingParams(max_tokens=99, temperature=0.0, seed=1),
    RANDOM: SamplingParams(max_tokens=99, temperature=0.8, seed=2),
    FILTERED: SamplingParams(max_tokens=99, temperature=1.1, top_p=0.8, top_k=12, seed=3),
    LOGITS: SamplingParams(max_tokens=99, temperature=0.9, seed=4, logprobs=2),
}
KINDS = [GREEDY, RANDOM, FILTERED, LOGITS, GREEDY]
STEPS = [[0], [0, 1], [0, 1, 2, 3, 4], [4, 0], [3], [2, 1, 0], [0, 4, 1, 2], [1], [4, 3, 2, 1, 0], [0, 4]]


def rig(backend: str, buckets: tuple[int, ...], kinds: list[str] = KINDS, **options: Any) -> DecodeRig:
    return DecodeRig(PROMPTS, [PARAMS[kind] for kind in kinds], BACKENDS[backend](), buckets, **options)


def equal(actual: SampleOutput, expected: SampleOutput) -> bool:
    """Return whether outputs are bitwise equal."""
    pairs = [(getattr(actual, name), getattr(expected, name)) for name in SampleOutput.__dataclass_fields__]
    return all(a is b is None or torch.equal(a, b) for a, b in pairs)


def agree(actual: SampleOutput, expected: SampleOutput) -> bool:
    """Return whether tokens are equal, and logprobs up to the rounding that padding rows cause in a matrix product."""
    if expected.logprobs is not None:
        assert actual.logprobs is not None
        torch.testing.assert_close(actual.logprobs, expected.logprobs, atol=1e-4, rtol=0)
    return torch.equal(actual.token_ids, expected.token_ids)


def same_state(one: DecodeRig, other: DecodeRig) -> bool:
    """Return whether relay rows and the whole cache are equal."""
    columns = [(getattr(one.relay, name), getattr(other.relay, name)) for name in ("last_token", "seq_len")]
    columns.append(
        (
            one.pool.storage.view(torch.float32).nan_to_num(7),
            other.pool.storage.view(torch.float32).nan_to_num(7),
        )
    )
    return all(torch.equal(a, b) for a, b in columns)


@pytest.mark.parametrize("backend", ["none", "tape", "breakable"])
@pytest.mark.parametrize("buckets", [(1, 2, 4), (4,), (5,), (1, 8)])
def test_replay_equals_eager(backend: str, buckets: tuple[int, ...]) -> None:
    """Rows E4, A11: below, at and above the captured maximum, shrinking, growing, changing order and variant."""
    eager, padded, graphs = rig("none", ()), rig("none", buckets), rig(backend, buckets)
    for chosen in STEPS:
        output = graphs.step(chosen)
        assert equal(output, padded.step(chosen))
        assert agree(output, eager.step(chosen))
        assert same_state(graphs, padded)
    assert torch.equal(graphs.relay.seq_len, eager.relay.seq_len)
    counters = graphs.graphs.graphs.counters
    above = sum(len(chosen) > max(buckets) for chosen in STEPS)
    assert counters.replays.total() == len(STEPS) - above
    assert counters.fallbacks == ({Fallback.TOO_LARGE: above} if above else {})


@settings(max_examples=20, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=5, unique=True), min_size=1, max_size=8),
    st.lists(st.sampled_from(list(PARAMS)), min_size=5, max_size=5),
    st.sets(st.integers(1, 6), min_size=1, max_size=3),
)
def test_any_sequence_of_batches_equals_eager(
    steps: list[list[int]], kinds: list[str], buckets: set[int]
) -> None:
    shapes = tuple(sorted(buckets))
    eager, padded, graphs = rig("none", (), kinds), rig("none", shapes, kinds), rig("tape", shapes, kinds)
    for chosen in steps:
        output = graphs.step(chosen)
        assert equal(output, padded.step(chosen))
        assert agree(output, eager.step(chosen))
    assert same_state(graphs, padded)


ADJUSTED = SamplingParams(
    max_tokens=99,
    temperature=0.9,
    min_p=0.02,
    repetition_penalty=1.2,
    presence_penalty=0.3,
    frequency_penalty=0.4,
    logit_bias=((3, 2.0), (9, -100.0)),
    min_tokens=6,
    stop_token_ids=(1, 2, 14),
    seed=9,
)


@pytest.mark.parametrize("buckets", [(1, 2, 4), (5,)])
def test_adjusted_logits_after_a_replay_equal_eager(buckets: tuple[int, ...]) -> None:
    """Penalties need state of their own, so the graph of such a batch ends with the logits; others count nothing."""
    params = [ADJUSTED, PARAMS[GREEDY], replace(ADJUSTED, temperature=0.0), PARAMS[FILTERED], ADJUSTED]
    eager, graphs = (DecodeRig(PROMPTS, params, BACKENDS[name](), buckets) for name in ("none", "tape"))
    for chosen in STEPS:
        assert equal(graphs.step(chosen), eager.step(chosen))
    said = [sum(request in chosen for chosen in STEPS) + 1 for request in range(5)]
    seen = graphs.relay.adjustments.penalties.seen
    assert torch.equal(seen, eager.relay.adjustments.penalties.seen)
    assert [int((seen[row] >> 1).sum()) for row in (1, 3, 5)] == [said[0], said[2], said[4]]
    assert not seen[0].any()
    replays = graphs.graphs.graphs.counters.replays
    alone = [chosen for chosen in STEPS if not set(chosen) & {0, 2, 4}]
    assert sum(count for key, count in replays.items() if key.variant != LOGITS) == len(alone) > 0


def test_tokens_do_not_depend_on_who_shares_the_batch() -> None:
    """Replays give each request the same tokens by itself and in a batch."""
    together, alone = rig("tape", (1, 5)), rig("tape", (1, 5))
    tokens = [together.step(range(5)).token_ids.tolist() for _ in range(4)]
    for request in range(5):
        assert [alone.step([request]).token_ids.item() for _ in range(4)] == [row[request] for row in tokens]


def test_the_padding_row_stays_clean_and_poison_in_it_reaches_nobody() -> None:
    """After any number of padded steps relay row 0 is unchanged, and its content affects no request."""
    clean, graphs = rig("tape", (5,)), rig("tape", (5,))
    relay = graphs.relay
    for column, worst in (
        (relay.sampling.temperature, torch.nan),
        (relay.sampling.top_p, torch.nan),
        (relay.sampling.seed, 2**63 - 1),
    ):
        column[0] = worst
    relay.sampling.top_k[0] = 2**31 - 1
    for chosen in ([0, 3], [1], [2, 1], [3, 0, 4]):
        assert equal(graphs.step(chosen), clean.step(chosen))
    assert (relay.last_token[0], relay.seq_len[0]) == (0, 0)
    assert not graphs.pool.key(0)[0].any()
    assert not graphs.table.pages[0].any()


def test_tokens_outlive_the_next_replay() -> None:
    """The host reads step t after step t+1 was launched, so kept outputs are clones."""
    graphs = rig("tape", (2,))
    first = graphs.step([0, 1])
    values = first.token_ids.clone()
    for _ in range(3):
        later = graphs.step([0, 1])
        assert later.token_ids.data_ptr() != first.token_ids.data_ptr()
        assert later.invalid.data_ptr() != first.invalid.data_ptr()
    assert torch.equal(first.token_ids, values)


@pytest.mark.parametrize(
    ("facts", "variants"),
    [
        (SamplingVariant(True, False, None), (GREEDY, RANDOM, FILTERED, LOGITS)),
        (SamplingVariant(False, False, None), (RANDOM, FILTERED, LOGITS)),
        (SamplingVariant(False, True, None), (FILTERED, LOGITS)),
        (SamplingVariant(True, False, 0), (LOGITS,)),
        (SamplingVariant(False, True, 5), (LOGITS,)),
        (SamplingVariant(True, False, None, AdjustmentFacts(False, 0, 1)), (LOGITS,)),
    ],
)
def test_a_costlier_variant_serves_where_the_cheaper_one_is_not_captured(
    facts: SamplingVariant, variants: tuple[str, ...]
) -> None:
    assert serving_variants(facts) == variants


@pytest.mark.parametrize("variants", [(FILTERED,), (LOGITS,), (GREEDY, LOGITS), (RANDOM, FILTERED, LOGITS)])
def test_each_variant_by_itself_gives_the_same_tokens(variants: tuple[str, ...]) -> None:
    """Disabled filters, and the temperature of greedy rows, are exact, so fewer graphs may be captured."""
    eager, graphs = rig("none", ()), rig("tape", (5,), variants=variants)
    for chosen in STEPS:
        assert agree(graphs.step(chosen), eager.step(chosen))
    fallbacks = graphs.graphs.graphs.counters.fallbacks
    assert fallbacks == (
        {} if LOGITS in variants else {Fallback.VARIANT: sum(3 in chosen for chosen in STEPS)}
    )


def test_only_decode_is_captured_in_the_shapes_of_the_ladder() -> None:
    """Row A10: a decode node captures requests of width one and no prompts."""
    buckets = decode_request_buckets(6)
    graphs = rig("tape", buckets).graphs.graphs
    assert {(row.phase, row.model) for row in graphs.rows} == {("decode", "target")}
    assert [row.requests for row in graphs.rows if row.variant == GREEDY] == [6, 4, 2, 1]
    assert all(row.tokens == row.requests and row.breaks == 0 for row in graphs.rows)
    assert not graphs.counters.replays


def test_every_captured_graph_replays() -> None:
    """Over a mixed load every captured graph of every variant replays."""
    buckets = decode_request_buckets(5)
    kinds = [GREEDY, GREEDY, GREEDY, GREEDY, GREEDY, RANDOM, FILTERED, LOGITS]
    prompts, params = sequences([5] * len(kinds)), [PARAMS[kind] for kind in kinds]
    graphs = DecodeRig(prompts, params, BACKENDS["tape"](), buckets)
    for count in buckets:
        for last in (0, 5, 6, 7):
            graphs.step([last, *range(1, count)])
    totals = graphs.graphs.graphs.totals()
    assert (totals.captured, totals.unused) == (4 * len(buckets), 0)


def test_a_batch_fits_a_graph_or_gets_a_reason() -> None:
    """The decode graph answers for each batch whether it can run, and without graphs names that reason (row B4)."""
    graphs = rig("tape", (1, 4)).graphs.graphs
    facts = SamplingVariant(True, False, None)
    for count, found in ((1, 1), (2, 4), (4, 4), (5, None)):
        shape, reason = fitting_graph(graphs, DecodeCall(torch.ones(count, dtype=torch.int64), facts))
        assert (shape and shape.requests, reason) == (found, "" if found else "too_large")
    assert decode_spec(()).shapes == ()


def test_a_long_run_of_one_request_crosses_pages() -> None:
    eager, graphs = rig("none", ()), rig("tape", (1, 2))
    order = random.Random(0)
    for _ in range(35):
        chosen = order.sample(range(5), k=order.randint(1, 2))
        assert equal(
            graphs.step([0, *[c for c in chosen if c != 0]]), eager.step([0, *[c for c in chosen if c != 0]])
        )
    assert same_state(graphs, eager)
