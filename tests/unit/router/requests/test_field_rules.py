"""Fields outside the schema: ignored, refused by name, or unknown."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from common.errors import InvalidRequest
from common.observability.logs import Log
from router.requests.field_rules import (
    IGNORED,
    MAX_NAME,
    MAX_REPORTED,
    MAX_WARNED,
    NOT_SERVED,
    UnknownFields,
    undeclared,
)
from router.requests.openai_schema import ChatRequest, CompletionRequest
from tests.unit.router.conftest import Rig, Serve
from tests.unit.router.scripted_generator import one_by_one

pytestmark = pytest.mark.usefixtures("both_readers")

BODY: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
CHAT = "/v1/chat/completions"


def warned(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.fields["field"] for record in caplog.records if hasattr(record, "fields")]


async def test_an_unknown_name_is_ignored_with_one_warning(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    rig.generator.will(*one_by_one([10]))
    ignored = {name: 1 for name in IGNORED}
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert (await rig.post(CHAT, BODY | ignored | {"temprature": 0.5}))[0] == 200
        assert warned(caplog) == ["temprature"]
        assert (await rig.post("/v1/completions", {"prompt": "x", "messages": []}))[0] == 200
    assert warned(caplog) == ["temprature", "messages"], "a field of the other endpoint"


async def test_names_inside_sampling_params(rig: Rig, serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    rig.generator.will(*one_by_one([10]))
    body = {"text": "x", "sampling_params": {"max_tokens": 5, "max_new_tokens": 2}}
    with caplog.at_level(logging.WARNING):
        assert (await rig.post("/generate", body))[0] == 200
    assert warned(caplog) == ["sampling_params.max_tokens"]
    for none in list[dict[str, Any] | None]((None, {})):
        assert (await rig.post("/generate", {"text": "x", "sampling_params": none}))[0] == 200
    wrong = {"text": "x", "sampling_params": {"watermarking": True}}
    status, answer, _ = await rig.post("/generate", wrong)
    assert (status, answer["error"]["param"]) == (400, "sampling_params.watermarking")
    strict = await serve(strict_fields=True)
    status, answer, _ = await strict.post("/generate", body)
    assert (status, answer["error"]["param"]) == (400, "sampling_params.max_tokens")


async def test_strict_fields_refuse_an_unknown_name(serve: Serve) -> None:
    rig = await serve(strict_fields=True)
    rig.generator.will(*one_by_one([10]))
    status, answer, _ = await rig.post(CHAT, BODY | {"temprature": 0.5})
    assert (status, answer["error"]["param"]) == (400, "temprature")
    assert "strict_fields" in answer["error"]["message"]
    assert (await rig.post(CHAT, BODY | {name: 1 for name in IGNORED}))[0] == 200


def test_names_and_warnings_are_bounded(caplog: pytest.LogCaptureFixture) -> None:
    raw = b"{" + b",".join(b'"%d%s":1' % (n, b"x" * 200) for n in range(1000)) + b"}"
    found = undeclared(raw, frozenset())
    assert len(found) == MAX_REPORTED
    assert {len(name) for name in found} == {MAX_NAME}
    rules = UnknownFields(Log("test"))
    with caplog.at_level(logging.WARNING):
        rules.check(str(n) for n in range(10 * MAX_WARNED))
    assert len(warned(caplog)) == MAX_WARNED
    assert caplog.records[-1].fields["last"], "the log says that no more names follow"  # type: ignore[attr-defined]


def test_a_field_that_is_not_served_is_refused_among_many_unknown_ones() -> None:
    raw = b"{" + b",".join(b'"f%d":1' % n for n in range(1000)) + b',"vllm_xargs":{"a":1}}'
    with pytest.raises(InvalidRequest, match="vllm_xargs"):
        undeclared(raw, frozenset())


def test_no_field_is_both_declared_and_listed_as_undeclared() -> None:
    """A field that becomes supported is a member of the request's struct, and leaves the table."""
    chat, completion = set(ChatRequest.__struct_fields__), set(CompletionRequest.__struct_fields__)
    assert not (chat | completion) & IGNORED
    assert not chat & NOT_SERVED.keys()
    # Completions declare these; chats refuse them.
    assert completion & NOT_SERVED.keys() == {"max_thinking_tokens", "require_reasoning"}
    assert not IGNORED & NOT_SERVED.keys()
