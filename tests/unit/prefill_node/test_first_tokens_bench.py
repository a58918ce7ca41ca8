"""The simulation of first tokens: a queue of thousand-token prompts, by the former policy and by cost."""

from __future__ import annotations

import numpy as np

from tests.bench.first_tokens import (
    HOST_MS,
    MIXES,
    POLICIES,
    Row,
    arrivals,
    h200,
    measure,
    simulate,
)

FORMER, *_, CURRENT = POLICIES


def test_first_tokens_come_sooner_than_by_packing() -> None:
    rows: dict[str, Row] = {policy: measure("1024", 32.0, policy, 10.0, 1) for policy in (FORMER, CURRENT)}
    former, current = rows[FORMER], rows[CURRENT]
    assert current.p50[0] < 0.9 * former.p50[0]
    assert current.p99[0] < 0.75 * former.p99[0]


def test_every_prompt_gets_its_first_token_after_its_own_forward_at_the_earliest() -> None:
    curve = h200()
    for policy in POLICIES.values():
        prompts = arrivals(MIXES["mix"], 12.0, 3.0, 7)
        waits = simulate(prompts, policy, curve)
        alone = [curve.ms(each.num_tokens) for each in prompts if each.num_tokens <= 1024]
        short = [wait for wait, each in zip(waits, prompts, strict=True) if each.num_tokens <= 1024]
        assert all(wait >= least - 1e-6 for wait, least in zip(short, alone, strict=True))
        assert np.isclose(waits[0], curve.prompt_ms(prompts[0].num_tokens) + HOST_MS, rtol=0.05)
