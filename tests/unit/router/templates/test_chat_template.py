"""Templates: parity with transformers' rendering, and a sandbox against hostile ones."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from common.checkpoint.chat_template_file import TemplateSource, find_chat_template
from common.errors import InvalidRequest, ModelError
from router.requests.openai_schema import ContentPart, Message
from router.templates import sandbox as template_sandbox
from router.templates.chat_template import ChatTemplate
from tests.fakes.hostile_templates import ENDLESS
from tests.unit.router.conftest import TINY

HI = [Message(role="user", content="hi")]


def made(folder: Path, template: Any, **config: Any) -> ChatTemplate:
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template, **config}))
    return ChatTemplate(folder)


def test_the_checked_in_model() -> None:
    messages = [
        Message(role="system", content="s"),
        Message(role="user", content=[ContentPart("text", "a"), ContentPart("text", "b")]),
    ]
    assert (
        ChatTemplate(TINY).render(messages) == "<|bos|><|system|> s<|end|>\n<|user|> ab<|end|>\n<|assistant|>"
    )
    with pytest.raises(InvalidRequest, match="unknown role tool"):
        ChatTemplate(TINY).render([Message(role="tool", content="x")])


def test_equals_transformers() -> None:
    """The text equals that of transformers, for the checked-in template and a difficult one."""
    import transformers

    reference = transformers.PreTrainedTokenizerFast.from_pretrained(TINY)
    plain = [{"role": "user", "content": "  a <b> é 'q' \"d\" \n"}, {"role": "assistant", "content": "x"}]
    messages = [Message(each["role"], each["content"]) for each in plain]
    assert ChatTemplate(TINY).render(messages) == reference.apply_chat_template(
        plain, tokenize=False, add_generation_prompt=True
    )


def test_tojson_is_spaced_as_models_were_trained(tmp_path: Path) -> None:
    template = made(tmp_path, '{{ {"b": [1, "é<"], "a": none} | tojson }}{{ {"a": 1} | tojson(indent=2) }}')
    assert template.render(HI) == '{"b": [1, "é<"], "a": null}{\n  "a": 1\n}'


def test_file_wins_over_config(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text("file")
    assert made(tmp_path, "config").render(HI) == "file"


def test_named_templates_are_found(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    assert made(tmp_path, named).render(HI) == "plain"
    for other in ([{"name": "rag", "template": "x"}], [5], None, 5):
        with pytest.raises(InvalidRequest, match="no chat template") as found:
            made(tmp_path, other).render(HI)
        assert found.value.param == "messages"


TOOLS: list[dict[str, Any]] = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
NAMED = {"default": "plain", "tool_use": "{{ tools | length }} tool", "rag": "x"}


@pytest.mark.parametrize("form", ["list", "object", "files"])
def test_requests_with_tools_get_the_template_for_them(form: str, tmp_path: Path) -> None:
    """As in Hermes: the default one would not show the tools, without an error."""
    import transformers

    value: Any = NAMED if form == "object" else [{"name": n, "template": t} for n, t in NAMED.items()]
    if form == "files":
        (tmp_path / "chat_template.jinja").write_text(NAMED["default"])
        (tmp_path / "additional_chat_templates").mkdir()
        (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text(NAMED["tool_use"])
        value = "old"
    (tmp_path / "tokenizer.json").write_bytes((TINY / "tokenizer.json").read_bytes())
    ours = made(tmp_path, value)
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    for tools, expected in (([], "plain"), (TOOLS, "1 tool")):
        plain = [{"role": "user", "content": "hi"}]
        assert theirs.apply_chat_template(plain, tools=tools or None, tokenize=False) == expected
        assert ours.render(HI, tools=tools) == expected
    source = find_chat_template(tmp_path)
    assert source is not None
    assert source.all_text == NAMED["default"] + NAMED["tool_use"]


def test_a_folder_of_templates_is_part_of_the_model(tmp_path: Path) -> None:
    """Also in a Hugging Face cache, where its files are links to blobs."""
    snapshot, blobs = tmp_path / "models--a--b" / "snapshots" / "1", tmp_path / "models--a--b" / "blobs"
    (snapshot / "additional_chat_templates").mkdir(parents=True)
    blobs.mkdir()
    (blobs / "hash").write_text("tools")
    (snapshot / "chat_template.jinja").write_text("plain")
    (snapshot / "additional_chat_templates" / "tool_use.jinja").symlink_to("../../../blobs/hash")
    assert ChatTemplate(snapshot).render(HI, tools=TOOLS) == "tools"
    other = tmp_path / "other"
    other.mkdir()
    (other / "chat_template.jinja").write_text("plain")
    (other / "additional_chat_templates").symlink_to(snapshot / "additional_chat_templates")
    with pytest.raises(ModelError, match="additional_chat_templates is a link"):
        ChatTemplate(other)


def test_special_tokens_of_any_name_and_of_the_older_file(tmp_path: Path) -> None:
    source = "{{ bos_token }}{{ eos_token }}{{ image_token }}{{ audio_token }}"
    (tmp_path / "special_tokens_map.json").write_text(
        json.dumps({"bos_token": "<s>", "eos_token": {"content": "</s>"}, "chat_template": "not here"})
    )
    named = {
        "eos_token": "<old>",
        "image_token": "<image>",
        "extra_special_tokens": {"audio_token": "<audio>"},
    }
    assert made(tmp_path, source, **named).render(HI) == "<s></s><image><audio>"
    # transformers does not read the older file if this one lists the added tokens.
    assert made(tmp_path, source, **named, added_tokens_decoder={}).render(HI) == "<old><image><audio>"


def test_special_tokens_as_text_objects_and_absent(tmp_path: Path) -> None:
    source = "{{ bos_token }}|{{ eos_token }}|{{ pad_token }}|{{ unk_token is defined }}"
    template = made(
        tmp_path, source, bos_token={"content": "<s>", "lstrip": False}, eos_token="</s>", pad_token=None
    )
    assert template.render(HI) == "<s>|</s>||False"  # "None" is never printed


def test_strftime_now_generation_and_loop_controls(tmp_path: Path) -> None:
    source = (
        "{{ strftime_now('%Y') }}{% generation %}x{% endgeneration %}"
        "{% for m in messages %}{{ loop.index }}{{ loop.last }}{% break %}{% endfor %}"
        "{% for a in [1, [2]] recursive %}{{ loop(a) if a is iterable else a }}{% endfor %}"
    )
    assert re.fullmatch(r"20\d\dx1True12", made(tmp_path, source).render(HI))


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__ }}{{ raise_exception(''.__class__.__mro__[1].__subclasses__()|string) }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__class__.__init__.__globals__ }}",
        "{{ (messages|attr('__class__')).mro() }}",
        "{{ raise_exception.__globals__['os'].system('true') }}",
        "{{ strftime_now.__code__.co_consts[0] }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ '{0.__class__.__init__.__globals__}'.format(raise_exception) }}",
        "{{ ('{0.__class__.__mro__}'|format(1)).x.y }}{{ '%s'.__mod__.__self__.x.y }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'a': 1}) }}",
        "{{ messages[0].clear() }}",
        "{{ self.__init__.__globals__ }}",
        "{{ joiner.__init__.__globals__ }}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}",
        "{% extends '/etc/passwd' %}",
        "{{ lipsum(n=10**6) }}",
        "{{ dict.mro() }}",
        "{{ namespace.__init__.__globals__.x }}",
    ],
)
def test_nothing_of_python_is_reachable(tmp_path: Path, source: str) -> None:
    text = ""
    with suppress(InvalidRequest):
        text = made(tmp_path, source).render(HI)
    assert text == ""  # refused, or undefined, which prints as nothing


@pytest.mark.parametrize("source", ENDLESS)
def test_work_and_memory_are_bounded(tmp_path: Path, source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hundredth of the steps is enough to end the endless, and takes a hundredth of the time."""
    monkeypatch.setattr(template_sandbox, "MAX_STEPS", template_sandbox.MAX_STEPS // 100)
    template = made(tmp_path, source)
    with pytest.raises(InvalidRequest) as found:
        template.render(HI)  # must return: each of them would run for years
    assert found.value.param == "messages"


def test_the_limits_do_not_affect_honest_templates(tmp_path: Path) -> None:
    source = (
        "{{ 'a' ~ 1 ~ none ~ missing ~ [1, {'b': 'c'}] }}|{{ 'a\tb'.expandtabs(4) }}|{{ 'abc'.translate({97: 'xy'}) }}|"
        "{{ [1, 'b']|join(', ') }}|{{ ', '.join(['a', 'b']) }}|{{ 7 * 6 }}|{{ '%s and %s' % (1, [2]) }}|"
        "{{ {'a': [1]} }}|{{ '{} {x}'.format([1], x=2) }}"
    )
    expected = "a1None[1, {'b': 'c'}]|a   b|xybc|1, b|a, b|42|1 and [2]|{'a': [1]}|[1] 2"
    assert made(tmp_path, source).render(HI) == expected


def test_a_template_cannot_switch_the_meter_off(tmp_path: Path) -> None:
    loops = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    source = "{% set metered = 1 %}{% set environment = 1 %}" + loops
    with pytest.raises(InvalidRequest):
        made(tmp_path, source).render(HI)


def test_honest_templates_of_long_conversations_fit() -> None:
    messages = [Message(role="user", content="word " * 20)] * 4096
    assert ChatTemplate(TINY).render(messages).count("word") == 20 * 4096


def test_each_rendering_has_its_own_budget(tmp_path: Path) -> None:
    template = made(tmp_path, "{% for i in range(99999) %}{% endfor %}ok")
    assert [template.render(HI) for _ in range(40)] == ["ok"] * 40


def test_any_failure_of_a_template_is_a_refusal(tmp_path: Path) -> None:
    for source in (
        "{{ 1 / 0 }}",
        "{{ messages[5].x }}",
        "{{ undefined.x }}",
        "{{ [][0].x }}",
        "{{ 'a' + 1 }}",
        "{{ 'a'|int + none }}",
        "{{ {}.x() }}",
    ):
        with pytest.raises(InvalidRequest, match="refused the messages"):
            made(tmp_path, source).render(HI)


def test_bad_files_are_refused_at_start_up(tmp_path: Path) -> None:
    with pytest.raises(
        ModelError, match=r"/tokenizer_config\.json: the chat template cannot be compiled: .*line 2"
    ):
        made(tmp_path, "\n{% for %}")
    with pytest.raises(ModelError, match="cannot be compiled"):
        made(tmp_path, "{{ x|no_such_filter }}")
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff\xff")
    with pytest.raises(ModelError, match="cannot be read"):
        ChatTemplate(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    for raw in (b"{", b"[]", b"\xff", b"[" * 100_000):
        (tmp_path / "tokenizer_config.json").write_bytes(raw)
        with pytest.raises(ModelError, match=r"tokenizer_config\.json (is|contains) "):
            ChatTemplate(tmp_path)


def test_a_configured_template_replaces_the_models_own(tmp_path: Path) -> None:
    made(tmp_path, "own: {{ messages[0].content }}")
    given = tmp_path / "elsewhere" / "mine.jinja"
    given.parent.mkdir()
    given.write_text("mine: {{ messages[0].content }}")
    link = tmp_path / "link.jinja"
    link.symlink_to(given)
    for file in (given, link):
        assert ChatTemplate(tmp_path, file).render(HI).startswith("mine: ")
    given.write_text("{% for %}")
    with pytest.raises(ModelError, match=f"{given}: the chat template cannot be compiled"):
        ChatTemplate(tmp_path, given)
    missing = f"^model.chat_template: {tmp_path}/none.jinja does not exist: .* relative to the cluster file$"
    with pytest.raises(ModelError, match=missing):
        ChatTemplate(tmp_path, tmp_path / "none.jinja")


def test_a_model_without_a_template_is_found_out_without_compiling(tmp_path: Path) -> None:
    assert find_chat_template(tmp_path) is None
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": [{"name": "tools", "template": "x"}]}')
    assert find_chat_template(tmp_path) is None
    (tmp_path / "tokenizer_config.json").write_text(
        '{"chat_template": [{"name": "default", "template": "{% for %}"}]}'
    )
    found = find_chat_template(tmp_path)
    assert found == TemplateSource("{% for %}", tmp_path / "tokenizer_config.json")
    (tmp_path / "chat_template.jinja").write_text("own")
    assert find_chat_template(tmp_path) == TemplateSource("own", tmp_path / "chat_template.jinja")


def test_reasoning_parts_reach_the_template_as_reasoning(tmp_path: Path) -> None:
    """As vLLM and SGLang take them: of assistant messages only."""
    template = "{% for m in messages %}<{{ m.reasoning_content }}>{{ m.content }};{% endfor %}"
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": template}))
    thought = ContentPart("thinking", thinking="a"), ContentPart("reasoning", "b")
    said = Message("assistant", [*thought, ContentPart("text", "c")])
    only = Message("assistant", list(thought), reasoning_content="d")
    empty = Message("assistant", [])
    assert ChatTemplate(tmp_path).render([said, only, empty]) == "<ab>c;<d>;<>;"
    for wrong in (Message("user", list(thought)), Message("assistant", [ContentPart("thinking")])):
        with pytest.raises(InvalidRequest, match="has type 'thinking'"):
            ChatTemplate(tmp_path).render([wrong])


def test_images_reach_the_template_as_parts(tmp_path: Path) -> None:
    """As transformers passes them to a processor's template; text parts stay parts if the template prints them."""
    parts = "{% for p in m.content %}{% if p.type == 'image' %}<image>{% else %}[{{ p.text }}]{% endif %}{% endfor %}"
    one = "{% if m.content is string %}{{ m.content }}{% else %}" + parts + "{% endif %};"
    template = "{% for m in messages %}" + one + "{% endfor %}"
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": template}))
    picture = ContentPart("image_url", image_url="data:,")
    messages = [
        Message("user", [ContentPart("text", "a"), picture, picture, ContentPart("text", "b")]),
        Message("assistant", [ContentPart("text", "c"), ContentPart("text", "d")]),
    ]
    assert ChatTemplate(tmp_path).render(messages) == "[a]<image><image>[b];[c][d];"
