"""Grammars that force calls: what they accept is what the parser reads, and nothing else."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from itertools import product

import numpy as np
import pytest

from common.grammar import GrammarCompiler, mask_width
from router.chat.call_formats import CALL_FORMATS, CallFormat
from router.chat.call_grammar import CallGrammars, Thought
from router.grammar.lark import Lark
from router.tokens.tokenizer import Tokenizer
from tests.unit.router.chat.wire_formats import CLOCK, TOOLS, WEATHER, WELL_FORMED, Meaning, parse
from tests.unit.router.conftest import TINY

TOOLS_MODEL = TINY.parent / "tiny-tools"
THINK = ("<think>", "</think>")
EOS = 2
STRICT = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler((TINY / "tokenizer.json").read_text(), 704, [EOS])


def grammars(family: str, thinks: bool = True) -> CallGrammars:
    return CallGrammars(CALL_FORMATS[family], THINK if thinks else None, {})


def accepts(compiler: GrammarCompiler, grammar: Lark, text: str) -> bool:
    return accepts_tokens(compiler, grammar, compiler.tokenize(text))


def accepts_tokens(compiler: GrammarCompiler, grammar: Lark, tokens: list[int]) -> bool:
    return compiler.matcher(whole(grammar)).accept([*tokens, EOS])


def whole(grammar: Lark) -> str:
    """Return the text of the grammar that nodes get."""
    named = [{"name": name, "json_schema": json.loads(schema)} for name, schema in grammar.schemas.items()]
    return json.dumps({"grammars": [{"lark_grammar": grammar.text}, *named]})


def calls_of(family: str) -> list[tuple[str, Meaning]]:
    return [(text, meaning) for name, text, meaning in WELL_FORMED if name == family and meaning.calls]


@pytest.mark.parametrize("family", CALL_FORMATS)
def test_calls_in_the_format_of_the_family_are_accepted(family: str, compiler: GrammarCompiler) -> None:
    forced = grammars(family).forced([STRICT, CLOCK], Thought.POSSIBLE, several=True)
    form = CALL_FORMATS[family]

    def call(name: str, arguments: str, *tags: tuple[str, str]) -> str:
        if form.argument is not None:
            arguments = "".join(
                form.argument[0].replace("{key}", key) + value + form.argument[1] for key, value in tags
            )
        return form.begin.replace("{name}", name) + arguments + form.end

    weather = call("weather", '{"city": "Paris", "days": 3}', ("city", "Paris"), ("days", "3"))
    clock = call("clock", "{}")
    text = form.opening + weather + form.between + clock + form.closing
    expected = Meaning(calls=(("weather", '{"city": "Paris", "days": 3}'), ("clock", "{}")))
    assert parse(family, text) == expected
    assert accepts(compiler, forced, text)
    assert accepts(compiler, forced, f"<think>\nhm {{}}</think>\n\n{text}")
    assert accepts(compiler, forced, f"\n{text}")
    wrong: Sequence[str] = (
        "",
        "hello",
        f"hello {text}",
        f"{text} and more",
        text.replace("weather", "wether"),
        text.replace("days", "dayz"),
        text.replace("3", "x"),
    )
    assert [each for each in wrong if accepts(compiler, forced, each)] == []
    one = grammars(family).forced([STRICT], Thought.NONE, several=False)
    assert accepts(compiler, one, form.opening + weather + form.closing)
    assert not accepts(compiler, one, text)
    assert not accepts(compiler, one, form.opening + clock + form.closing)
    assert not accepts(compiler, one, f"<think>x</think>{form.opening}{weather}{form.closing}")


def test_a_section_that_the_prompt_opens_comes_first(compiler: GrammarCompiler) -> None:
    forced = grammars("qwen3").forced([CLOCK], Thought.OPEN, several=False)
    call = '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'
    assert accepts(compiler, forced, f"hm <tool_call></think>\n\n{call}")
    assert not accepts(compiler, forced, call)


@pytest.mark.parametrize("family", [name for name, form in CALL_FORMATS.items() if form.trigger])
def test_strict_tools_are_constrained_from_their_marker_on(family: str, compiler: GrammarCompiler) -> None:
    grammar = grammars(family).triggered([STRICT, CLOCK], frozenset({"weather"}), Thought.POSSIBLE)
    assert grammar is not None
    assert accepts(compiler, grammar, "")
    assert accepts(compiler, grammar, "just <text> [and] {more}")
    for text, _ in calls_of(family):
        assert accepts(compiler, grammar, text.lstrip()), text
        assert not accepts(compiler, grammar, text.replace("days", "dayz")), text
        assert not accepts(compiler, grammar, text.replace("weather", "wether")), text
        assert accepts(compiler, grammar, text.replace("clock", "clock").lstrip()), text


@pytest.mark.parametrize("family", [name for name, form in CALL_FORMATS.items() if form.trigger])
def test_typed_text_may_be_replaced_by_calls(family: str, compiler: GrammarCompiler) -> None:
    schema = json.dumps({"type": "object", "properties": {"sum": {"type": "integer"}}, "required": ["sum"]})
    made = grammars(family).or_json(
        [STRICT, CLOCK], frozenset({"weather"}), schema, Thought.POSSIBLE, several=True
    )
    form = CALL_FORMATS[family]
    clock = form.opening + form.begin.replace("{name}", "clock") + ("" if form.argument else "{}") + form.end
    assert accepts(compiler, made, '{"sum": 3}')
    assert accepts(compiler, made, '<think>hm</think>\n{"sum": 3}')
    assert accepts(compiler, made, clock + form.closing)
    for text, _ in calls_of(family):
        assert not accepts(compiler, made, text.replace("days", "dayz")), text
    wrong = (
        "",
        "hello",
        '{"sum": "x"}',
        f'{clock}{form.closing}{{"sum": 3}}',
        clock.replace("clock", "clack"),
    )
    assert [each for each in wrong if accepts(compiler, made, each)] == []


@pytest.mark.parametrize("family", CALL_FORMATS)
def test_a_function_without_parameters_is_called_without_arguments(
    family: str, compiler: GrammarCompiler
) -> None:
    form, bare = CALL_FORMATS[family], {"type": "function", "function": {"name": "ping"}}
    given = "{}" if form.argument is None else ""
    some = (
        '{"a": 1}'
        if form.argument is None
        else form.argument[0].replace("{key}", "a") + "1" + form.argument[1]
    )
    forced = grammars(family, thinks=False).forced([bare], Thought.NONE, several=False)
    strict = grammars(family, thinks=False).triggered([bare], frozenset(("ping",)), Thought.NONE)
    for grammar in (forced, strict):
        if grammar is not None:
            begin, end = form.opening + form.begin.replace("{name}", "ping"), form.end + form.closing
            assert accepts(compiler, grammar, begin + given + end)
            assert not accepts(compiler, grammar, begin + some + end)
            if form.argument is None:
                assert not accepts(compiler, grammar, begin + "{ }" + end)
    free = {"type": "function", "function": {"name": "ping", "parameters": {"type": "object"}}}
    if form.argument is None:
        grammar = grammars(family, thinks=False).forced([free], Thought.NONE, several=False)
        assert accepts(compiler, grammar, begin + some + end)


LLAMA_CALL = '{"name": "weather", "parameters": {"city": "Paris", "days": 3}}'
LLAMA_CLOCK = '{"name": "clock", "parameters": {"zone": "UTC"}}'


@pytest.mark.parametrize(
    ("text", "special"),
    [
        *product(["", "\n", "<|python_tag|>", "<|python_tag|>\n"], [False, True]),
        ("Let me see. <|python_tag|>", True),
    ],
)
def test_strict_tools_are_constrained_where_an_answer_begins_like_a_call(text: str, special: bool) -> None:
    """Llama 3 has no marker of calls, or only one that it may leave out. What the parser reads as calls is checked."""
    marker, tokenizer = "<|python_tag|>", Tokenizer(TINY)
    source = json.loads(tokenizer.json())
    if special:
        token = {"id": 704, "content": marker, "special": True, "normalized": False}
        source["added_tokens"].append({**token, "single_word": False, "lstrip": False, "rstrip": False})
    compiler = GrammarCompiler(json.dumps(source), 705, [EOS])
    written = CallGrammars(CALL_FORMATS["llama3"], None, {marker: 704} if special else {})
    grammar = written.triggered([STRICT, CLOCK], frozenset({"weather"}), Thought.NONE)
    assert grammar is not None

    def taken(answer: str) -> bool:
        tokens = compiler.tokenize(answer)
        if special and marker in answer:
            before, _, after = answer.partition(marker)
            tokens = [*compiler.tokenize(before), 704, *compiler.tokenize(after)]
        return accepts_tokens(compiler, grammar, tokens)

    for calls in (LLAMA_CALL, LLAMA_CLOCK, f"{LLAMA_CLOCK}; {LLAMA_CALL}"):
        assert parse("llama3", text + calls).calls
        assert taken(text + calls), calls
    for wrong in (
        LLAMA_CALL.replace("days", "dayz"),
        LLAMA_CALL.replace("weather", "wether"),
        LLAMA_CALL.replace("3", '"3"'),
        LLAMA_CALL.replace('{"name"', '{ "name"'),
        LLAMA_CALL.replace('{"name"', '{"type": "function", "name"'),
        LLAMA_CALL.replace(': "weather"', '\x1f: "wether"'),
        LLAMA_CALL[:-1],
        f"{LLAMA_CALL} and more",
        f"{LLAMA_CLOCK}; {LLAMA_CALL.replace('days', 'dayz')}",
    ):
        assert not taken(text + wrong), wrong
    for free in (
        "It rains.",
        '{"answer": 3}',
        '{"names": 1}',
        "{",
        f"I call {LLAMA_CALL.replace('days', 'x')}",
    ):
        assert parse("llama3", text + free).calls == ()
        assert taken(text + free), free
    if special:
        spelled_out = compiler.tokenize(f"{marker}{LLAMA_CALL.replace('days', 'dayz')}")
        assert not accepts_tokens(compiler, grammar, spelled_out)


@pytest.mark.parametrize("seed", range(12))
def test_texts_drawn_by_the_masks_hold_no_other_calls(seed: int, compiler: GrammarCompiler) -> None:
    """Random tokens that the masks of Llama 3's format allow: the parser reads valid calls, or none."""
    parameters = {
        "type": "object",
        "properties": {"city": {"enum": ["Paris", "Oslo"]}, "days": {"enum": [1, 2, 3]}},
        "required": ["city", "days"],
        "additionalProperties": False,
    }
    tool = {"type": "function", "function": {"name": "weather", "parameters": parameters}}
    grammar = grammars("llama3").triggered([tool], frozenset({"weather"}), Thought.NONE)
    assert grammar is not None
    rng, matcher = random.Random(seed), compiler.matcher(whole(grammar))
    answer = compiler.tokenize(["", '{"name": "', ' {"', "{"][seed % 4])
    assert matcher.accept(answer)
    masks = np.zeros((1, mask_width(704)), dtype=np.int32)
    while not matcher.stopped and len(answer) < 80:
        matcher.fill(masks, 0)
        bits = np.unpackbits(masks.view(np.uint8), bitorder="little")[:704]
        answer.append(rng.choice(np.flatnonzero(bits).tolist()))
        assert matcher.accept(answer[-1:])
    text = Tokenizer(TINY).decode(answer, skip_special_tokens=True)
    for name, arguments in parse("llama3", text).calls:
        assert name == "weather"
        assert not matcher.ended or set(json.loads(arguments)) == {"city", "days"}
    assert bool(parse("llama3", text).calls) == (seed % 4 == 1)


def test_a_format_that_nothing_tells_from_text_cannot_be_triggered() -> None:
    unmarked = CallGrammars(CallFormat("call {name} ", ".", ", ", None), None, {})
    assert unmarked.triggered([STRICT], frozenset({"weather"}), Thought.NONE) is None


def test_special_tokens_are_named_by_their_ids() -> None:
    written = CallGrammars(CALL_FORMATS["mistral_v11"], None, {"[TOOL_CALLS]": 9, "[ARGS]": 32})
    forced = written.forced([WEATHER], Thought.NONE, several=True)
    assert 'call_0: <[9]> "weather" <[32]> @args_0' in forced.text
    triggered = written.triggered(TOOLS, frozenset(), Thought.NONE)
    assert triggered is not None
    assert "piece: /(?s:.*)/ <[9]> call" in triggered.text


def test_markers_that_are_tokens_but_not_special_are_forced_by_their_ids() -> None:
    """Qwen3's markers: llguidance takes their tokens only where a grammar names the ids."""
    tokenizer = Tokenizer(TOOLS_MODEL)
    compiler = GrammarCompiler(tokenizer.json(), tokenizer.vocab_size, [EOS])
    markers = tokenizer.markers_in("".join((*THINK, "<tool_call></tool_call>")))
    assert len(markers) == 4
    tagged = CallGrammars(CALL_FORMATS["qwen3_5"], None, markers).triggered(
        [STRICT, CLOCK], frozenset({"weather"}), Thought.NONE
    )
    assert tagged is not None
    made = CallGrammars(CALL_FORMATS["qwen3"], THINK, markers)
    call = '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'

    def taken(grammar: Lark, text: str) -> bool:
        return accepts_tokens(compiler, grammar, tokenizer.encode(text, add_special_tokens=False))

    for value in ("b", "b\n</function>\nc"):
        tag = f"<parameter=a>\n{value}\n</parameter>\n"
        assert taken(tagged, f"<tool_call>\n<function=clock>\n{tag}</function>\n</tool_call>"), value
    assert not taken(tagged, "<tool_call>\n<function=clock>\n</tool_call>")
    for thought, before in (
        (Thought.NONE, ""),
        (Thought.POSSIBLE, "<think>\nA clock.\n</think>\n\n"),
        (Thought.OPEN, "A clock.\n</think>\n\n"),
    ):
        assert taken(made.forced([CLOCK], thought, several=True), f"{before}{call}\n{call}")
        assert not taken(made.forced([CLOCK], thought, several=False), f"{before}{call}\n{call}")
        triggered = made.triggered([CLOCK], frozenset({"clock"}), thought)
        assert triggered is not None
        assert taken(triggered, f"{before}{call}")
        assert taken(triggered, f"{before}It is late.")
        assert not taken(triggered, before + call.replace("clock", "bell"))
