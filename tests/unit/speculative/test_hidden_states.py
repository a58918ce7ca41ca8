"""Row A12: hidden states of every position, through both nodes: those of `transformers`, whatever happens meanwhile."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import msgspec
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from common.messages.router_inbox import MAX_STATE_BYTES
from common.node import hidden_states
from common.node.completion import Deferred, Immediate
from common.node.overlap import Completion
from tests.fakes import mtp_models
from tests.fakes.draft_models import branching, drafting
from tests.fakes.drafters import foresight, ngram
from tests.fakes.node_cluster import (
    Call,
    MakeStep,
    NodeCluster,
    NoDraftModel,
    Shape,
    autoregressive,
    with_forced_tokens,
)
from tests.fakes.scenarios import SAMPLED, expect_reference, prompt_of
from tests.fakes.tiny_model import CONFIG, MAX_LEN, VOCAB, tiny_model

TOLERANCE = 1e-4
BUCKETS = (1, 3)
CASES: dict[str, tuple[NoDraftModel, MakeStep]] = {
    "plain": (NoDraftModel(), autoregressive),
    "forced": (NoDraftModel(), with_forced_tokens),
    "foresight-tree": (NoDraftModel(), foresight(0.7, 9, 2, BUCKETS)),
    "ngram": (NoDraftModel(), ngram(3, BUCKETS)),
    "standalone": drafting("standalone", 3, BUCKETS),
    "eagle": drafting("eagle", 2, BUCKETS),
    "eagle3": drafting("eagle3", 3, BUCKETS),
    "eagle3-tree": branching("eagle3", 3, 2, 6, buckets=BUCKETS),
    "mtp": mtp_models.drafting("mtp", 2, BUCKETS),
}


@functools.cache
def transformers_model() -> LlamaForCausalLM:
    """The tiny model of the rig in transformers."""
    model = LlamaForCausalLM(
        LlamaConfig(
            hidden_size=CONFIG.hidden_size,
            num_hidden_layers=CONFIG.num_layers,
            num_attention_heads=CONFIG.num_heads,
            num_key_value_heads=CONFIG.num_kv_heads,
            head_dim=CONFIG.head_dim,
            intermediate_size=CONFIG.intermediate_size,
            vocab_size=VOCAB,
            max_position_embeddings=MAX_LEN,
            rms_norm_eps=CONFIG.rms_norm_eps,
            rope_parameters={"rope_type": "default", "rope_theta": CONFIG.rope.theta},
            tie_word_embeddings=False,
        )
    ).eval()
    tensors = model.state_dict()
    for piece in tiny_model().pieces():
        tensors[piece.name][piece.block] = piece.into
    return model


@torch.no_grad()
def expected(text: Sequence[int]) -> torch.Tensor:
    """Return [n, H]: the output of the final norm at every position."""
    output = transformers_model()(torch.tensor([list(text)]), output_hidden_states=True)
    last: torch.Tensor = output.hidden_states[-1][0]
    return last


def expect_states(call: Call, first: int = 0) -> None:
    """Expect the states of all positions that a token was drawn from, each once and in order."""
    call.sampling = msgspec.structs.replace(call.sampling, hidden_states_from=None)
    expect_reference(call)
    assert call.states is not None
    count = call.states.count(len(call.ids))
    assert count == len(call.prompt) + len(call.ids) - 1 - first
    found = torch.tensor([row for block in call.states.blocks(0, count) for row in block])
    wanted = expected(call.prompt + call.ids)[first:-1]
    torch.testing.assert_close(found, wanted, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize(
    ("name", "completion"), [("plain", Immediate), *((name, Deferred) for name in CASES)]
)
def test_states_equal_those_of_transformers(name: str, completion: type[Completion]) -> None:
    """Beside requests without them, in chunks, under graphs and above their sizes, with logprobs and sampled."""
    model, step = CASES[name]
    shape = Shape(
        draft=model, step=step, page_size=4, completion=completion, chunk_tokens=16, hidden_states=True
    )
    with NodeCluster(shape) as cluster:
        calls = [cluster.submit(prompt_of(n), 4 + n, hidden_states_from=0) for n in (1, 7, 35)]
        calls += [cluster.submit(prompt_of(9), 20, seed=3, hidden_states_from=0, **SAMPLED)]
        others = [cluster.submit(prompt_of(n), 12) for n in (2, 11)]
        cluster.run()
        calls += [cluster.submit(prompt_of(5), 9, hidden_states_from=0, logprobs=2)]
        cluster.run()
        expect_reference(*others)
        for call in calls:
            expect_states(call)
        cluster.settle()


@pytest.mark.parametrize("name", ["plain", "eagle3-tree"])
def test_retraction_repeats_and_loses_none(name: str) -> None:
    model, step = CASES[name]
    shape = Shape(
        draft=model,
        step=step,
        page_size=4,
        decode_pool=96,
        reserved_tokens=4,
        completion=Deferred,
        max_running=4,
        hidden_states=True,
    )
    with NodeCluster(shape) as cluster:
        calls = [cluster.submit(prompt_of(10 + n, n), 40, hidden_states_from=0) for n in range(4)]
        cluster.run()
        assert cluster.decode.link.counters.retractions > 0
        for call in calls:
            expect_states(call)
        cluster.settle()


@pytest.mark.parametrize(("name", "said"), [("plain", 1), ("ngram", 2), ("eagle3", 7)])
def test_another_node_continues_where_the_lost_one_ended(name: str, said: int) -> None:
    """The second prefill node sends only the states from the last token on."""
    model, step = CASES[name]
    with NodeCluster(Shape(draft=model, step=step, page_size=4, decodes=2, hidden_states=True)) as cluster:
        call = cluster.submit(prompt_of(18), 12, hidden_states_from=0)
        cluster.run(until=lambda: len(call.output) >= said)
        lost = call.decode
        cluster.kill(lost)
        cluster.lose(lost)
        cluster.run()
        assert call.attempts == 2
        assert call.sampling.hidden_states_from == 18 + call.base - 1
        assert call.cached_tokens, "what is known was not computed again"
        expect_states(call)
        cluster.settle()


def test_a_cached_prompt_is_computed_again_from_the_first_position_that_is_asked_for() -> None:
    with NodeCluster(Shape(page_size=4, hidden_states=True)) as cluster:
        for first, cached in ((0, 0), (9, 8), (20, 20), (0, 0)):
            call = cluster.submit(prompt_of(21), 4, hidden_states_from=first)
            cluster.run()
            assert call.cached_tokens == (cached if cluster.calls[1:] else 0)
            expect_states(call, first)
        cluster.settle()


def test_messages_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    row = 4 * CONFIG.hidden_size
    assert row <= MAX_STATE_BYTES
    monkeypatch.setattr(hidden_states, "MAX_STATE_BYTES", 3 * row + 1)
    with NodeCluster(Shape(hidden_states=True)) as cluster:
        call = cluster.submit(prompt_of(20), 5, hidden_states_from=0)
        cluster.run()
        expect_states(call)
        cluster.settle()


@pytest.mark.parametrize("legs", ["d", "p"])
def test_a_node_that_does_not_allow_them_captures_none_and_refuses(legs: str) -> None:
    with NodeCluster(Shape()) as cluster:
        call = cluster.submit(prompt_of(5), 4, legs=legs, hidden_states_from=0)
        cluster.run()
        assert call.error is not None
        assert (call.error.code, call.error.param) == ("invalid_value", "return_hidden_states")
        assert "model.return_hidden_states" in call.error.message
        modes = [phase.forward.graphs.spec.hidden.name for phase in cluster.decode.steps.graphs]
        assert modes == ["NULL"]
    with NodeCluster(Shape(hidden_states=True)) as cluster:
        modes = [phase.forward.graphs.spec.hidden.name for phase in cluster.decode.steps.graphs]
        assert modes == ["FULL"]
