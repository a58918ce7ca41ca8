"""Ids of requests: in a header, as `request_id` (vLLM) or as `rid` (SGLang) in the body."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.router.conftest import Rig
from tests.unit.router.dispatch.test_running_requests import flight
from tests.unit.router.scripted_generator import one_by_one

CHAT = ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}, "chatcmpl-")
COMPLETION = ("/v1/completions", {"prompt": [300, 301]}, "cmpl-")
RESPONSE = ("/v1/responses", {"input": "a"}, "resp_")


@pytest.mark.parametrize(("path", "body", "prefix"), [CHAT, COMPLETION, RESPONSE])
@pytest.mark.parametrize("padding", [0, 1 << 16])
async def test_an_id_in_the_body_is_that_of_the_request(
    rig: Rig, path: str, body: dict[str, Any], prefix: str, padding: int
) -> None:
    rig.generator.will(*one_by_one([300]))
    padded = body | {"user": "x" * padding}
    names = ("request_id",) if path == RESPONSE[0] else ("request_id", "rid")
    for name in names:
        # As in a header, what does not belong in logs is left out.
        _, answer, headers = await rig.post(path, padded | {name: "mine/1 \n"})
        assert (answer["id"], headers["x-request-id"]) == (f"{prefix}mine/1", "mine/1")
        assert rig.generator.requests[-1].request_id == "mine/1"
        events = await rig.raw(path, padded | {name: "mine-2", "stream": True})
        assert f'"id":"{prefix}mine-2"'.encode() in events
        for wrong in ("", "x" * 129, 5, ["a", "b"]):
            status, answer, _ = await rig.post(path, padded | {name: wrong})
            assert (status, answer["error"]["param"]) == (400, name)


@pytest.mark.parametrize("padding", [0, 1 << 16])
async def test_each_prompt_of_completions_may_have_an_id(rig: Rig, padding: int) -> None:
    """The request keeps the id of its header."""
    rig.generator.will(*one_by_one([300]))
    body = {"prompt": ["a", "b"], "rid": ["mine/1 ", "mine/2"], "user": "x" * padding}
    _, answer, headers = await rig.post(COMPLETION[0], body, {"X-Request-Id": "all"})
    assert (answer["id"], headers["x-request-id"]) == ("cmpl-all", "all")
    assert sorted(each.request_id for each in rig.generator.requests) == ["mine/1", "mine/2"]
    assert all(each.known_as == ("all",) for each in rig.generator.requests)
    for wrong, param in ((["a"], "rid"), (["a", "a"], "rid[1]"), (["a", " "], "rid[1]"), ([], None)):
        status, answer, _ = await rig.post(COMPLETION[0], body | {"rid": wrong})
        assert (status, answer.get("error", {}).get("param")) == (200 if param is None else 400, param)


@pytest.mark.parametrize(("path", "body", "prefix"), [CHAT, COMPLETION])
async def test_a_header_goes_before_request_id_and_rid_before_both(
    rig: Rig, path: str, body: dict[str, Any], prefix: str
) -> None:
    rig.generator.will(*one_by_one([300]))
    header = {"X-Request-Id": "header"}
    for fields, expected in (
        ({"request_id": "vllm"}, "header"),
        ({"rid": "sglang"}, "sglang"),
        ({"rid": "sglang", "request_id": "vllm"}, "sglang"),
        # Nothing is left of these ids.
        ({"rid": "  "}, "header"),
    ):
        _, answer, headers = await rig.post(path, body | fields, header)
        assert (answer["id"], headers["x-request-id"]) == (prefix + expected, expected)
    _, answer, headers = await rig.post(path, body | {"request_id": "  "})
    assert answer["id"] == prefix + headers["x-request-id"] != prefix


@pytest.mark.parametrize(("path", "body", "prefix"), [CHAT, COMPLETION, RESPONSE])
async def test_a_conversation_is_named_in_the_body_or_a_header(
    rig: Rig, path: str, body: dict[str, Any], prefix: str
) -> None:
    rig.generator.will(*one_by_one([300]))
    await rig.post(path, body, {"X-Session-Id": "one"})
    for name in ("one", "two"):
        await rig.post(path, body | {"session_id": name})
    first, same, other = (asked.session for asked in rig.generator.requests)
    assert first == same != other
    assert first


async def test_an_abort_finds_an_id_as_the_client_wrote_it(rig: Rig) -> None:
    running = flight("mine1", "127.0.0.1")
    rig.running.add(running)
    await rig.session.post(rig.url + "/abort_request", json={"rid": "chatcmpl-mine 1"})
    assert running.aborted
