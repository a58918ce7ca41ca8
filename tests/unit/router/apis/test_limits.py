"""The limits of chats and completions hold for the translated APIs, because they run as those."""

from __future__ import annotations

from typing import Any

import pytest

from common.errors import Unavailable
from router.auth import KeyGate
from router.auth_keys import KeyRing
from router.auth_limits import Quotas
from tests.fakes.api_keys import api_key, bearer
from tests.fakes.clock import Clock
from tests.unit.router.conftest import Rig, Serve
from tests.unit.router.scripted_generator import one_by_one
from tests.unit.router.test_auth import NOW
from tests.unit.router.test_openai_routes_disconnect import connect, leave, running

USER = {"role": "user", "content": "Hello"}
BODIES: dict[str, Any] = {
    "/generate": {"text": "Hello"},
    "/v1/responses": {"input": "Hello"},
    "/v1/messages": {"messages": [USER], "max_tokens": 9},
}


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_ends_its_request(rig: Rig, path: str, stream: bool) -> None:
    rig.generator.will(300.0)
    _, writer = await connect(rig, path, {**BODIES[path], "stream": stream})
    await running(rig, 1)
    await leave(writer)
    await rig.settled(1)


@pytest.mark.parametrize("path", BODIES)
async def test_a_key_at_its_limit_is_refused(serve: Serve, path: str) -> None:
    key = api_key("secret", "team", tokens_per_minute=5)
    gate = KeyGate(KeyRing([key], lambda: NOW), Quotas(Clock()), None, False, False)
    rig = await serve(gate=gate)
    rig.generator.will(*one_by_one([331, 300, 301]))
    assert (await rig.post(path, BODIES[path], bearer("secret")))[0] == 200
    status, answer, headers = await rig.post(path, BODIES[path], bearer("secret"))
    assert (status, answer["error"]["type"]) == (429, "rate_limit_error")
    assert int(headers["retry-after"]) > 0
    assert rig.generator.requests[0].client == "team"


@pytest.mark.parametrize("path", BODIES)
async def test_a_draining_router_refuses(rig: Rig, path: str) -> None:
    rig.refusal = Unavailable("draining")
    assert (await rig.post(path, BODIES[path]))[0] == 503
