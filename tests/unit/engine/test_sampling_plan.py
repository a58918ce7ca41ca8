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
from common.messages.generation import SamplingParams

GREEDY = SamplingParams(max_tokens=5, temperature=0.0)
RANDOM = SamplingParams(max_tokens=5, temperature=1.0)


def test_the_variant_is_computed_once_per_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    computed = list[int]()

    def counted(params: list[SamplingParams], masked: bool = False) -> sampling_plan.SamplingVariant:
        computed.append(len(params))
        return sampling_variant(params, masked)

    monkeypatch.setattr(sampling_plan, "sampling_variant", counted)
    latest = LatestVariant()
    plain = [SamplingParams(max_tokens=n, temperature=0.0) for n in range(1, 65)]
    sampled = SamplingParams(max_tokens=9, top_p=0.5, logprobs=2)
    for batch in (plain, plain, [*plain], [*plain, sampled], [*plain, sampled], plain[:3], [], []):
        assert latest.of(iter(batch)) == sampling_variant(batch)
    # The first is that of an empty batch; the last two need no computation, as an empty batch has no parameters.
    assert computed == [0, 64, 65, 3, 0]
    for masked in (True, True, False):
        assert latest.of(iter(plain), masked) == sampling_variant(plain, masked)
    assert computed[5:] == [64, 64], "the same requests may need a mask in one step and none in the next"


@pytest.mark.parametrize(
    ("params", "greedy", "filters", "logprobs"),
    [
        ([], True, False, None),
        ([GREEDY], True, False, None),
        ([GREEDY, RANDOM], False, False, None),
        ([RANDOM, replace(RANDOM, top_k=2), RANDOM], False, True, None),
        ([replace(GREEDY, logprobs=0)], True, False, 0),
        ([GREEDY, replace(GREEDY, logprobs=2), replace(GREEDY, logprobs=1)], True, False, 2),
    ],
)
def test_a_batch_has_the_variant_with_the_least_work_that_serves_all(
    params: list[SamplingParams], greedy: bool, filters: bool, logprobs: int | None
) -> None:
    for masked in (False, True):
        expected = SamplingVariant(greedy, filters, logprobs, adjust=None, masked=masked)
        assert sampling_variant(iter(params), masked) == expected


def test_a_request_ends_at_a_stop_token_or_its_length() -> None:
    params = SamplingParams(max_tokens=3, stop_token_ids=(7, 9))
    assert [finish_reason(token, 2, params) for token in (7, 8, 9)] == ["stop", None, "stop"]
    assert [finish_reason(8, count, params) for count in (2, 3, 4)] == [None, "length", "length"]
    assert finish_reason(7, 3, params) == "stop"
