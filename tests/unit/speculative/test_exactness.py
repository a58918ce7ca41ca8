"""A speculating decode node emits plain decoding's tokens, greedy and sampled, and accepts every right draft."""

from __future__ import annotations

import pytest

from common.messages.generation import SamplingParams
from common.node.completion import Deferred, Immediate
from common.node.overlap import Completion
from tests.fakes.covering import pairs
from tests.fakes.drafters import foresight, ngram
from tests.fakes.node_cluster import MakeStep, NodeCluster, Shape
from tests.fakes.scenarios import SAMPLED, expect_reference, expect_retraction, prompt_of
from tests.fakes.tiny_model import reference

STEPS: dict[str, MakeStep] = {
    "ngram-1": ngram(1),
    "ngram-3": ngram(3),
    "ngram-7": ngram(7),
    "never-right": foresight(0.0, 4, 1),
    "often-right": foresight(0.7, 5, 1),
    "always-right": foresight(1.0, 8, 1),
    "trees": foresight(0.8, 7, 2),
    "wide-trees": foresight(0.8, 9, 4),
}


@pytest.fixture(params=list(STEPS.values()), ids=list(STEPS))
def step(request: pytest.FixtureRequest) -> MakeStep:
    made: MakeStep = request.param
    return made


@pytest.mark.parametrize(
    ("name", "chunk", "page_size", "completion"),
    pairs(tuple(STEPS), (7, 64), (1, 16, 64), (Immediate, Deferred)),
)
def test_tokens_equal_plain_decoding(
    name: str, chunk: int, page_size: int, completion: type[Completion]
) -> None:
    shape = Shape(chunk_tokens=chunk, page_size=page_size, completion=completion, step=STEPS[name])
    with NodeCluster(shape) as cluster:
        calls = [cluster.submit(prompt_of(n), 9) for n in (1, 2, 15, 16, 17, 64, 65)]
        calls += [cluster.submit(prompt_of(n), 9, seed=n, **SAMPLED) for n in (3, 50)]
        # requests end at every position of a round
        calls += [cluster.submit(prompt_of(n), n) for n in (1, 2, 3, 4, 5)]
        cluster.run()
        expect_reference(*calls)
        cluster.settle()


def test_stops_inside_a_round(step: MakeStep) -> None:
    prompt = prompt_of(21)
    said = reference(tuple(prompt), SamplingParams(temperature=0.0, max_tokens=12))[0]
    with NodeCluster(Shape(step=step, page_size=4)) as cluster:
        calls = [cluster.submit(prompt, 12, stop_token_ids=(token,)) for token in said]
        calls += [cluster.submit(prompt, 12, logprobs=2)]
        cluster.run()
        expect_reference(*calls)
        assert all(token.logprob is not None for token in calls[-1].output)
        cluster.settle()


@pytest.mark.parametrize(
    ("name", "completion", "page_size"), pairs(tuple(STEPS), (Immediate, Deferred), (1, 4, 16))
)
def test_retracted_requests_resume_with_the_same_tokens(
    name: str, completion: type[Completion], page_size: int
) -> None:
    """The pool is too small for the batch, so requests are retracted."""
    shape = Shape(
        page_size=page_size,
        decode_pool=96,
        reserved_tokens=4,
        completion=completion,
        max_running=4,
        step=STEPS[name],
    )
    expect_retraction(shape)


def test_prefixes_of_answers_are_cached_right(step: MakeStep) -> None:
    """The next turn of a chat finds the KV of accepted tokens, and only of those."""
    with NodeCluster(Shape(page_size=4, step=step)) as cluster:
        history = prompt_of(21)
        for turn in range(4):
            call = cluster.submit(history, 11)
            cluster.run()
            expect_reference(call)
            history = call.prompt + call.ids + prompt_of(5, turn)
        cluster.settle()


def test_migration_at_every_token(step: MakeStep) -> None:
    prompt = prompt_of(18)
    for k in (1, 2, 5):
        with NodeCluster(Shape(page_size=4, decodes=2, step=step)) as cluster:
            call = cluster.submit(prompt, 9, seed=5, **SAMPLED)
            cluster.run(until=lambda call=call, k=k: len(call.output) >= k)  # type: ignore[misc]
            if call.over:
                continue
            lost = call.decode
            cluster.kill(lost)
            cluster.lose(lost)
            cluster.run()
            expect_reference(call)
            cluster.settle()


def test_aborts_leave_nothing(step: MakeStep) -> None:
    with NodeCluster(Shape(page_size=4, step=step, completion=Deferred)) as cluster:
        calls = [cluster.submit(prompt_of(9 + n), 30) for n in range(4)]
        cluster.run(until=lambda: len(calls[0].output) > 4)
        cluster.abort(calls[0])
        cluster.abort(calls[2])
        cluster.run()
        expect_reference(calls[1], calls[3])
        cluster.settle()


@pytest.mark.parametrize("completion", [Immediate, Deferred])
@pytest.mark.parametrize(
    ("name", "length"), [("never-right", 1.0), ("always-right", 8.0)], ids=["never-right", "always-right"]
)
def test_accept_length(name: str, length: float, completion: type[Completion]) -> None:
    """Drafts that are always right are all accepted, also if results are read one round late."""
    with NodeCluster(Shape(step=STEPS[name], completion=completion)) as cluster:
        call = cluster.submit(prompt_of(20), 65)  # the first token, then 8 rounds of 8
        cluster.run()
        expect_reference(call)
        cluster.settle()
        counters = cluster.decode.link.counters
        assert counters.avg_spec_accept_length == pytest.approx(length)
        assert counters.avg_spec_verified_length == pytest.approx(length)
        assert counters.spec_drafts > 0
        rounds = counters.spec_drafts
        assert counters.spec_accepted_tokens == round(rounds * (length - 1))


@pytest.mark.parametrize("completion", [Immediate, Deferred])
def test_accept_length_counts_what_is_emitted(completion: type[Completion]) -> None:
    """max_tokens 2 leaves room for only one token of a round that accepts more."""
    with NodeCluster(Shape(step=STEPS["always-right"], completion=completion)) as cluster:
        calls = [cluster.submit(prompt_of(20 + n), 2) for n in range(3)]
        cluster.run()
        expect_reference(*calls)
        cluster.settle()
        counters = cluster.decode.link.counters
        assert counters.avg_spec_accept_length == 1.0
        assert counters.avg_spec_verified_length > 1.0


@pytest.mark.parametrize("completion", [Immediate, Deferred])
def test_ngram_drafts_what_followed_the_same_text_before(completion: type[Completion]) -> None:
    """A second request with the same text gets right drafts from the third token on."""
    prompt = prompt_of(6, 3)
    answer = reference(tuple(prompt), SamplingParams(temperature=0.0, max_tokens=41))[0]
    with NodeCluster(Shape(step=ngram(4), completion=completion)) as cluster:
        for again in range(2):
            call = cluster.submit(prompt, 41)
            cluster.run()
            expect_reference(call)
            assert call.ids == answer
            counters = cluster.decode.link.counters
            if not again:
                first = counters.steps
        assert counters.steps - first <= 12, "40 tokens in rounds of 5, and few at the start"
        assert counters.spec_draft_tokens <= 4 * counters.spec_drafts
        assert counters.spec_accepted_tokens > 25
        cluster.settle()
