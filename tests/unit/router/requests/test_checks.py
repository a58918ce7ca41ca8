"""Conversion of fields to SamplingParams."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from common.checkpoint.generation_config import DefaultSampling
from common.errors import InvalidRequest
from router.requests.checks import check_prompt, sampling_params
from router.requests.openai_schema import ChatRequest, Message
from tests.unit.router.conftest import SERVED


def request(**fields: Any) -> ChatRequest:
    return ChatRequest(messages=[Message(role="user", content="x")], **fields)


def test_defaults_of_the_model_and_of_the_request() -> None:
    model = replace(SERVED, defaults=DefaultSampling(0.6, 0.9, 20))
    found = sampling_params(request(), 10, model, None, "max_tokens", None)
    assert (found.temperature, found.top_p, found.top_k) == (0.6, 0.9, 20)
    assert found.max_tokens == 4086
    found = sampling_params(request(temperature=0, top_p=1, top_k=0), 10, model, 7, "max_tokens", 2)
    assert (found.temperature, found.top_p, found.top_k, found.max_tokens, found.logprobs) == (0, 1, 0, 7, 2)
    found = sampling_params(request(), 10, SERVED, None, "max_tokens", None)
    assert (found.temperature, found.top_p, found.top_k) == (1.0, 1.0, 0)
    # Above OpenAI's limit, as in vLLM.
    assert sampling_params(request(temperature=7.5), 10, SERVED, None, "max_tokens", None).temperature == 7.5


def test_the_length_of_answers_that_the_model_states_is_a_default() -> None:
    """Clients that say a length get it, and so do those that say the least one."""
    model = replace(SERVED, defaults=DefaultSampling(max_tokens=512))

    def of(most: int | None, prompt: int = 10, **fields: object) -> int:
        return sampling_params(request(**fields), prompt, model, most, "max_tokens", None).max_tokens

    assert of(None) == 512
    assert of(None, 4000) == 96
    assert of(7) == 7
    assert of(1000) == 1000
    assert of(None, min_tokens=600) == 600


def test_penalties_biases_and_the_least_length() -> None:
    found = sampling_params(request(), 10, SERVED, None, "max_tokens", None)
    neutral = (found.min_p, found.repetition_penalty, found.presence_penalty, found.frequency_penalty)
    assert (*neutral, found.logit_bias, found.min_tokens) == (0, 1, 0, 0, (), 0)
    assert not found.penalised
    given = {"min_p": 0.1, "repetition_penalty": 1.5, "presence_penalty": -2, "frequency_penalty": 2}
    found = sampling_params(request(**given), 10, SERVED, None, "max_tokens", None)
    assert {name: getattr(found, name) for name in given} == given
    assert found.penalised
    found = sampling_params(request(logit_bias={"7": 1, "0": -100, "5": 0}), 1, SERVED, None, "", None)
    assert found.logit_bias == ((7, 1), (0, -100)), "a bias of 0 counts as none"
    model = replace(SERVED, defaults=DefaultSampling(min_p=0.05, repetition_penalty=1.1))
    found = sampling_params(request(), 1, model, None, "max_tokens", None)
    assert (found.min_p, found.repetition_penalty) == (0.05, 1.1)
    found = sampling_params(request(min_p=0, repetition_penalty=1), 1, model, None, "max_tokens", None)
    assert (found.min_p, found.repetition_penalty) == (0, 1)


def test_min_tokens_is_at_most_max_tokens_and_leaves_some_token_to_draw() -> None:
    def of(most: int | None, **fields: object) -> int:
        return sampling_params(request(**fields), 4090, SERVED, most, "max_tokens", None).min_tokens

    assert of(5, min_tokens=5) == 5
    assert of(None, min_tokens=6) == 6
    for most, least in ((5, 6), (None, 7)):
        with pytest.raises(InvalidRequest, match="min_tokens") as caught:
            of(most, min_tokens=least)
        assert caught.value.param == "min_tokens"
    tiny = replace(SERVED, vocab_size=3)
    with pytest.raises(InvalidRequest, match="every token"):
        sampling_params(request(stop_token_ids=[0, 1], min_tokens=1), 1, tiny, 5, "max_tokens", None)
    assert sampling_params(request(stop_token_ids=[0], min_tokens=1), 1, tiny, 5, "", None).min_tokens == 1


@pytest.mark.parametrize(("given", "used"), [(-1, 0), (0, 0), (1, 1), (703, 703), (704, 0), (2**40, 0)])
def test_top_k_that_keeps_everything_is_off(given: int, used: int) -> None:
    assert sampling_params(request(top_k=given), 1, SERVED, None, "max_tokens", None).top_k == used
    model = replace(SERVED, defaults=DefaultSampling(top_k=given))
    assert sampling_params(request(), 1, model, None, "max_tokens", None).top_k == used


@pytest.mark.parametrize("given", [0, 1, 2**63 - 1, -2, -(2**63)])
def test_seeds_are_63_bit(given: int) -> None:
    found = sampling_params(request(seed=given), 1, SERVED, None, "max_tokens", None)
    assert found.seed == given % 2**63


@pytest.mark.parametrize("given", [None, -1], ids=["none", "-1, as in vLLM"])
def test_requests_without_a_seed_differ(given: int | None) -> None:
    seeds = {sampling_params(request(seed=given), 1, SERVED, None, "max_tokens", None).seed for _ in range(8)}
    assert len(seeds) == 8


def test_stop_tokens() -> None:
    def of(**fields: object) -> tuple[int, ...]:
        return sampling_params(request(**fields), 1, SERVED, None, "max_tokens", None).stop_token_ids

    assert of() == (2,)
    assert of(stop_token_ids=[9, 5, 9]) == (2, 5, 9)
    assert of(ignore_eos=True) == ()
    assert of(ignore_eos=True, stop_token_ids=[5]) == (5,)


def test_prompt_length_is_looked_at_first() -> None:
    class Long(list[int]):
        def __iter__(self):  # type: ignore[no-untyped-def]
            raise AssertionError("not one by one")

    with pytest.raises(InvalidRequest, match="4096"):
        check_prompt(Long([1] * 5000), SERVED, "prompt")
