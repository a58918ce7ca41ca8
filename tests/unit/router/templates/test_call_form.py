"""Tool calls of earlier messages, their results and all instructions reach the prompt, or the request is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from common.errors import InvalidRequest
from router.requests.chat_fields import CalledFunction, ToolCall
from router.requests.openai_schema import ContentPart, Message
from router.templates.chat_template import ChatTemplate
from router.templates.prompt_end import PromptEnd
from tests.unit.router.templates import call_styles as styles
from tests.unit.router.templates import template_styles
from tests.unit.router.templates.test_content_form import template_of

STYLES = ("DEEPSEEK_R1", "GLM_4_5", "HERMES", "LLAMA_3_1", "MISTRAL_3", "QWEN_2_5", "QWEN_3")
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "declared", "parameters": {}}}
ONE, TWO = "callident", "identcall"
PARIS = '"Paris \\"é\\""'


def call(name: str, arguments: Any, id: str = ONE) -> ToolCall:
    return ToolCall(CalledFunction(name, arguments), id)


def asked(*calls: ToolCall, text: Any = None) -> Message:
    return Message("assistant", text, tool_calls=list(calls))


def conversation(answer: Message) -> list[Message]:
    results = [
        Message("tool", f"{index} degrees", tool_call_id=each.id)
        for index, each in enumerate(answer.tool_calls or ())
    ]
    return [
        Message("user", "how warm?"),
        answer,
        *results,
        Message("assistant", "mild"),
        Message("user", "thanks"),
    ]


@pytest.fixture(params=STYLES)
def template(request: pytest.FixtureRequest, tmp_path: Path) -> ChatTemplate:
    return template_of(tmp_path, getattr(styles, request.param))


@pytest.mark.parametrize("tools", [(), (TOOL,)], ids=["without tools", "with tools"])
@pytest.mark.parametrize("sent", [{"place": 'Paris "é"', "days": 2}, f'{{"place": {PARIS}, "days": 2}}'])
def test_calls_and_results_are_printed(template: ChatTemplate, sent: Any, tools: Any) -> None:
    contents: tuple[Any, ...] = (None, "", [])
    for empty in contents:
        prompt = template.render(conversation(asked(call("weather", sent), text=empty)), tools=tools)
        for text in ("how warm?", "weather", "Paris", "é", "2", "0 degrees", "mild", "thanks"):
            assert text in prompt
        assert "{'" not in prompt
        assert "None" not in prompt


@pytest.mark.parametrize("given", [None, "", " ", "{}", {}])
def test_a_call_without_arguments_has_an_empty_object(template: ChatTemplate, given: Any) -> None:
    prompt = template.render(conversation(asked(call("weather", given))))
    assert prompt == template.render(conversation(asked(call("weather", {}))))
    assert "weather" in prompt


def test_several_calls_of_a_message_are_printed(template: ChatTemplate) -> None:
    calls = call("weather", '{"place": "Paris"}'), call("clock", '{"place": "Rome"}', TWO)
    prompt = template.render(conversation(asked(*calls)))
    places = [prompt.index(text) for text in ("weather", "clock", "0 degrees", "1 degrees", "mild")]
    assert places == sorted(places)
    assert prompt.index("Paris") < prompt.index("Rome")


@pytest.mark.parametrize("style", sorted({*STYLES} - {"MISTRAL_3"}))
def test_text_beside_calls_is_printed(tmp_path: Path, style: str) -> None:
    template = template_of(tmp_path, getattr(styles, style))
    text = [ContentPart("text", "let me"), ContentPart("text", "look")]
    said = Message("assistant", text, tool_calls=[call("weather", {"a": "b"})], reasoning_content="a reason")
    prompt = template.render([Message("user", "how warm?"), said, Message("tool", "7", tool_call_id=ONE)])
    places = [prompt.index(each) for each in ("let me", "look", "weather", "7")]
    assert places == sorted(places)
    assert prompt.count("look") == 1
    assert prompt.count("a reason") == (style == "QWEN_3")


def test_the_exact_prompts(tmp_path: Path) -> None:
    messages = conversation(asked(call("f", '{"a": 1}'), text="so"))[:3]
    expected = {
        "DEEPSEEK_R1": (
            '<s>[user]how warm?[assistant]so[end][call]function[sep]f\n{"a": 1}[/call]'
            "[output]0 degrees[/output][assistant]<think>\n"
        ),
        "LLAMA_3_1": (
            '[user]how warm?[eot][assistant]so[eot][assistant]{"name": "f", "parameters": {"a": 1}}[eot]'
            '[ipython]"0 degrees"[eot][assistant]'
        ),
        # A template without a place for the text prints the call, which is the answer's content.
        "MISTRAL_3": (
            '[INST] how warm?[/INST][TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}, "id": "callident"}]'
            '[TOOL_RESULTS] {"content": 0 degrees, "call_id": "callident"}[/TOOL_RESULTS]'
        ),
        "HERMES": (
            '<s>[user]how warm?[end][assistant]so[end][assistant]<tool_call>{"arguments": {"a": 1}, "name": "f"}'
            '</tool_call>[end][tool]{"name": "f", "content": "0 degrees"}[end][assistant]'
        ),
    }
    for style, prompt in expected.items():
        assert template_of(tmp_path, getattr(styles, style)).render(messages) == prompt


def test_as_transformers_renders_the_form_of_the_template(tmp_path: Path) -> None:
    import transformers

    from tests.unit.router.conftest import TINY

    reference = transformers.PreTrainedTokenizerFast.from_pretrained(TINY)
    arguments = {"place": "Paris", "days": 2}
    for style in ("GLM_4_5", "LLAMA_3_1", "MISTRAL_3", "QWEN_2_5", "QWEN_3"):
        source = getattr(styles, style)
        ours = template_of(tmp_path, source).render(conversation(asked(call("f", arguments))))
        function = {"id": ONE, "type": "function", "function": {"name": "f", "arguments": arguments}}
        plain = [
            {"role": "user", "content": "how warm?"},
            {"role": "assistant", "content": "", "tool_calls": [function]},
            {"role": "tool", "content": "0 degrees", "tool_call_id": ONE},
            {"role": "assistant", "content": "mild"},
            {"role": "user", "content": "thanks"},
        ]
        assert ours == reference.apply_chat_template(
            plain,
            chat_template=source,
            tokenize=False,
            add_generation_prompt=True,
            bos_token="<s>",
            eos_token="</s>",
        )


def test_requests_with_tools_use_the_form_of_their_template(tmp_path: Path) -> None:
    """The default template of Hermes prints no calls; the one for tools does, also for requests without tools."""
    named = {"default": template_styles.QWEN, "tool_use": "{{ tools | length }} tools" + styles.DEEPSEEK_R1}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    template = ChatTemplate(tmp_path)
    messages = conversation(asked(call("weather", "{}")))
    for tools in ([TOOL], []):
        prompt = template.render(messages, tools=tools)
        assert prompt.startswith(f"{len(tools)} tools")
        assert "weather\n{}" in prompt
    assert template.render(messages[:1]).startswith("[system]You help.[end]")


def test_calls_that_are_never_printed_are_refused(tmp_path: Path) -> None:
    template = template_of(tmp_path, template_styles.QWEN)
    messages = conversation(asked(call("weather", "{}")))
    with pytest.raises(InvalidRequest, match="prints no tool calls of earlier messages") as found:
        template.render(messages)
    assert found.value.param == "messages[1].tool_calls"
    # Without calls nothing is lost.
    assert "thanks" in template.render([messages[0], *messages[3:]])


def test_arguments_are_not_printed_as_python_writes_them(tmp_path: Path) -> None:
    source = styles.QWEN_3.replace("{{ call.function.arguments | tojson }}", "{{ call.function.arguments }}")
    prompt = template_of(tmp_path, source).render(conversation(asked(call("f", {"a": "b", "c": None}))))
    assert '"arguments": {"a": "b", "c": null}}' in prompt


@pytest.mark.parametrize(
    ("role", "source"),
    [
        ("system", "{% for m in messages if m.role != 'system' %}[{{ m.role }}]{{ m.content }}{% endfor %}"),
        ("tool", template_styles.QWEN),
        ("assistant", "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"),
    ],
)
def test_messages_of_a_role_that_is_never_printed_are_refused(tmp_path: Path, role: str, source: str) -> None:
    template = template_of(tmp_path, source)
    with pytest.raises(InvalidRequest, match=rf"messages\[1\].* no messages of the role {role}") as found:
        template.render([Message("user", "a"), Message(role, "b"), Message("user", "c")])
    assert found.value.param == "messages[1].role"
    # Nothing is lost of an empty one.
    assert "a" in template.render([Message("user", "a"), Message(role, ""), Message("user", "c")])


ONE_SYSTEM = """\
{%- for m in messages %}
{%- if m.role == 'system' and not loop.first %}{{ raise_exception('system messages come first') }}{% endif %}
{{- '[' + m.role + ']' + m.content }}
{%- endfor %}"""


@pytest.mark.parametrize("source", [styles.DEEPSEEK_R1, ONE_SYSTEM], ids=["last one", "first one"])
@pytest.mark.parametrize("second", ["system", "developer"])
def test_instructions_are_joined_for_templates_that_print_one_message(
    tmp_path: Path, source: str, second: str
) -> None:
    template = template_of(tmp_path, source)
    parts = [ContentPart("text", "in French"), ContentPart("text", "please")]
    first, other = Message("system", "be brief"), Message(second, parts)
    user, said = Message("user", "ask"), Message("assistant", "reply")
    joined = Message("system", "be brief\n\nin French\nplease")
    for messages, plain in (
        ([first, other, user], [joined, user]),
        ([first, user, said, other, user], [joined, user, said, user]),
        ([user, said, first, user], [first, user, said, user]),
    ):
        assert template.render(messages) == template.render(plain)
    assert "be brief" in template.render([joined, user])


@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        (asked(call("f", "{broken")), "messages[3].tool_calls[0].function.arguments"),
        (Message("user", [ContentPart("video")]), "messages[3].content[0]"),
        (Message("system", [ContentPart("video")]), "messages[3].content[0]"),
    ],
)
def test_refusals_count_the_messages_that_were_sent(tmp_path: Path, wrong: Message, param: str) -> None:
    instructions = [Message("system", "a"), Message("system", "b")]
    with pytest.raises(InvalidRequest) as found:
        template_of(tmp_path, ONE_SYSTEM).render([*instructions, Message("user", "c"), wrong])
    assert found.value.param == param


def test_one_message_of_instructions_keeps_its_parts(tmp_path: Path) -> None:
    source = (
        "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('one') }}{% endif %}"
        "{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}[{{ part.text }}]{% endfor %}"
        "{% endif %};{% endfor %}"
    )
    parts = [ContentPart("text", "a"), ContentPart("text", "b")]
    template = template_of(tmp_path, source)
    assert template.render([Message("system", parts), Message("user", "c")]) == "[a][b];c;"
    assert template.render([Message("user", "c"), Message("system", parts)]) == "a\nb;c;"


def test_instructions_stay_in_their_place_if_the_template_prints_them_there(tmp_path: Path) -> None:
    messages = [Message("system", "a"), Message("user", "b"), Message("system", "c"), Message("user", "d")]
    prompt = template_of(tmp_path, styles.QWEN_2_5).render(messages)
    assert prompt == "[system]a[end][user]b[end][system]c[end][user]d[end][assistant]"


def test_a_message_with_calls_is_not_continued(tmp_path: Path) -> None:
    """Its calls would follow the text that the answer continues."""
    messages = [Message("user", "a"), asked(call("f", {}), text="so")]
    with pytest.raises(InvalidRequest, match="has tool calls, so it cannot be continued"):
        template_of(tmp_path, styles.QWEN_2_5).render(messages, PromptEnd.OPEN_MESSAGE)
