"""Tests all routes except those that generate text."""

from __future__ import annotations

import json
from typing import Any

import pytest

from router.routes.status import DEFAULT_LISTED, MAX_LISTED
from tests.fakes.api_keys import bearer
from tests.unit.router.auth.test_gates import key_gate
from tests.unit.router.conftest import SERVED, Rig, Serve


async def get(rig: Rig, path: str, method: str = "GET") -> tuple[int, bytes, str]:
    async with rig.session.request(method, rig.url + path) as response:
        assert response.headers["X-Request-Id"]
        return response.status, await response.read(), response.headers.get("Content-Type", "")


async def get_json(rig: Rig, path: str) -> Any:
    async with rig.session.get(rig.url + path) as response:
        assert response.status == 200
        return await response.json()


async def test_liveness_and_readiness(rig: Rig) -> None:
    for path in ("/live", "/liveness", "/ping", "/health", "/health_generate"):
        assert (await get(rig, path))[:2] == (200, b"")
    for path in ("/ready", "/readiness"):
        assert (await get(rig, path))[0] == 200
    rig.ready = "no decode node is up"
    for path in ("/live", "/liveness", "/ping"):
        assert (await get(rig, path))[0] == 200
    for path in ("/health", "/health_generate"):
        assert (await get(rig, path))[:2] == (503, b"")
    for path in ("/ready", "/readiness"):
        status, body, _ = await get(rig, path)
        assert status == 503
        assert body == b'{"status":"not ready","reason":"no decode node is up","missing":[]}'


async def test_missing_nodes_are_named_while_others_serve(rig: Rig) -> None:
    """A probe keeps sending requests here (200); a person sees what is missing."""
    rig.missing = [{"name": "decode-1", "role": "decode"}]
    for path in ("/ready", "/readiness"):
        status, body, _ = await get(rig, path)
        assert status == 200
        assert body == b'{"status":"degraded","missing":[{"name":"decode-1","role":"decode"}]}'
    assert (await get(rig, "/health"))[0] == 200
    rig.ready = "no decode node is up"
    status, body, _ = await get(rig, "/ready")
    assert status == 503
    assert json.loads(body)["missing"] == rig.missing


async def test_models(rig: Rig) -> None:
    found = await get_json(rig, "/v1/models")
    card = {
        "id": "tiny-target",
        "object": "model",
        "created": 1_700_000_000,
        "owned_by": "tandem",
        "root": SERVED.path,
        "max_model_len": 4096,
    }
    assert found == {"object": "list", "data": [card]}
    assert await get_json(rig, "/v1/models/tiny-target") == card
    for other in ("gpt-9", "a/b", "%00", "tiny-target/x", "%C3%A9"):
        async with rig.session.get(f"{rig.url}/v1/models/{other}") as response:
            assert response.status == 404
            error = (await response.json())["error"]
            assert (error["param"], error["code"]) == ("model", "model_not_found")
            assert error["message"].endswith("is not served here; use 'tiny-target'")


async def test_facts(rig: Rig) -> None:
    for path in ("/server_info", "/get_server_info"):
        info = await get_json(rig, path)
        assert info["model_path"] == SERVED.path
        assert info["internal_states"] == []
    for path in ("/model_info", "/get_model_info"):
        found = await get_json(rig, path)
        assert (found["model_path"], found["tokenizer_path"]) == (SERVED.path, SERVED.path)
        assert (found["is_generation"], found["has_image_understanding"]) == (True, False)
    assert list(await get_json(rig, "/version")) == ["version"]
    status, body, kind = await get(rig, "/metrics")
    assert (status, body) == (200, b"# HELP x y\n")
    assert kind == "text/plain; version=0.0.4; charset=utf-8"


async def test_timeline(rig: Rig) -> None:
    assert await get_json(rig, "/requests/known") == {"request_id": "known", "client": "team-a"}
    for identity in ("other", "cmpl-other", "cmpl-", "x-known", "cmpl-chatcmpl-known"):
        status, body, _ = await get(rig, f"/requests/{identity}")
        assert status == 404
        assert b'"param":"id"' in body


@pytest.mark.parametrize("prefix", ["cmpl-", "chatcmpl-"])
async def test_timeline_by_the_id_of_the_answer(rig: Rig, prefix: str) -> None:
    found = await get_json(rig, f"/requests/{prefix}known")
    assert found == {"request_id": "known", "client": "team-a"}


@pytest.mark.parametrize(
    ("method", "path", "message"),
    [
        (
            "POST",
            "/chat/completions",
            "there is no route POST /chat/completions; did you mean /v1/chat/completions? "
            "The base URL of OpenAI's clients ends with /v1",
        ),
        (
            "GET",
            "/models/x",
            "there is no route GET /models/x; did you mean /v1/models/x? "
            "The base URL of OpenAI's clients ends with /v1",
        ),
        (
            "POST",
            "/v1/v1/completions",
            "there is no route POST /v1/v1/completions; did you mean /v1/completions?",
        ),
        (
            "POST",
            "/v1/embeddings",
            "/v1/embeddings is not served: tandem generates text and has no embeddings",
        ),
        (
            "POST",
            "/v1/images/generations",
            "/v1/images/generations is not served: tandem generates text and has no image generation",
        ),
        (
            "POST",
            "/v1/completions/",
            "there is no route POST /v1/completions/; did you mean /v1/completions?",
        ),
        ("GET", "/v1/metrics", "there is no route GET /v1/metrics; did you mean /metrics?"),
        (
            "GET",
            "/v1/responses/resp_1",
            "/v1/responses/resp_1 is not served: tandem generates text and has no stored responses; "
            "send the whole conversation with every request",
        ),
        (
            "GET",
            "/v1/chat/completions/chatcmpl-1",
            "/v1/chat/completions/chatcmpl-1 is not served: tandem generates text and has no stored answers; "
            "send the whole conversation with every request",
        ),
        (
            "POST",
            "/v1/chat/completions/render",
            "/v1/chat/completions/render is not served: tandem generates text and has no rendering apart from "
            "answers; /tokenize returns the tokens of a prompt",
        ),
        (
            "POST",
            "/v1/chat/completions/batch",
            "/v1/chat/completions/batch is not served: tandem generates text and has no batches of chats; "
            "send each chat in a request of its own",
        ),
        (
            "POST",
            "/update_weights_from_disk",
            "/update_weights_from_disk is not served: tandem generates text and has no exchange of weights while "
            "it runs; start the nodes with the other model",
        ),
        (
            "POST",
            "/v1/chat/completions/",
            "there is no route POST /v1/chat/completions/; did you mean /v1/chat/completions?",
        ),
        (
            "POST",
            "/v1/conversations",
            "/v1/conversations is not served: tandem generates text and has no conversations; keep them at "
            "the client",
        ),
        (
            "POST",
            "/v1/chat/completions/chat/completions",
            "there is no route POST /v1/chat/completions/chat/completions; did you mean /v1/chat/completions? "
            "The base URL of OpenAI's clients ends with /v1",
        ),
        (
            "GET",
            "/openai/v1/models",
            "there is no route GET /openai/v1/models; did you mean /v1/models?",
        ),
        (
            "POST",
            "/v1/messages/v1/messages",
            "there is no route POST /v1/messages/v1/messages; did you mean /v1/messages?",
        ),
        (
            "POST",
            "/api/chat",
            "/api/chat is not served: tandem generates text and has no API of Ollama; set the client up for "
            "OpenAI's API with a base URL that ends with /v1",
        ),
        ("POST", "/v1/unknown", "there is no route POST /v1/unknown; /docs shows all routes"),
        ("GET", "/v1", "there is no route GET /v1; /docs shows all routes"),
        ("GET", "/" + "x" * 500, f"there is no route GET /{'x' * 199}...; /docs shows all routes"),
    ],
)
async def test_an_unknown_route_is_named(rig: Rig, method: str, path: str, message: str) -> None:
    status, body, _ = await get(rig, path, method)
    assert status == 404
    assert json.loads(body)["error"]["message"] == message


async def test_a_method_that_a_route_does_not_take_is_named(rig: Rig) -> None:
    status, body, _ = await get(rig, "/v1/chat/completions")
    assert status == 405
    assert json.loads(body)["error"]["message"] == "/v1/chat/completions accepts POST, not GET"


@pytest.mark.parametrize(
    "path",
    [
        "/live",
        "/health",
        "/ready",
        "/metrics",
        "/v1/models",
        "/v1/models/tiny-target",
        "/version",
        "/server_info",
    ],
)
async def test_head(rig: Rig, path: str) -> None:
    assert (await get(rig, path, "HEAD"))[:2] == (200, b"")


@pytest.mark.parametrize(
    ("query", "count"), [("", DEFAULT_LISTED), ("?limit=1", 1), ("?limit=200", MAX_LISTED)]
)
async def test_the_last_requests_are_listed(rig: Rig, query: str, count: int) -> None:
    async with rig.session.get(f"{rig.url}/requests{query}") as response:
        assert response.status == 200
        assert (await response.json())["requests"][0]["request_id"] == f"{count} of None"


@pytest.mark.parametrize("limit", ["0", "201", "-1", "x", "", "1e2", "9" * 30, "٣"])
async def test_a_bad_number_of_requests_is_refused(rig: Rig, limit: str) -> None:
    async with rig.session.get(f"{rig.url}/requests", params={"limit": limit}) as response:
        assert response.status == 400
        assert (await response.json())["error"]["param"] == "limit"


async def test_a_key_sees_its_own_requests_only(serve: Serve) -> None:
    rig = await serve(gate=key_gate())
    for secret, shown in (("secret-a", "team-a"), ("secret-ops", "None")):
        async with rig.session.get(rig.url + "/requests", headers=bearer(secret)) as response:
            assert (await response.json())["requests"][0]["request_id"] == f"{DEFAULT_LISTED} of {shown}"
