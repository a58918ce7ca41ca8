"""Limits and structured output of chats and completions hold for the translated APIs, because they run as those."""

from __future__ import annotations

import json
from typing import Any

import pytest

from common.errors import InvalidRequest, Unavailable
from router.apis.tasks import READERS
from router.auth.gates import KeyGate
from router.auth.keys import KeyRing
from router.auth.quotas import Quotas
from router.requests.chat_fields import MAX_VALUES
from tests.fakes.api_keys import api_key, bearer
from tests.fakes.clock import Clock
from tests.unit.router.auth.test_gates import NOW
from tests.unit.router.conftest import Rig, Serve
from tests.unit.router.routes.test_openai_disconnect import connect, leave, running
from tests.unit.router.scripted_generator import one_by_one

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


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


async def test_a_schema_constrains_the_answers_of_all_routes(rig: Rig) -> None:
    """The generator gets the same grammar whatever the form of the request."""
    rig.generator.will(*one_by_one([331, 300, 301]))
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    text = {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA, "strict": True}}
    for path, body in (
        ("/v1/chat/completions", {"messages": [USER], "response_format": wanted}),
        ("/v1/responses", {"input": "Hello", "text": text}),
        ("/generate", {"text": "Hello", "sampling_params": {"json_schema": json.dumps(SCHEMA)}}),
    ):
        status, answer, _ = await rig.post(path, body)
        assert status == 200, answer
    grammars = {asked.sampling.grammar for asked in rig.generator.requests}
    assert len(grammars) == 1
    assert grammars != {""}
    for path, body, param in (
        ("/generate", {"text": "x", "sampling_params": {"regex": "("}}, "sampling_params.regex"),
        ("/v1/responses", {"input": "x", "text": {"format": {"type": "x"}}}, "text.format.type"),
    ):
        status, answer, _ = await rig.post(path, body)
        assert (status, answer["error"]["param"]) == (400, param)


@pytest.mark.parametrize(
    ("api", "tool", "field"),
    [
        ("responses", {"type": "function", "name": "f"}, "parameters"),
        ("messages", {"name": "f"}, "input_schema"),
        ("count_tokens", {"name": "f"}, "input_schema"),
    ],
)
def test_a_worker_refuses_tools_that_the_router_would_take_long_to_decode(
    api: str, tool: dict[str, Any], field: str
) -> None:
    values = {"enum": [0] * (MAX_VALUES + 1)}
    body = {**BODIES.get(f"/v1/{api}", BODIES["/v1/messages"]), "tools": [{**tool, field: values}]}
    with pytest.raises(InvalidRequest, match="too many values") as refused:
        READERS[api].packed(json.dumps(body).encode())
    assert refused.value.param == f"tools[0].{field}"
