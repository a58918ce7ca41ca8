"""Documents and results of searches in /v1/messages: the text that the model reads, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from common.errors import InvalidRequest
from router.apis.messages_request import read_messages
from tests.unit.router.apis.test_messages import IMAGE
from tests.unit.router.conftest import Rig
from tests.unit.router.scripted_generator import one_by_one

PLAIN = {
    "type": "document",
    "source": {"type": "text", "media_type": "text/plain", "data": "Grass is green."},
    "title": "Plants",
    "context": "a school book",
    "citations": {"enabled": False},
}
BLOCKS = {
    "type": "document",
    "source": {
        "type": "content",
        "content": [{"type": "text", "text": "The sky "}, {"type": "text", "text": "is blue."}],
    },
}
FOUND = {
    "type": "search_result",
    "source": "https://example.org/a",
    "title": "Seas",
    "content": [{"type": "text", "text": "The sea is deep."}],
}
QUESTION = {"type": "text", "text": "Which colour?"}
PLAIN_TEXT = (
    "<document>\n<title>Plants</title>\n<context>a school book</context>\nGrass is green.\n</document>\n"
)
FOUND_TEXT = (
    "<search_result>\n<source>https://example.org/a</source>\n<title>Seas</title>\n"
    "The sea is deep.\n</search_result>\n"
)


def read(content: Any) -> Any:
    body = {"max_tokens": 9, "messages": [{"role": "user", "content": content}]}
    return read_messages(json.dumps(body).encode())


def test_they_become_text_between_tags() -> None:
    [message] = read([PLAIN, BLOCKS, FOUND, QUESTION]).chat.messages
    assert message.content == (
        PLAIN_TEXT + "<document>\nThe sky is blue.\n</document>\n" + FOUND_TEXT + "Which colour?"
    )


def test_results_of_tools_may_have_them() -> None:
    result = {"type": "tool_result", "tool_use_id": "t", "content": [FOUND, PLAIN]}
    [message] = read([result]).chat.messages
    assert (message.role, message.content) == ("tool", FOUND_TEXT + PLAIN_TEXT)


def test_a_document_may_have_images() -> None:
    """Refusals name the field of the image that the client sent."""
    task = read([QUESTION, {"type": "document", "source": {"type": "content", "content": [IMAGE]}}])
    [message] = task.chat.messages
    kinds = [part.type for part in message.content]
    assert kinds == ["text", "text", "image_url", "text"]
    where = "messages[0].content[1].source.content[0].source"
    assert task.places["messages[0].content[2].image_url"] == where


@pytest.mark.parametrize(
    ("block", "param"),
    [
        ({"type": "document"}, ""),
        ({"type": "document", "source": "x"}, ""),
        ({"type": "document", "source": {"type": "url", "url": "https://example.org/a.pdf"}}, ""),
        ({"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": ""}}, ""),
        ({"type": "document", "source": {"type": "text"}}, ""),
        ({"type": "document", "source": {"type": "content", "content": 5}}, ".source.content"),
        (
            {"type": "document", "source": {"type": "content", "content": [{"type": "video"}]}},
            ".source.content[0]",
        ),
        ({**PLAIN, "citations": {"enabled": True}}, ".citations"),
        ({**FOUND, "citations": {"enabled": True}}, ".citations"),
        ({**FOUND, "source": None}, ""),
        ({**FOUND, "title": None}, ""),
        ({**FOUND, "content": [{"type": "video"}]}, ".content[0]"),
    ],
)
def test_what_is_no_text_is_refused(block: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read([block])
    assert caught.value.param == f"messages[0].content[0]{param}"


async def test_the_model_reads_them(rig: Rig) -> None:
    rig.generator.will(*one_by_one([10]))
    body = {"max_tokens": 9, "messages": [{"role": "user", "content": [PLAIN, QUESTION]}]}
    status, answer, _ = await rig.post("/v1/messages", body)
    assert status == 200, answer
    assert PLAIN_TEXT + "Which colour?" in rig.tokenizer.decode(rig.generator.requests[-1].token_ids, True)
