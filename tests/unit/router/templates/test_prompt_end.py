"""`add_generation_prompt` and `continue_final_message`, by parity with transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from common.errors import InvalidRequest
from router.requests.openai_schema import ContentPart, Message
from router.templates.chat_template import ChatTemplate
from router.templates.prompt_end import PromptEnd, prompt_end
from tests.unit.router.conftest import TINY, Rig
from tests.unit.router.scripted_generator import one_by_one

STRIPPING = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content | trim }}[end]{% endfor %}"
    "{{ '>' if add_generation_prompt }}"
)
PLAIN = STRIPPING.replace(" | trim", "")
CONTENTS = ("The answer is", "The answer is ", " spaced  ", "", "two\nlines\n", "{{ 7 }}", "end] [end]")


@pytest.fixture(params=[PLAIN, STRIPPING, None], ids=["plain", "stripping", "tiny"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    if request.param is None:
        return TINY
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / file).write_bytes((TINY / file).read_bytes())
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": request.param}))
    return tmp_path


@pytest.mark.parametrize("content", CONTENTS)
def test_parity(folder: Path, content: str) -> None:
    reference: Any = transformers.AutoTokenizer.from_pretrained(folder)
    said = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": content}]
    messages = [Message(role=each["role"], content=each["content"]) for each in said]
    template = ChatTemplate(folder)
    for end, options in (
        (PromptEnd.GENERATION_PROMPT, {"add_generation_prompt": True}),
        (PromptEnd.LAST_MESSAGE, {"add_generation_prompt": False}),
        (PromptEnd.OPEN_MESSAGE, {"continue_final_message": True}),
    ):
        wanted = reference.apply_chat_template(said, tokenize=False, **options)
        assert template.render(messages, end) == wanted, end


def test_the_last_text_part_is_continued() -> None:
    parts = [ContentPart("text", "a"), ContentPart("text", "b")]
    messages = [Message(role="user", content="hi"), Message(role="assistant", content=parts)]
    assert ChatTemplate(TINY).render(messages, PromptEnd.OPEN_MESSAGE).endswith("ab")


def test_a_message_that_the_template_hides_cannot_be_continued(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"chat_template": "{{ messages[0].content }}"})
    )
    messages = [Message(role="user", content="hi"), Message(role="assistant", content="x")]
    with pytest.raises(InvalidRequest, match="cannot be continued"):
        ChatTemplate(tmp_path).render(messages, PromptEnd.OPEN_MESSAGE)


def test_both_fields() -> None:
    assert prompt_end(None, None) is prompt_end(True, False) is PromptEnd.GENERATION_PROMPT
    assert prompt_end(False, None) is prompt_end(False, False) is PromptEnd.LAST_MESSAGE
    assert prompt_end(None, True) is prompt_end(False, True) is PromptEnd.OPEN_MESSAGE
    with pytest.raises(InvalidRequest) as caught:
        prompt_end(True, True)
    assert caught.value.param == "continue_final_message"


async def test_over_http(rig: Rig) -> None:
    rig.generator.will(*one_by_one([10]))
    body = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "The sum"}]}
    for fields, end in (
        ({"continue_final_message": True, "add_generation_prompt": False}, "The sum"),
        ({"add_generation_prompt": False}, "The sum<|end|>\n"),
        ({}, "The sum<|end|>\n<|assistant|>"),
    ):
        assert (await rig.post("/v1/chat/completions", body | fields))[0] == 200
        assert rig.tokenizer.decode(rig.generator.requests[-1].token_ids, False).endswith(end)
