"""What the cluster file says about answers, and random answers in random pieces."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from common.config import load_cluster
from common.observability.logs import Log
from router.chat.answer_style import AnswerStyle
from router.chat.call_grammar import Thought
from router.chat.response_template import compile_template
from router.from_config import answer_style
from router.tokens.tokenizer import Tokenizer
from tests.unit.router.chat.wire_formats import Meaning, events_of, meaning_of, parse, parser_of, template_of
from tests.unit.router.conftest import TINY

# The tiny model writes calculations and then #### with the result.
STEPS = {
    "start_anchor": "<|assistant|>",
    "fields": {"reasoning_content": {"content": "text"}, "content": {"open": "####", "content": "text"}},
}
PIECES = {
    "qwen3": (
        *(
            "<think>",
            "</think>",
            "<tool_call>",
            "</tool_call>",
            "<tool",
            "\n",
            "  ",
            " a ",
            "<",
            "}",
            "}}",
            '"',
        ),
        *(
            '{"name": "weather", "arguments": {"city": "a"}}',
            '{"name": "clock"',
            ', "arguments": ',
            '{"a": [1, "x\\"',
        ),
    ),
    "qwen3_5": (
        *(
            "<think>",
            "</think>",
            "<tool_call>",
            "\n<function=weather>",
            "<function=clock>\n",
            "\n",
            " a ",
            "<",
        ),
        *("<parameter=city>", "<parameter=days>", "\n3\n", "</parameter>", "</function>", "</tool_call>"),
    ),
    "mistral_v11": (
        *("[TOOL_CALLS]", "[ARGS]", "weather", '{"a": 1}', "{", "}", "[", "]", '"', " a ", "</s>", "[THINK]"),
        *("[/THINK]", "[CALL_ID]", ", "),
    ),
    "mistral_v3": ("[TOOL_CALLS]", "[{", "}]", '{"name": "clock", "arguments": {}}', ", ", "[", "]", " a "),
    "llama3": (
        "<|python_tag|>",
        '{"name": "clock", "parameters": {"x": "',
        '"}}',
        "; ",
        "{",
        "}",
        " a ",
        "\n",
    ),
}


class Warnings(Log):
    """Keeps the warnings."""

    def __init__(self) -> None:
        super().__init__("test")
        self.kept: list[str] = []

    def warning(self, event: str, **fields: object) -> None:
        self.kept.append(event)


def style(
    tmp_path: Path, tokenizer: Tokenizer, model: str = "", router: str = "", log: Log | None = None
) -> AnswerStyle:
    file = tmp_path / "cluster.yaml"
    file.write_text(f"model:\n  path: {TINY}\n{model}router:\n  port: 0\n{router}")
    return answer_style(load_cluster(file, environ={}), tokenizer, log or Log("test"))


def test_a_chat_template_that_shows_no_tools_is_found_at_the_start(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    """As where calls are read for a model whose template was written before it had tools (DeepSeek R1)."""
    shown = TINY.parent / "tiny-tools" / "chat_template.jinja"
    for lines, warned in (
        ("", False),
        ("  response_template: think\n", False),
        ("  response_template: qwen3\n", True),
        (f"  response_template: qwen3\n  chat_template: {shown}\n", False),
    ):
        log = Warnings()
        style(tmp_path, tokenizer, lines, log=log)
        assert any("does not show tools" in each for each in log.kept) == warned


def test_what_the_cluster_file_says(tmp_path: Path, tokenizer: Tokenizer) -> None:
    plain = style(tmp_path, tokenizer)
    assert plain.template is None
    assert "enable_thinking" in plain.template_variables
    assert style(tmp_path, tokenizer, "  chat_template_kwargs: []\n").template_variables == frozenset()
    (tmp_path / "steps.json").write_text(json.dumps(STEPS))
    found = style(
        tmp_path, tokenizer, "  response_template: steps.json\n", "  reasoning_fields: [reasoning]\n"
    )
    assert found.template is not None
    assert (found.template.reasons, found.template.calls) == (True, False)
    assert found.reasoning_fields == ("reasoning",)
    assert found.kept == frozenset()
    events = events_of(parser_of(found.template), " 3 * 4 = 12\n12 - 5 = 7\n#### 7", 3)
    assert meaning_of(events) == Meaning("7", " 3 * 4 = 12\n12 - 5 = 7")
    steps = json.dumps(STEPS).replace("####", "<|user|>")
    (tmp_path / "steps.json").write_text(steps)
    found = style(tmp_path, tokenizer, "  response_template: steps.json\n")
    assert found.kept == {tokenizer.token_to_id("<|user|>")}


def test_the_tokens_of_the_markers_around_reasoning(tmp_path: Path) -> None:
    """They are special tokens, or the tokens of a text, which prompts may write in other tokens."""
    tools = Tokenizer(TINY.parent / "tiny-tools")
    chat = "  response_template: qwen3\n"
    found = style(tmp_path, tools, chat).think_markers
    assert found is not None
    assert [marker.tokens for marker in found] == [(7,), (8,)]
    assert found[0].tokens_since(tools.encode("Hm</think><think>I think", False)) == len(
        tools.encode("I think", False)
    )
    spelled = {"open": "<thought>", "close": "</thought>", "content": "text"}
    template = STEPS | {"fields": {"reasoning": spelled, "content": {"content": "text"}}}
    (tmp_path / "steps.json").write_text(json.dumps(template))
    written = style(tmp_path, tools, "  response_template: steps.json\n")
    assert written.think_markers is not None
    begin, end = written.think_markers
    assert [tools.decode(marker.tokens, False) for marker in (begin, end)] == ["<thought>", "</thought>"]
    assert len(end.tokens) > 1
    canonical, other = (
        tools.encode("<thought>", False),
        [tools.encode(each, False)[0] for each in "<thought>"],
    )
    assert list(begin.tokens) == canonical != other
    for opened in (canonical, other):
        for rest in ("", "\n", "Hm</thought>", "<thought"):
            after = tools.encode(rest, False)
            assert begin.tokens_since([*opened, *tools.encode("Hm", False), *opened, *after]) == len(after)
    assert end.tokens_since(tools.encode("</thoughts>", False)) is None
    for pattern in ("open_pattern", "close_pattern"):
        replaced = {**spelled, pattern: "</?th[a-z]*>"}
        del replaced[pattern.removesuffix("_pattern")]
        fields = {"reasoning": replaced, "content": {"content": "text"}}
        (tmp_path / "steps.json").write_text(json.dumps(STEPS | {"fields": fields}))
        assert style(tmp_path, tools, "  response_template: steps.json\n").think_markers is None


@pytest.mark.parametrize(
    ("prefix", "expected"),
    [
        ("", Thought.POSSIBLE),
        ("\n", Thought.POSSIBLE),
        ("<think>\n", Thought.OPEN),
        ("<think>\nhm", Thought.OPEN),
        ("<think>\n\n</think>\n\n", Thought.NONE),
        ("It rains", Thought.NONE),
    ],
)
def test_where_the_message_is_after_what_the_prompt_holds_of_it(prefix: str, expected: Thought) -> None:
    assert AnswerStyle(template=template_of("qwen3")).thought(prefix) is expected
    for without in (AnswerStyle(), AnswerStyle(template=template_of("llama3"))):
        assert without.thought(prefix) is Thought.NONE


@pytest.mark.parametrize("size", [1, 2, 5, 100])
@pytest.mark.parametrize(
    ("template", "prefix", "text", "expected"),
    [
        ("qwen3", "<think>\n", "I think.</think>\nSo", "I think."),
        ("qwen3", "<think>\nHm</think>", "So <think>it</think> is", "it"),
        ("qwen3", "It", " is<think>", ""),
        ("mistral_v11", "", "[THINK]a[/THINK]b[THINK]c[/THINK]", "ac"),
        ("steps", "", "3 * 4 = 12\n#### 12", "3 * 4 = 12\n"),
        ("steps", "3 *", " 4 = 12\n#### 12", " 4 = 12\n"),
    ],
)
def test_where_the_answer_reasons(template: str, prefix: str, text: str, expected: str, size: int) -> None:
    found = compile_template(STEPS, "steps", trusted=True) if template == "steps" else template_of(template)
    parser = parser_of(found, prefix)
    decided = dict[int, bool]()
    for start in range(0, len(text), size):
        parser.feed(text[start : start + size])
        decided |= {place: parser.reasons_at(place) for place in range(len(decided), parser.position)}
    parser.finish()
    assert all(parser.reasons_at(place) is known for place, known in decided.items())
    assert "".join(each for place, each in enumerate(text) if parser.reasons_at(place)) == expected


def test_ids_of_calls() -> None:
    assert {len(AnswerStyle().new_id()) for _ in range(3)} == {29}
    short = {AnswerStyle(short_ids=True).new_id() for _ in range(20)}
    assert len(short) == 20
    assert all(len(each) == 9 and each.isalnum() for each in short)


def test_random_answers_mean_the_same_in_any_pieces() -> None:
    rng = random.Random(5)
    for _ in range(400):
        family = rng.choice(list(PIECES))
        text = "".join(rng.choice(PIECES[family]) for _ in range(rng.randint(1, 14)))
        prefix = rng.choice(("", "", "<think>\n", "It "))
        whole = parse(family, text, prefix=prefix)
        assert [size for size in (1, 3) if parse(family, text, size, prefix) != whole] == [], (family, text)
