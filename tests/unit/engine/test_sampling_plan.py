"""The sampling variant of a batch, that it is computed once per composition, and when a request ends."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from common.engine.sampling import sampling_plan
from common.engine.sampling.sampling_plan import (
    LatestVariant,
    SamplingVariant,
    finish_reason,
    sampling_variant,
)
from common.messages.generation import SamplingParams, TokenRules

GREEDY = SamplingParams(max_tokens=5, temperature=0.0)
RANDOM = SamplingParams(max_tokens=5, temperature=1.0)


def test_the_variant_is_computed_once_per_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    computed = list[int]()

    def counted(params: list[SamplingParams]) -> sampling_plan.SamplingVariant:
        computed.append(len(params))
        return sampling_variant(params)

    monkeypatch.setattr(sampling_plan, "sampling_variant", counted)
    latest = LatestVariant()
    plain = [SamplingParams(max_tokens=n, temperature=0.0) for n in range(1, 65)]
    sampled = SamplingParams(max_tokens=9, top_p=0.5, logprobs=2)
    for batch in (plain, plain, [*plain], [*plain, sampled], [*plain, sampled], plain[:3], [], []):
        assert latest.of(iter(batch)) == sampling_variant(batch)
    # The first is that of an empty batch; the last two need no computation, as an empty batch has no parameters.
    assert computed == [0, 64, 65, 3, 0]


@pytest.mark.parametrize(
    ("params", "greedy", "filters", "logprobs", "masked"),
    [
        ([], True, False, None, False),
        ([GREEDY], True, False, None, False),
        ([GREEDY, RANDOM], False, False, None, False),
        ([RANDOM, replace(RANDOM, top_k=2), RANDOM], False, True, None, False),
        ([replace(GREEDY, logprobs=0)], True, False, 0, False),
        ([GREEDY, replace(GREEDY, logprobs=2), replace(GREEDY, logprobs=1)], True, False, 2, False),
        ([replace(GREEDY, grammar="{}"), GREEDY], True, False, None, True),
        ([replace(GREEDY, token_rules=TokenRules(allowed=(7,))), GREEDY], True, False, None, True),
    ],
)
def test_a_batch_has_the_variant_with_the_least_work_that_serves_all(
    params: list[SamplingParams], greedy: bool, filters: bool, logprobs: int | None, masked: bool
) -> None:
    expected = SamplingVariant(greedy, filters, logprobs, adjust=None, masked=masked)
    assert sampling_variant(iter(params)) == expected


def test_a_request_ends_at_a_stop_token_or_its_length() -> None:
    params = SamplingParams(max_tokens=3, stop_token_ids=(7, 9))
    assert [finish_reason(token, 2, params) for token in (7, 8, 9)] == ["stop", None, "stop"]
    assert [finish_reason(8, count, params) for count in (2, 3, 4)] == [None, "length", "length"]
    assert finish_reason(7, 3, params) == "stop"
