"""Every text of a conversation reaches the prompt, in the form for which the model's template was written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from common.errors import InvalidRequest
from router.requests.openai_schema import ChatRequest, ContentPart, Message, compact_chat
from router.templates.chat_template import ChatTemplate
from router.templates.content_form import ContentForms, Parts, RoleForm
from tests.unit.router.templates import template_styles as styles

TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
EITHER, TEXT, PARTS = (
    RoleForm(True, Parts.SEVERAL),
    RoleForm(True, Parts.NONE),
    RoleForm(False, Parts.SEVERAL),
)
ROLES = ("system", "user", "assistant")


def template_of(folder: Path, source: str) -> ChatTemplate:
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": source, **TOKENS}))
    return ChatTemplate(folder)


def parts(*texts: str) -> list[ContentPart]:
    return [ContentPart("text", text) for text in texts]


def conversation(form: str) -> list[Message]:
    """System, user, assistant, user; each as a string, as one part, or as two."""

    def content(text: str) -> Any:
        return {"text": text, "part": parts(text), "parts": parts(f"{text}-a", f"{text}-b")}[form]

    said = (("system", "sys"), ("user", "ask"), ("assistant", "reply"), ("user", "more"))
    return [Message(role, content(text)) for role, text in said]


WHOLE = {
    "LLAVA": "sys USER: ask ASSISTANT: reply USER: more ASSISTANT:",
    "QWEN_VL": "[system]sys[end][user]ask[end][assistant]reply[end][user]more[end][assistant]",
    "QWEN": "[system]sys[end][user]ask[end][assistant]reply[end][user]more[end][assistant]",
    "LLAMA_3": (
        "<s>[system]\n\nsys[eot][user]\n\nask[eot][assistant]\n\nreply[eot][user]\n\nmore[eot][assistant]\n\n"
    ),
    "LLAMA_3_VISION": "[system]sys[eot][user]ask[eot][assistant]reply[eot][user]more[eot][assistant]",
    "MISTRAL": "<s>[INST] ask[/INST] reply</s>[INST] sys\n\nmore[/INST]",
    "GEMMA": "[user]sys\n\nask[end][assistant]reply[end][user]more[end][model]",
}
BETWEEN_PARTS = {  # separators of user messages
    "LLAVA": " ",
    "QWEN_VL": "",
    "QWEN": "\n",
    "LLAMA_3": "\n",
    "LLAMA_3_VISION": "",
    "MISTRAL": "\n",
    "GEMMA": "",
}


@pytest.mark.parametrize("form", ["text", "part"])
@pytest.mark.parametrize("style", sorted(WHOLE))
def test_no_text_of_a_conversation_is_lost(tmp_path: Path, style: str, form: str) -> None:
    template = template_of(tmp_path, getattr(styles, style))
    assert template.render(conversation(form)) == WHOLE[style]


@pytest.mark.parametrize("style", sorted(WHOLE))
def test_several_text_parts_of_a_message(tmp_path: Path, style: str) -> None:
    """They stay parts if the template prints parts; a template for strings gets them as lines."""
    prompt = template_of(tmp_path, getattr(styles, style)).render(conversation("parts"))
    for text in ("ask", "more"):
        assert f"{text}-a{BETWEEN_PARTS[style]}{text}-b" in prompt
    for each in ("sys-a", "sys-b", "reply-a", "reply-b"):
        assert prompt.count(each) == 1
    assert "{" not in prompt


@pytest.mark.parametrize(
    ("style", "forms"),
    [
        ("LLAVA", (PARTS, PARTS, PARTS)),
        ("QWEN_VL", (EITHER, EITHER, EITHER)),
        ("QWEN", (TEXT, TEXT, TEXT)),
        ("LLAMA_3", (TEXT, TEXT, TEXT)),
        ("LLAMA_3_VISION", (TEXT, EITHER, EITHER)),
        ("MISTRAL", (TEXT, TEXT, TEXT)),
        ("GEMMA", (RoleForm(True, Parts.ONE), EITHER, EITHER)),
    ],
)
def test_the_forms_that_each_role_takes(tmp_path: Path, style: str, forms: tuple[RoleForm, ...]) -> None:
    template = template_of(tmp_path, getattr(styles, style))
    rendered = []

    def render(messages: Any) -> str:
        rendered.append(messages)
        return template.render_plain(messages)

    found = ContentForms(render)
    assert tuple(map(found.of, ROLES)) == forms
    assert len(rendered) <= 40


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (
            "{% for m in messages if m.role in ('system', 'user') %}[{{ m.role }}]{{ m.content }}{% endfor %}",
            "system",
        ),
        (
            "{% for m in messages %}{% if m.role == 'developer' %}{{ raise_exception('unknown role') }}{% endif %}"
            "[{{ m.role }}]{{ m.content }}{% endfor %}",
            "system",
        ),
        ("{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}", "developer"),
    ],
)
def test_developer_messages_are_system_messages_to_templates_that_lack_them(
    tmp_path: Path, source: str, expected: str
) -> None:
    """Many templates print nothing for an unknown role, so the instructions would be lost without a word."""
    messages = [Message("developer", "be brief"), Message("user", "ask")]
    assert template_of(tmp_path, source).render(messages) == f"[{expected}]be brief[user]ask"


def test_the_forms_are_found_once_per_template(tmp_path: Path) -> None:
    """Later requests render the template once each."""
    template = template_of(tmp_path, styles.LLAVA)
    renderings = 0
    render = template.render_plain

    def counted(messages: Any, *rest: Any) -> str:
        nonlocal renderings
        renderings += 1
        return render(messages, *rest)

    template.render_plain = counted  # type: ignore[method-assign, assignment]
    template.render(conversation("text"))
    first = renderings
    template.render(conversation("text"))
    assert renderings == first + 1


@pytest.mark.parametrize("style", ["LLAVA", "QWEN"])
def test_text_has_other_names(tmp_path: Path, style: str) -> None:
    """A refusal in the history is OpenAI's own form; input_text and output_text are those of the Responses API."""
    template = template_of(tmp_path, getattr(styles, style))
    named = [
        Message("user", [ContentPart("input_text", "ask")]),
        Message("assistant", [ContentPart("refusal", refusal="I will not")]),
        Message("user", [ContentPart("output_text", "why"), *parts("now")]),
    ]
    plain = [
        Message("user", parts("ask")),
        Message("assistant", parts("I will not")),
        Message("user", parts("why", "now")),
    ]
    assert template.render(named) == template.render(plain)


def test_a_message_with_images_does_not_change_the_others(tmp_path: Path) -> None:
    picture = ContentPart("image_url", image_url="data:,")
    messages = [
        Message("system", "sys"),
        Message("user", [*parts("look"), picture, *parts("closely")]),
        Message("assistant", "a dog"),
        Message("user", parts("sure?")),
    ]
    assert template_of(tmp_path, styles.LLAVA).render(messages) == (
        "sys USER: <image>\nlook closely ASSISTANT: a dog USER: sure? ASSISTANT:"
    )
    assert template_of(tmp_path, styles.LLAMA_3_VISION).render(messages) == (
        "[system]sys[eot][user]look[picture]closely[eot][assistant]a dog[eot][user]sure?[eot][assistant]"
    )


@pytest.mark.parametrize("style", ["LLAVA", "QWEN_VL"])
def test_an_empty_message_is_rendered(tmp_path: Path, style: str) -> None:
    template = template_of(tmp_path, getattr(styles, style))
    contents: tuple[Any, ...] = (None, "", [])
    for empty in contents:
        prompt = template.render([Message("user", "a"), Message("assistant", empty), Message("user", "b")])
        assert "a" in prompt
        assert "b" in prompt
        assert "None" not in prompt


def test_as_transformers_renders_the_form_of_the_template(tmp_path: Path) -> None:
    """The prompt equals that of transformers, whose caller has to pass the right form."""
    import transformers

    from tests.unit.router.conftest import TINY

    reference = transformers.PreTrainedTokenizerFast.from_pretrained(TINY)
    for style, form in (("LLAVA", "part"), ("QWEN_VL", "parts"), ("QWEN", "text"), ("MISTRAL", "text")):
        plain = [
            {
                "role": each.role,
                "content": each.content
                if isinstance(each.content, str)
                else [{"type": "text", "text": part.text} for part in each.content or ()],
            }
            for each in conversation(form)
        ]
        source = getattr(styles, style)
        expected = reference.apply_chat_template(
            plain, chat_template=source, tokenize=False, add_generation_prompt=True, **TOKENS
        )
        assert template_of(tmp_path, source).render(conversation(form)) == expected, style


def test_a_template_that_refuses_a_role_still_refuses_it(tmp_path: Path) -> None:
    template = template_of(tmp_path, styles.MISTRAL)
    with pytest.raises(InvalidRequest, match="must alternate"):
        template.render([Message("user", "a"), Message("user", "b")])


def test_a_template_that_prints_no_content_gets_what_was_sent(tmp_path: Path) -> None:
    template = template_of(tmp_path, "{{ messages[0].content is string }}")
    assert template.render([Message("user", "a")]) == "True"


def test_a_shortage_of_memory_is_not_taken_for_an_answer(tmp_path: Path) -> None:
    def render(messages: Any) -> str:
        raise MemoryError

    with pytest.raises(MemoryError):
        ContentForms(render)


def test_parts_of_a_large_body_stay_parts() -> None:
    request = ChatRequest(messages=conversation("parts"))
    assert compact_chat(request).messages == request.messages
