"""Penalties, biases and suppressed tokens against transformers' processors and the definition, token by token."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation.logits_process import (
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from common.engine.ops.filter_floor import filter_floor_reference
from common.engine.ops.penalise import penalise_reference, penalise_triton
from common.engine.ops.triton_kernel import tl
from common.engine.sampling.logit_adjustments import AdjustmentRows, Adjustments, adjustment_bytes
from common.engine.sampling.sampler import sample
from common.engine.sampling.sampling_plan import AdjustmentFacts, adjustment_facts
from common.messages.generation import MAX_BIASES, SamplingParams
from tests.fakes.tiny_model import adjusted
from tests.unit.engine.test_sampler import make

CPU, VOCAB = torch.device("cpu"), 40
INTERPRETED = pytest.mark.skipif(
    tl is None or torch.cuda.is_available(), reason="compiled kernels: tests/gpu"
)
PARAMS = {
    "nothing": SamplingParams(max_tokens=9),
    "repetition": SamplingParams(max_tokens=9, repetition_penalty=1.7),
    "repetition-below-1": SamplingParams(max_tokens=9, repetition_penalty=0.6),
    "presence": SamplingParams(max_tokens=9, presence_penalty=1.5),
    "frequency": SamplingParams(max_tokens=9, frequency_penalty=-0.7),
    "bias": SamplingParams(max_tokens=9, logit_bias=((0, 3.0), (7, -100.0), (39, 2.5))),
    "one-bias": SamplingParams(max_tokens=9, logit_bias=((5, -1.0),)),
    "minimum": SamplingParams(max_tokens=9, min_tokens=4, stop_token_ids=(0, 11)),
    "all": SamplingParams(
        max_tokens=9,
        repetition_penalty=1.2,
        presence_penalty=0.3,
        frequency_penalty=0.4,
        logit_bias=((3, 9.0), (4, -9.0)),
        min_tokens=3,
        stop_token_ids=(2, 4),
    ),
}


def text(length: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(VOCAB), k=length)


def apply(
    state: AdjustmentRows,
    params: Sequence[SamplingParams],
    rows: Sequence[int],
    logits: torch.Tensor,
    position: Sequence[int],
    path: Sequence[Sequence[int]] = (),
) -> torch.Tensor:
    facts = adjustment_facts(params)
    assert facts is not None
    paths = torch.tensor(path) if path else torch.empty(len(rows), 0, dtype=torch.int64)
    return Adjustments(state, torch.tensor(rows), facts, paths).apply(logits, torch.tensor(position))


def state_of(params: Sequence[SamplingParams], texts: Sequence[tuple[list[int], int]]) -> AdjustmentRows:
    """Return the state of requests in rows 1, 2, ..."""
    state = AdjustmentRows.allocate(len(params), VOCAB, CPU)
    for row, (sampling, (ids, outputs)) in enumerate(zip(params, texts), 1):
        state.write(row, sampling, ids, outputs)
    return state


def test_every_row_of_a_batch_by_its_own_parameters() -> None:
    params, logits = list(PARAMS.values()), torch.randn(len(PARAMS), VOCAB)
    texts = [(text(20, seed), seed) for seed in range(len(params))]
    state = state_of(params, texts)
    before = logits.clone()
    rows, position = range(1, len(params) + 1), [20] * len(params)
    found = apply(state, params, list(rows), logits, position)
    assert torch.equal(logits, before), "logprobs are computed from the raw logits"
    for row, (sampling, (ids, outputs)) in enumerate(zip(params, texts)):
        wanted = adjusted(logits[row : row + 1], ids[: 20 - outputs], ids[20 - outputs :], sampling)
        torch.testing.assert_close(found[row : row + 1], wanted, atol=1e-6, rtol=0, msg=str(sampling))
    assert torch.equal(found[0], logits[0]), "a row without adjustments does not change, bit for bit"


@pytest.mark.parametrize("name", [name for name in PARAMS if name != "nothing"])
def test_a_row_counts_what_is_drawn_as_if_it_had_been_written_with_it(name: str) -> None:
    sampling, said = PARAMS[name], text(12, 5)
    grown = state_of([sampling], [(said[:6], 1)])
    for length in range(7, 12):
        grown.count(torch.tensor([1]), torch.tensor([[said[length - 1]]]))
        fresh = state_of([sampling], [(said[:length], length - 5)])
        logits = torch.randn(1, VOCAB)
        found = [apply(state, [sampling], [1], logits, [length]) for state in (grown, fresh)]
        assert torch.equal(*found)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 6), st.integers(0, 5))
def test_a_path_of_drafts_counts_as_if_it_had_been_drawn(seed: int, requests: int, drafts: int) -> None:
    """Counts must be exact: speculation has to verify with the distribution that plain decoding draws from."""
    rng = random.Random(seed)
    params = [rng.choice(list(PARAMS.values())) for _ in range(requests)]
    params[0] = PARAMS["all"]
    texts = [(text(10, rng.random()), rng.randrange(4)) for _ in params]  # type: ignore[arg-type]
    paths = [[rng.choice([-1, *range(6)]) for _ in range(drafts)] for _ in params]
    rows, logits = list(range(1, requests + 1)), torch.randn(requests, VOCAB)
    position = [10 + sum(token >= 0 for token in path) for path in paths]
    found = apply(state_of(params, texts), params, rows, logits, position, paths if drafts else ())
    behind = [[token for token in path if token >= 0] for path in paths]
    later = [(ids + more, outputs + len(more)) for (ids, outputs), more in zip(texts, behind)]
    assert torch.equal(found, apply(state_of(params, later), params, rows, logits, position))


def test_only_the_chosen_tokens_are_counted_and_the_same_one_twice_counts_twice() -> None:
    sampling = PARAMS["frequency"]
    state = state_of([sampling] * 2, [([1, 2], 1)] * 2)
    times = torch.tensor([[True, True, False], [True, False, False]])
    state.count(torch.tensor([1, 2]), torch.tensor([[5, 5, 5], [5, 5, 5]]), times)
    assert state.penalties.seen[1, [1, 2, 5]].tolist() == [1, 2, 4]
    assert state.penalties.seen[2, [1, 2, 5]].tolist() == [1, 2, 2]
    assert not state.penalties.seen[0].any()


def test_a_row_that_changes_hands_keeps_nothing() -> None:
    state = state_of([PARAMS["all"]], [(text(20, 1), 9)])
    logits = torch.randn(1, VOCAB)
    state.write(1, PARAMS["nothing"], [1, 2, 3], 1)
    assert torch.equal(apply(state, [PARAMS["all"]], [1], logits, [3]), logits)
    for name in ("minimum", "one-bias", "presence"):
        state.write(1, PARAMS["all"], text(20, 1), 9)
        state.write(1, PARAMS[name], [1, 2, 3], 1)
        # widths that another request of the batch may need
        found = apply(state, [PARAMS["all"]], [1], logits, [3])
        torch.testing.assert_close(found, adjusted(logits, [1, 2], [3], PARAMS[name]))


def test_the_facts_of_a_batch() -> None:
    assert adjustment_facts([]) is None
    off = SamplingParams(max_tokens=9, stop_token_ids=(1, 2))
    assert adjustment_facts([off, SamplingParams(max_tokens=9, min_tokens=5)]) is None  # nothing to suppress
    assert adjustment_facts([off, *PARAMS.values()]) == AdjustmentFacts(True, 3, 2)
    assert adjustment_facts([PARAMS["one-bias"]]) == AdjustmentFacts(False, 1, 0)
    assert adjustment_facts([off, PARAMS["minimum"]]) == AdjustmentFacts(False, 0, 2)


def test_memory_equals_its_estimate() -> None:
    state = AdjustmentRows.allocate(5, VOCAB, CPU)
    parts = (state.penalties, state.bias, state.withheld)
    held = [getattr(part, field.name) for part in parts for field in fields(part)]
    assert sum(tensor.nbytes for tensor in [*held, state.free_at]) == adjustment_bytes(5, VOCAB)


@pytest.mark.parametrize("penalty", [0.5, 1.1, 2.0])
def test_repetition_equals_transformers(penalty: float) -> None:
    ids, logits = text(15, 3), torch.randn(1, VOCAB)
    sampling = SamplingParams(max_tokens=9, repetition_penalty=penalty)
    found = apply(state_of([sampling], [(ids, 6)]), [sampling], [1], logits, [15])
    wanted = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([ids]), logits.clone())
    torch.testing.assert_close(found, wanted, atol=1e-6, rtol=0)


def test_biases_equal_transformers() -> None:
    biases = tuple((token, float(token) - 20.0) for token in range(VOCAB))
    sampling, logits = SamplingParams(max_tokens=9, logit_bias=biases), torch.randn(1, VOCAB)
    found = apply(state_of([sampling], [([1], 0)]), [sampling], [1], logits, [1])
    wanted = SequenceBiasLogitsProcessor([[[token], bias] for token, bias in biases])(
        torch.tensor([[1]]), logits
    )
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("outputs", [0, 1, 3, 4, 5])
def test_withheld_tokens_equal_transformers(outputs: int) -> None:
    ids, logits, sampling = text(12, 3), torch.randn(1, VOCAB), PARAMS["minimum"]
    found = apply(state_of([sampling], [(ids, outputs)]), [sampling], [1], logits, [12])
    process = MinNewTokensLengthLogitsProcessor(
        12 - outputs, sampling.min_tokens, list(sampling.stop_token_ids), "cpu"
    )
    assert torch.equal(found, process(torch.tensor([ids]), logits))
    assert bool(found.isinf().any()) == (outputs < 4)


@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.8])
@pytest.mark.parametrize("min_p", [0.01, 0.1, 0.5, 1.0])
def test_min_p_equals_transformers(min_p: float, temperature: float) -> None:
    torch.manual_seed(0)
    logits = 3 * torch.randn(50, 300)
    ones = torch.ones(50)
    floor = filter_floor_reference(logits, temperature * ones, 0 * ones.int(), ones, min_p * ones)
    warper: Any = MinPLogitsWarper(min_p)
    wanted = warper(torch.empty(50, 0), logits / temperature)
    assert torch.equal(logits >= floor[:, None], wanted.isfinite())


def test_min_p_comes_before_the_nucleus() -> None:
    """Min-p 0.25 leaves three of 0.5, 0.3, 0.15 and 0.05, and the first two have 0.84 of their mass."""
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()
    for top_p, kept in ((1.0, 3), (0.85, 3), (0.83, 2), (0.5, 1)):
        args = torch.ones(1), torch.zeros(1, dtype=torch.int32), torch.tensor([top_p]), torch.tensor([0.25])
        assert (logits >= filter_floor_reference(logits, *args)[:, None]).sum() == kept


def test_logprobs_stay_those_of_the_raw_logits_and_bad_rows_are_still_seen() -> None:
    torch.manual_seed(3)
    logits, params = torch.randn(3, VOCAB), [PARAMS["all"], PARAMS["bias"], PARAMS["minimum"]]
    logits[1, 7], logits[2, 11] = torch.nan, torch.inf  # at a bias and at a suppressed token
    state, facts = state_of(params, [(text(9, 1), 2)] * 3), adjustment_facts(params)
    assert facts is not None
    rows = torch.tensor([1, 2, 3])
    adjust = Adjustments(state, rows, facts, rows.new_empty(3, 0))
    batch = make(3, temperature=0.0, all_greedy=True, num_logprobs=4, position=9, adjust=adjust)
    out = sample(logits, batch)
    assert out.invalid.tolist() == [False, True, True]
    assert out.token_ids[0] == 3 != logits[0].argmax()  # the bias decides
    assert out.logprobs is not None
    assert out.top_ids is not None
    expected = logits.log_softmax(-1)
    assert out.logprobs[0] == expected[0, 3]
    assert out.top_ids[0].tolist() == expected[0].topk(4).indices.tolist()


def test_a_bias_may_name_as_many_tokens_as_it_says() -> None:
    many = tuple((token, 1.0) for token in range(MAX_BIASES))
    sampling = SamplingParams(max_tokens=1, logit_bias=many)
    state = AdjustmentRows.allocate(1, MAX_BIASES + 3, CPU)
    state.write(1, sampling, [1], 0)
    out = apply(state, [sampling], [1], torch.zeros(1, MAX_BIASES + 3), [1])
    assert out.sum() == MAX_BIASES


@INTERPRETED
@pytest.mark.parametrize("vocab", [50, 5000])
@pytest.mark.parametrize("width", [0, 1, 5])
def test_the_kernel_equals_the_reference(vocab: int, width: int) -> None:
    torch.manual_seed(vocab + width)
    rows = torch.tensor([[2, 9], [0, 9], [3, 9], [3, 9], [1, 9]])[:, 0]  # with strides, as in a round's state
    logits, seen = 3 * torch.randn(5, vocab), torch.randint(0, 7, (4, vocab), dtype=torch.int32)
    logits[0, 3], logits[1, 4], logits[2, 5] = torch.nan, -torch.inf, torch.inf
    path = torch.randint(-1, 4, (width, 5)).t()
    factors = torch.rand(4) + 0.5, torch.randn(4), torch.randn(4)
    args = logits, seen, rows, *factors, path
    found, wanted = penalise_triton(*args), penalise_reference(*args)
    torch.testing.assert_close(found, wanted, atol=0, rtol=0, equal_nan=True)
