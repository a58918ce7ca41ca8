"""Limits of API keys: the buckets on a scripted clock, and what clients see of them over HTTP."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from common.errors import RateLimited
from router.auth.gates import KeyGate
from router.auth.keys import KeyRing
from router.auth.ledger import OwnLedger
from router.auth.quotas import Bucket, Quota, Quotas, duration
from tests.fakes.api_keys import api_key, bearer
from tests.fakes.clock import Clock
from tests.fakes.waiting import eventually
from tests.unit.router.conftest import Rig, Serve
from tests.unit.router.scripted_generator import delta, one_by_one

CHAT = "/v1/chat/completions"
BODY = {"messages": [{"role": "user", "content": "hi"}]}


@dataclass
class Used:
    prompt_tokens: int
    completion_tokens: int = 0


def quota(clock: Clock, **limits: int) -> Quota:
    return Quota(api_key("s", "k", **limits), clock, OwnLedger())


def test_requests_refill_all_the_time() -> None:
    clock = Clock()
    limited = quota(clock, requests_per_minute=3)
    for _ in range(3):
        limited.admit().release()
    with pytest.raises(
        RateLimited, match=r"API key k has used its requests_per_minute, 3; try again in 20s"
    ) as caught:
        limited.admit()
    assert caught.value.retry_after == pytest.approx(20)
    clock.now += 20.001
    limited.admit().release()
    with pytest.raises(RateLimited):
        limited.admit()
    clock.now += 1e6
    for _ in range(3):  # never more than a minute's allowance
        limited.admit().release()
    with pytest.raises(RateLimited):
        limited.admit()


def test_used_tokens_are_charged_afterwards() -> None:
    clock = Clock()
    limited = quota(clock, tokens_per_minute=60)
    first = limited.admit()
    used = Used(prompt_tokens=50)
    first.begin(1, used)
    second = limited.admit()  # 10 are left: it may start
    used.completion_tokens = 40
    first.release()
    second.begin(1, Used(0))
    second.release()
    with pytest.raises(RateLimited, match="tokens_per_minute, 60; try again in 31s"):
        limited.admit()
    clock.now += 31.001
    limited.admit()


def test_concurrency_counts_prompts() -> None:
    limited = quota(Clock(), concurrency=3)
    first, second = limited.admit(), limited.admit()
    with pytest.raises(RateLimited, match=r"3 prompts in flight \(concurrency\) and has 2"):
        first.begin(3, Used(1))
    first.begin(2, Used(1))
    with pytest.raises(RateLimited):
        limited.admit()
    first.release()
    third, fourth = limited.admit(), limited.admit()
    for each in (second, third, fourth):
        each.release()
    assert limited.running == 0


def test_an_admitted_request_of_one_prompt_is_not_refused_once_its_body_is_read() -> None:
    """The limit may have been lowered meanwhile, or another process may have admitted one at the same moment."""
    clock, key = Clock(), api_key("s", "k", concurrency=2)
    quotas = Quotas(clock)
    first, second = quotas.of(key).admit(), quotas.of(key).admit()
    quotas.replace([api_key("s", "k", concurrency=1)])
    first.begin(1, Used(1))
    with pytest.raises(RateLimited, match="concurrency"):
        second.begin(2, Used(1))
    for each in (first, second):
        each.release()
    assert quotas.of(key).running == 0


def test_a_refused_request_uses_nothing() -> None:
    limited = quota(Clock(), requests_per_minute=5, concurrency=1)
    admitted = limited.admit()
    for _ in range(9):
        with pytest.raises(RateLimited):
            limited.admit()
    admitted.release()
    assert limited.headers()["x-ratelimit-remaining-requests"] == "4"


def test_a_changed_file_keeps_what_was_used() -> None:
    clock = Clock()
    quotas = Quotas(clock)
    key = api_key("s", "k", requests_per_minute=2, concurrency=1)
    gone = api_key("t", "gone")
    admitted = quotas.of(key).admit()
    quotas.of(gone)
    quotas.replace([api_key("s", "k", requests_per_minute=2, concurrency=2)])
    assert len(quotas) == 1
    quotas.of(key).admit().release()
    with pytest.raises(RateLimited, match="requests_per_minute"):
        quotas.of(key).admit()
    quotas.replace([api_key("s", "k", requests_per_minute=9, concurrency=1)])
    with pytest.raises(RateLimited, match="concurrency"):
        quotas.of(key).admit()
    admitted.release()
    quotas.of(key).admit()


@given(
    st.integers(1, 1000),
    st.lists(st.tuples(st.floats(0, 100), st.integers(0, 2000)), max_size=30),
)
def test_a_bucket_gives_no_more_than_its_rate(per_minute: int, uses: list[tuple[float, int]]) -> None:
    """Usage while the bucket is not empty is at most a minute's allowance, the rate times the time and a last use."""
    clock, start = Clock(), Clock().now
    bucket, taken, last = Bucket(per_minute, clock.now), 0, 0
    for pause, amount in uses:
        clock.now += pause
        wait = bucket.seconds_until(1, clock.now)
        if wait == 0:
            bucket.take(amount, clock.now)
            taken, last = taken + amount, amount
        else:
            assert bucket.seconds_until(1, clock.now + wait + 1e-6) == 0
    assert taken - last <= per_minute * (1 + (clock.now - start) / 60) + 1e-6


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0ms"), (0.0121, "13ms"), (1, "1s"), (59.2, "1m0s"), (360, "6m0s"), (61.5, "1m2s")],
)
def test_durations_as_openai_writes_them(seconds: float, text: str) -> None:
    assert duration(seconds) == text


async def limited_rig(serve: Serve, **limits: int) -> Rig:
    keys = [api_key("secret-a", "team-a", **limits), api_key("secret-b", "team-b")]
    rig = await serve(gate=KeyGate(KeyRing(keys, lambda: 0.0), Quotas(Clock()), None, False, False))
    rig.generator.will(*one_by_one([50, 51, 52]))
    return rig


async def test_clients_see_their_limits(serve: Serve) -> None:
    rig = await limited_rig(serve, requests_per_minute=2, tokens_per_minute=1000)
    status, answer, headers = await rig.post(CHAT, BODY, bearer("secret-a"))
    assert status == 200
    used = answer["usage"]["total_tokens"]
    assert used > 3
    assert headers["x-ratelimit-limit-requests"] == "2"
    assert headers["x-ratelimit-remaining-requests"] == "1"
    assert headers["x-ratelimit-reset-requests"] == "30s"
    assert headers["x-ratelimit-limit-tokens"] == "1000"
    assert headers["x-ratelimit-remaining-tokens"] == str(1000 - used)
    assert await rig.raw(CHAT, {**BODY, "stream": True}, bearer("secret-a"))
    status, answer, headers = await rig.post(CHAT, BODY, bearer("secret-a"))
    assert (status, headers["retry-after"]) == (429, "30")
    assert answer["error"]["code"] == "rate_limit_exceeded"
    assert headers["x-ratelimit-remaining-requests"] == "0"
    assert int(headers["x-ratelimit-remaining-tokens"]) == 1000 - 2 * used
    assert "x-ratelimit-limit-requests" not in (await rig.post(CHAT, BODY, bearer("secret-b")))[2]
    async with rig.session.get(rig.url + "/v1/models", headers=bearer("secret-a")) as response:
        assert response.status == 200  # reads are not limited


async def test_requests_that_end_in_any_way_free_their_place(serve: Serve) -> None:
    rig = await limited_rig(serve, concurrency=1)
    rig.generator.scripts = [[delta([50]), 600.0]]
    stream = await rig.session.post(rig.url + CHAT, json={**BODY, "stream": True}, headers=bearer("secret-a"))
    assert stream.status == 200
    status, answer, headers = await rig.post(CHAT, BODY, bearer("secret-a"))
    assert (status, headers["retry-after"]) == (429, "1")
    assert "concurrency" in answer["error"]["message"]
    assert (await rig.post(CHAT, b"{", bearer("secret-b")))[0] == 400
    stream.close()
    await rig.settled(1)
    rig.generator.scripts = [[delta([50], "stop")]]

    async def again() -> bool:
        return (await rig.post(CHAT, BODY, bearer("secret-a")))[0] == 200

    while not await again():
        await asyncio.sleep(0.01)
    wrong: tuple[Any, ...] = (b"{", {"messages": []}, {"messages": "x"})
    for body in wrong:
        assert (await rig.post(CHAT, body, bearer("secret-a")))[0] == 400
    several = {"prompt": ["a", "b"]}
    assert (await rig.post("/v1/completions", several, bearer("secret-a")))[0] == 429
    assert (await rig.post("/v1/completions", several, bearer("secret-b")))[0] == 200
    assert await again()
    await eventually(lambda: not rig.generator.active)
