"""How the response template of a model is found and compiled."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from common.errors import InternalError, ModelError
from router.chat.answer_style import AnswerStyle, find_template
from router.chat.families import BY_NAME, FAMILIES, family_of
from router.chat.response_template import compile_template
from router.tokens.tokenizer import Tokenizer
from tests.unit.router.chat.wire_formats import Meaning, events_of, meaning_of, parser_of, template_of
from tests.unit.router.conftest import TINY

ROOT = Path(__file__).parents[4]
OWN: dict[str, Any] = {
    "start_anchor": "<|assistant|>",
    "fields": {
        "thinking": {"open_pattern": r"\s*<reason>", "close": "</reason>"},
        "tool_calls": {
            "open_pattern": r"\s*<call name=(?P<name>\w+)>",
            "close": "</call>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
        "content": {"content": "text"},
    },
}


def model(tmp_path: Path, chat_template: str = "", response_template: Any = None) -> Path:
    values = {"chat_template": chat_template}
    if response_template is not None:
        values["response_template"] = response_template
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(values))
    return tmp_path


def found(tmp_path: Path, wanted: str = "auto") -> tuple[bool, str | None]:
    template, family = find_template(tmp_path, None, wanted, lambda text: tmp_path / text)
    return template is not None, None if family is None else family.name


def test_the_library_loads_no_torch() -> None:
    code = (
        "import sys; from router.chat.families import FAMILIES\n"
        "from router.chat.response_template import compile_template\n"
        "assert 'transformers' not in sys.modules\n"
        "for each in FAMILIES: compile_template(dict(each.template), each.name, True)\n"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.stdout.strip() == "False", done.stderr


@pytest.mark.parametrize(
    ("chat_template", "family"),
    [
        ('<tool_call>\n{"name": ...} <think>', "qwen3"),
        ('<tool_call>\n{"name": ...}', "qwen2_5"),
        ("<tool_call> <function=a> <parameter=b> <think>", "qwen3_5"),
        ("<tool_call> <arg_key> <arg_value> <think>", "glm4_5"),
        ("[TOOL_CALLS] [ARGS]", "mistral_v11"),
        ("[TOOL_CALLS]", "mistral_v3"),
        ('<|start_header_id|> {"name": n, "parameters": p}', "llama3"),
        ("... </think> ...", "think"),
        ("<|start_header_id|> no tools", None),
        ("[func(a=1)]", None),
    ],
)
def test_the_family_follows_from_the_chat_template(
    tmp_path: Path, chat_template: str, family: str | None
) -> None:
    assert found(model(tmp_path, chat_template)) == (family is not None, family)
    assert found(tmp_path, "none") == (False, None)
    assert found(tmp_path, "glm4_5") == (True, "glm4_5")


def test_a_template_of_the_checkpoint_comes_first(tmp_path: Path) -> None:
    template, family = find_template(model(tmp_path, "[TOOL_CALLS]", OWN), None, "auto", Path)
    assert family is BY_NAME["mistral_v3"]
    assert template is not None
    text = ' <reason>\nhm</reason>\n a <call name=clock>{"b": "</call>"}</call>'
    expected = Meaning("a", "hm", (("clock", '{"b": "</call>"}'),))
    for size in (1, 3, 1000):
        assert meaning_of(events_of(parser_of(template), text, size)) == expected


def test_a_file_of_the_operator(tmp_path: Path) -> None:
    (tmp_path / "own.json").write_text(json.dumps(OWN))
    assert found(model(tmp_path, "[TOOL_CALLS]"), "own.json") == (True, None)
    with pytest.raises(ModelError, match=r"there is no file .*other\.json; set one of auto, none, qwen3_5"):
        found(tmp_path, "other.json")


@pytest.mark.parametrize(
    "change",
    [
        {"version": 2},
        {"fields": {}},
        {"fields": {"content": {"open_pattern": "(", "close": "x"}}},
        {"fields": {"content": {"content": "yaml"}}},
    ],
)
def test_an_invalid_template_is_refused_at_start(tmp_path: Path, change: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match=r"tokenizer_config.json: the response template is not valid"):
        found(model(tmp_path, "", OWN | change))


def test_shapes_that_only_the_library_reads(tmp_path: Path) -> None:
    """They run without a time limit, so only an operator can ask for them."""
    spec = json.loads(json.dumps(OWN))
    spec["fields"]["tool_calls"] |= {"content": "kv-lines"}
    with pytest.raises(ModelError, match="model.response_template names a file"):
        found(model(tmp_path, "", spec))
    template = compile_template(spec, "file", trusted=True)
    text = "a <call name=clock>\nb: 1\nc: x y\n</call> <call name=clock>"
    expected = Meaning("a  <call name=clock>", "", (("clock", '{"b": "1", "c": "x y"}'),))
    for size in (1, 3, 1000):
        assert meaning_of(events_of(parser_of(template), text, size)) == expected


def test_a_pattern_of_a_checkpoint_that_takes_too_long_ends_the_request() -> None:
    spec = json.loads(json.dumps(OWN))
    spec["fields"]["thinking"]["open_pattern"] = "(a|aa)+b"
    parser = parser_of(compile_template(spec, "checkpoint", trusted=False))
    with pytest.raises(InternalError, match="takes too long"):
        parser.feed("a" * 200 + "c")
    spec = {key: value for key, value in OWN.items() if key != "start_anchor"}
    template = compile_template(spec | {"start_anchor_pattern": "(a|aa)+b"}, "checkpoint", trusted=False)
    with pytest.raises(InternalError, match="takes too long"):
        AnswerStyle(template).prefix([1], lambda _: "a" * 200 + "c")


def test_special_tokens_of_markers_are_kept(tokenizer: Tokenizer) -> None:
    kept = tokenizer.markers_in("<|assistant|>\n ... <|end|>")
    assert set(kept) == {"<|assistant|>", "<|end|>"}
    user, assistant = (tokenizer.token_to_id(each) for each in ("<|user|>", "<|assistant|>"))
    assert user is not None
    assert assistant is not None
    decoder = tokenizer.stream(True, (), frozenset(kept.values()))
    assert decoder.step(user) + decoder.step(assistant) == "<|assistant|>"


def test_what_the_prompt_holds_of_the_message(tokenizer: Tokenizer) -> None:
    style = AnswerStyle(template_of("glm4_5"))

    def prefix(text: str) -> str:
        prompt = tokenizer.encode(text, add_special_tokens=False)
        return style.prefix(prompt, lambda ids: tokenizer.decode(ids, skip_special_tokens=False))

    assert prefix("<|assistant|> x <|user|> hi <|assistant|>\n<think></think>\n") == "\n<think></think>\n"
    assert prefix("<|assistant|>" + "word " * 300).startswith("word word")
    assert prefix("no anchor " * 300) == ""


def test_names_of_families_are_unique() -> None:
    assert len(BY_NAME) == len(FAMILIES)
    assert family_of("") is None


def test_markers_in_angle_brackets_count_even_if_they_are_not_special(tokenizer: Tokenizer) -> None:
    tools = Tokenizer(TINY.parent / "tiny-tools")
    found = tools.markers_in("<think></think><tool_call>{}</tool_call><|im_end|>")
    assert set(found) == {"<think>", "</think>", "<tool_call>", "</tool_call>", "<|im_end|>"}
    decoder = tools.stream(True, (), frozenset(found.values()))
    assert "".join(map(decoder.step, found.values())) == "".join(found)
    assert tokenizer.markers_in("<think>") == {}
