"""The OpenAPI document holds what the routes do: schemathesis sends what it allows and checks the answers."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import msgspec
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.checks import CHECKS, load_all_checks
from schemathesis.core.result import Ok
from schemathesis.generation import GenerationMode

from router.openapi.document import openapi_document
from router.openapi.operations import OPERATIONS
from router.openapi.page import docs_page
from tests.unit.router.conftest import Rig
from tests.unit.router.scripted_generator import one_by_one

EXAMPLES = 4  # requests to each route, of those that its schema allows and of others
load_all_checks()
# No 5xx, and answers as the document says.
CHECKED = CHECKS.get_by_names(
    ["not_a_server_error", "content_type_conformance", "response_schema_conformance"]
)


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
async def test_answers_match_the_document(rig: Rig, mode: GenerationMode) -> None:
    rig.generator.will(*one_by_one([331, 300, 2], "stop"))
    async with rig.session.get(rig.url + "/openapi.json") as response:
        document = await response.json()
    statuses = await asyncio.to_thread(_send_all, document, rig.url, mode)
    assert all(statuses.values())
    if mode is GenerationMode.POSITIVE:
        assert len(statuses) == len(OPERATIONS)
        # A schema cannot say all that is refused, so only some of the bodies are answered.
        assert sum(200 in found for found in statuses.values()) > len(OPERATIONS) // 2
    else:
        assert len(statuses) == sum(operation.body is not None for operation in OPERATIONS)


def _send_all(document: dict[str, Any], url: str, mode: GenerationMode) -> dict[str, set[int]]:
    """Send examples to every route, wrong ones only to those with a body; return the statuses of each."""
    schema = schemathesis.openapi.from_dict(document)
    statuses: dict[str, set[int]] = {}
    for result in schema.get_all_operations():
        assert isinstance(result, Ok)
        operation = result.ok()
        if mode is GenerationMode.NEGATIVE and not operation.body:
            continue
        found = statuses.setdefault(operation.label, set())

        _send(operation, url, mode, found)
    return statuses


def _send(operation: Any, url: str, mode: GenerationMode, statuses: set[int]) -> None:
    @given(case=operation.as_strategy(generation_mode=mode))
    @settings(
        max_examples=EXAMPLES,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    def send(case: Any) -> None:
        response = case.call(base_url=url)
        case.validate_response(response, checks=CHECKED)
        statuses.add(response.status_code)

    send()


CHAT = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 9}
BODIES = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"prompt": "Hello", "logprobs": 1},
    "/v1/responses": {"input": "Hello"},
    "/v1/responses/input_tokens": {"input": "Hello"},
    "/v1/messages": CHAT,
    "/v1/messages/count_tokens": CHAT,
    "/generate": {"text": "Hello"},
    "/inference/v1/generate": {"token_ids": [5], "sampling_params": {"logprobs": 1}},
    "/tokenize": {"prompt": "Hello"},
    "/detokenize": {"tokens": [5]},
}


@pytest.mark.parametrize("path", BODIES)
async def test_complete_answers_match_the_document(rig: Rig, path: str) -> None:
    rig.generator.will(*one_by_one([331, 300, 2], "stop", top=1))
    [operation] = [each for each in OPERATIONS if each.path == path]
    status, answer, _ = await rig.post(path, BODIES[path])
    assert status == 200, answer
    msgspec.convert(answer, operation.answer)


async def test_the_page_shows_every_route_and_loads_nothing(rig: Rig) -> None:
    async with rig.session.get(rig.url + "/docs") as response:
        page = await response.text()
        assert response.content_type == "text/html"
        assert response.headers["Content-Security-Policy"].startswith("default-src 'none'")
    for operation in OPERATIONS:
        assert f"<code>{operation.path}</code>" in page
    assert "max_completion_tokens" in page
    assert not re.search(r"<script|src=|https?:|url\(", page)


def test_the_page_escapes() -> None:
    document = openapi_document("<b>")
    assert b"<b>" not in docs_page(document)


async def test_every_route_is_described(rig: Rig) -> None:
    """Aliases of a described route, the document itself and pages for people need no description."""
    described = {operation.path for operation in OPERATIONS}
    aliases = {
        "/liveness",
        "/ping",
        "/health_generate",
        "/readiness",
        "/get_server_info",
        "/v1/tokenize",
        "/v1/detokenize",
        "/openapi.json",
        "/docs",
        "/",
        "/page/{name}",
    }
    assert {re.sub(r":[^}]*", "", path) for path in rig.paths} - aliases == described
    assert aliases <= set(rig.paths)
