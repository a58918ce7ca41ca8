"""The sampling variant of a batch, and that it is computed once per composition."""

from __future__ import annotations

import pytest

from common.engine.sampling import sampling_plan
from common.engine.sampling.sampling_plan import LatestVariant, sampling_variant
from common.messages.generation import SamplingParams


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
