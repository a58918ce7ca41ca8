"""`priority`: what a client may ask for, and that it reaches the queue of the router and both nodes."""

from __future__ import annotations

import pytest

from common.errors import InvalidRequest
from common.messages.generation import SamplingParams
from router.auth.gates import KeyGate
from router.auth.keys import KeyRing
from router.auth.quotas import Quotas
from router.dispatch.generation import GenerationRequest
from router.requests.checks import check_priority
from tests.fakes.api_keys import api_key, bearer
from tests.fakes.clock import Clock
from tests.fakes.router_rig import Client, legs, router_rig
from tests.unit.router.conftest import Rig, Serve
from tests.unit.router.dispatch.test_dispatcher import first_token
from tests.unit.router.scripted_generator import one_by_one

KEYS = (
    api_key("plain", "plain"),
    api_key("urgent", "urgent", priority=-5),
    api_key("batch", "batch", priority=3),
)


def test_what_a_client_may_ask_for() -> None:
    assert [check_priority(None, least) for least in (-20, 0, 3)] == [0, 0, 3]
    assert check_priority(-20, -20) == -20
    assert check_priority(20, 3) == 20
    for given, least in ((-21, -20), (21, -20), (-1, 0), (0, 3)):
        with pytest.raises(InvalidRequest) as caught:
            check_priority(given, least)
        assert caught.value.param == "priority"


async def test_without_keys_every_priority_is_taken(rig: Rig) -> None:
    rig.generator.will(*one_by_one([10]))
    for priority in (-20, 0, 20):
        assert (await rig.post("/v1/completions", {"prompt": "x", "priority": priority}))[0] == 200
    assert [each.priority for each in rig.generator.requests] == [-20, 0, 20]


async def test_a_key_has_a_limit_of_its_own(serve: Serve) -> None:
    ring, quotas = KeyRing(KEYS, lambda: 0.0), Quotas(Clock())
    rig = await serve(gate=KeyGate(ring, quotas, None, shared_cache=False, open_metrics=False))
    rig.generator.will(*one_by_one([10]))
    for key, priority, used in (
        ("plain", None, 0), ("plain", 4, 4), ("plain", -1, None), ("urgent", -5, -5), ("urgent", -6, None),
        ("urgent", None, 0), ("batch", None, 3), ("batch", 2, None),
    ):  # fmt: skip
        body = {"prompt": "x"} if priority is None else {"prompt": "x", "priority": priority}
        status, answer, _ = await rig.post("/v1/completions", body, bearer(key))
        if used is None:
            assert (status, answer["error"]["param"]) == (400, "priority")
        else:
            assert status == 200
            assert rig.generator.requests[-1].priority == used


async def test_both_nodes_learn_it() -> None:
    async with router_rig() as rig:
        prefill, decode = await rig.pair()
        asked = GenerationRequest("r1", [1, 2, 3], SamplingParams(max_tokens=5), priority=-7)
        client = Client(rig.dispatcher.generate(asked))
        reserve, prompt = await legs(prefill, decode)
        assert reserve.priority == prompt.priority == -7
        first_token(prefill, prompt.room, 50, "stop")
        await client.done()
