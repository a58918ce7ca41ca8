"""Answers of every family in pieces of any size, and answers that are not well-formed."""

from __future__ import annotations

import re
import time

import msgspec
import pytest

from router.chat.answer_events import CallOpened, Content, Reasoning
from tests.unit.router.chat.wire_formats import (
    NOW,
    OBJECT_CALLS,
    PARIS,
    THOUGHT,
    TOOLS,
    WELL_FORMED,
    Meaning,
    events_of,
    meaning_of,
    parse,
    parser_of,
    template_of,
)

SIZES = (1, 3, 7, 1 << 30)
OPEN, CLOSE = "<tool_call>", "</tool_call>"


def same_in_any_pieces(family: str, text: str, expected: Meaning, prefix: str = "") -> None:
    """Check what an answer means, and that its content says where the model has written it."""
    for size in SIZES:
        assert parse(family, text, size, prefix) == expected, size
        for event in events_of(parser_of(template_of(family), prefix), text, size):
            if isinstance(event, Content):
                assert "".join(text[start:end] for start, end in event.spans) == event.text


@pytest.mark.parametrize(("family", "text", "meaning"), WELL_FORMED)
def test_well_formed_answers(family: str, text: str, meaning: Meaning) -> None:
    same_in_any_pieces(family, text, meaning)


@pytest.mark.parametrize(("family", "text", "meaning"), WELL_FORMED)
def test_the_library_reads_the_same(family: str, text: str, meaning: Meaning) -> None:
    """transformers' own parser agrees about whole, well-formed answers.

    Blanks between markers are left out: there they replace the library's content.
    """
    found = template_of(family).whole(re.sub(r"\s+(?=<tool_call>|<think>)", "", text), TOOLS)
    assert found.get("content", "").strip() == meaning.content
    assert found.get("reasoning_content", "").strip() == meaning.reasoning
    calls = found.get("tool_calls", [])
    # A template without `repeats` yields the one call itself, or the one list.
    calls = [calls] if isinstance(calls, dict) else calls
    assert [(each["function"]["name"], each["function"]["arguments"]) for each in calls] == [
        (name, msgspec.json.decode(arguments)) for name, arguments in meaning.calls
    ]


def test_arguments_arrive_while_they_are_generated() -> None:
    for family, text in (
        ("qwen3", '<tool_call>\n{"name": "weather", "arguments": {"city": "Pa'),
        ("mistral_v11", '[TOOL_CALLS]weather[ARGS]{"city": "Pa'),
        ("llama3", '{"name": "weather", "parameters": {"city": "Pa'),
        ("mistral_v3", '[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Pa'),
    ):
        parser = parser_of(template_of(family))
        events = [event for character in text for event in parser.feed(character)]
        assert events[0] == CallOpened(0, "call_0", "weather"), family
        assert meaning_of(events).calls == (("weather", '{"city": "Pa'),), family
    for family, text in (
        ("qwen3_5", "<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>"),
        ("glm4_5", "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>"),
    ):
        parser = parser_of(template_of(family))
        events = [event for character in text for event in parser.feed(character)]
        assert meaning_of(events).calls == (("weather", '{"city": "Paris"'),), family


def test_an_answer_cut_off_inside_a_call_keeps_what_there_is() -> None:
    for family, text, arguments in (
        ("qwen3", '<tool_call>{"name": "weather", "arguments": {"city": "Pa', '{"city": "Pa'),
        ("llama3", '{"name": "weather", "parameters": {"city": "Pa', '{"city": "Pa'),
        ("mistral_v11", '[TOOL_CALLS]weather[ARGS]{"city": "Pa', '{"city": "Pa'),
        (
            "qwen3_5",
            "<tool_call><function=weather><parameter=days>3</parameter><parameter=city>Pa",
            '{"days": 3',
        ),
    ):
        same_in_any_pieces(family, text, Meaning(calls=(("weather", arguments),)))
    same_in_any_pieces("qwen3", '<tool_call>{"name": "wea', Meaning('<tool_call>{"name": "wea'))
    same_in_any_pieces("qwen3", "<think>half a tho", Meaning(reasoning="half a tho"))


def test_what_is_not_a_call_stays_text() -> None:
    for inside in (
        '{"nme": "weather"}',
        "not JSON",
        "[1, 2]",
        '[[{"name": "clock"}]]',
        '{"name": 3}',
        '{"name" "a"}',
        "",
    ):
        text = f"a {OPEN}{inside}{CLOSE} b"
        same_in_any_pieces("qwen3", text, Meaning(text))
    for text in ('{"names": "weather"}', 'see {"name": "weather", "parameters": {}}', '{"name": 3}', "{}"):
        same_in_any_pieces("llama3", text, Meaning(text))
    same_in_any_pieces("mistral_v11", "[TOOL_CALLS]weather[ARGS] no", Meaning("[TOOL_CALLS]weather[ARGS] no"))


def test_malformed_arguments_are_passed_on_unchanged() -> None:
    text = f'{OPEN}{{"name": "clock", "arguments": {{"a": ]nonsense, 1 1}}}}{CLOSE}'
    same_in_any_pieces("qwen3", text, Meaning(calls=(("clock", '{"a": ]'),)))
    text = f'{OPEN}{{"name": "clock", "arguments": {{"a": tru}}}}{CLOSE} yes'
    same_in_any_pieces("qwen3", text, Meaning("yes", calls=(("clock", '{"a": tru}'),)))


def test_a_closing_marker_inside_a_string_is_part_of_it() -> None:
    arguments = f'{{"city": "a{CLOSE}b\\"{CLOSE}", "days": 1}}'
    text = f'{OPEN}{{"name": "weather", "arguments": {arguments}}}{CLOSE}\nok'
    same_in_any_pieces("qwen3", text, Meaning("ok", calls=(("weather", arguments),)))
    arguments = '{"city": "[TOOL_CALLS]clock[ARGS]{}"}'
    same_in_any_pieces(
        "mistral_v11", f"[TOOL_CALLS]weather[ARGS]{arguments}", Meaning(calls=(("weather", arguments),))
    )


def test_a_missing_bracket_does_not_lose_the_rest() -> None:
    text = f'{OPEN}{{"name": "clock", "arguments": {{}}{CLOSE}\n{OPEN}{{"name": "clock"}}}}{CLOSE}'
    same_in_any_pieces("qwen3", text, Meaning(calls=(NOW, NOW)))
    same_in_any_pieces("qwen3", f'{OPEN}{{"name": "clock"{CLOSE} b', Meaning("b", calls=(NOW,)))


def test_text_after_a_call_does_not_replace_text_before_it() -> None:
    same_in_any_pieces("qwen2_5", f"a\n{OBJECT_CALLS}\nb ", Meaning("a\n\n\nb ", calls=(PARIS, NOW)))
    same_in_any_pieces("llama3", '{"name": "clock"}; {"name": "clock"} b', Meaning("b", calls=(NOW, NOW)))


def test_blanks_beside_markers_are_dropped_and_others_are_kept() -> None:
    same_in_any_pieces("qwen3", "<think>\n\n</think>\n\n  a \n b ", Meaning("a \n b "))
    same_in_any_pieces("qwen3", " \n a", Meaning(" \n a"))
    same_in_any_pieces("qwen3", " \n ", Meaning(" \n "))
    same_in_any_pieces("qwen3", f"\n\n{OBJECT_CALLS}\n\n", Meaning(calls=(PARIS, NOW)))


def test_arguments_before_the_name_and_arguments_as_text() -> None:
    text = f'{OPEN}{{"arguments": {{"days": 1}}, "name": "weather"}}{CLOSE}'
    same_in_any_pieces("qwen3", text, Meaning(calls=(("weather", '{"days": 1}'),)))
    text = f'{OPEN}{{"name": "weather", "arguments": "{{\\"days\\": 1}}"}}{CLOSE}'
    same_in_any_pieces("qwen3", text, Meaning(calls=(("weather", '{"days": 1}'),)))
    text = f'{OPEN}{{"name": "w\\u00e9", "id": {{"x": [1]}}, "arguments": null}}{CLOSE}'
    same_in_any_pieces("qwen3", text, Meaning(calls=(("wé", "{}"),)))
    text = '{"name": "weather", "arguments": {"days": 1}}'
    same_in_any_pieces("llama3", text, Meaning(calls=(("weather", '{"days": 1}'),)))


def test_tagged_values_get_the_types_of_the_schema() -> None:
    def call(**values: str) -> str:
        tags = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
        return f"<tool_call>\n<function=weather>\n{tags}</function>\n</tool_call>"

    for values, arguments in (
        ({"city": "12"}, '{"city": "12"}'),
        ({"days": "x"}, '{"days": "x"}'),
        ({"days": "3.0"}, '{"days": 3}'),
        ({"units": "null"}, '{"units": null}'),
        ({"places": '[1, {"a": 2}]'}, '{"places": [1, {"a": 2}]}'),
        ({"places": "[1,"}, '{"places": "[1,"}'),
        ({"other": "  a\n\n b"}, '{"other": "  a\\n\\n b"}'),
        ({"city": 'a</b>é"', "days": "-2"}, '{"city": "a</b>é\\"", "days": -2}'),
    ):
        same_in_any_pieces("qwen3_5", call(**values), Meaning(calls=(("weather", arguments),)))
    twice = call(days="1").replace("</function>", "<parameter=days>\n2\n</parameter>\n</function>")
    same_in_any_pieces("qwen3_5", twice, Meaning(calls=(("weather", '{"days": 1}'),)))


def test_what_the_prompt_holds_of_the_message() -> None:
    same_in_any_pieces("qwen3", "\nhm\n</think>\n\nyes", Meaning("yes", "hm"), prefix="<think>\n")
    same_in_any_pieces("qwen3", "yes", Meaning("yes"), prefix="<think>\n\n</think>\n\n")
    same_in_any_pieces("qwen3", " and more", Meaning(" and more"), prefix="It rains")
    same_in_any_pieces("llama3", '{"name": "clock"}', Meaning('{"name": "clock"}'), prefix="It is ")


def test_without_tools_calls_are_text_and_without_reasoning_so_is_the_thought() -> None:
    text = THOUGHT + OBJECT_CALLS
    parser = parser_of(template_of("qwen3"), tools=())
    assert meaning_of(events_of(parser, text, 3)) == Meaning(OBJECT_CALLS, "They want {the} weather.")
    parser = parser_of(template_of("qwen3"), reasoning=False)
    assert meaning_of(events_of(parser, text, 3)) == Meaning(THOUGHT.rstrip(), "", (PARIS, NOW))


def test_text_is_not_held_back() -> None:
    """Only what may be the beginning of a marker, and blanks whose role depends on what follows."""
    parser = parser_of(template_of("qwen3"))
    assert parser.feed("a<b") == [Content("a<b")]
    assert parser.feed(" c <") == [Content(" c")]
    assert parser.feed("thinx") == [Content(" <thinx")]
    assert parser.feed("<think>") == []
    assert parser.feed("x </thi") == [Reasoning("x")]
    assert parser.feed("nk>") == []
    assert parser.feed("y") == [Content("y")]
    assert parser.feed(OPEN) == []
    assert meaning_of(parser.feed("no")) == Meaning(f"{OPEN}no")


HOSTILE: list[tuple[str, str]] = [
    ("qwen3", OPEN + "{" * (1 << 19)),
    ("qwen3", OPEN + '{"name": "a", "arguments": ' + "[" * (1 << 19)),
    ("qwen3", OPEN + '{"arguments": ' + "[" * (1 << 19)),
    ("qwen3", OPEN * (1 << 15)),
    ("qwen3", "<" * (1 << 19)),
    ("qwen3", " " * (1 << 19)),
    ("qwen3", "<think>" + "</thin" * (1 << 16)),
    ("qwen3", OPEN + '{"name": "' + "a" * (1 << 19)),
    ("qwen3", OPEN + '{"name": "a", "arguments": {"a": "' + CLOSE * (1 << 15)),
    ("qwen3_5", "<tool_call><function=a>" + "</parameter>" * (1 << 15)),
    ("qwen3_5", "<tool_call><function=a>" + "<parameter=a>" * (1 << 15) + "</parameter>"),
    ("qwen3_5", "<tool_call>" + " " * (1 << 19) + "<function=a>"),
    ("glm4_5", "<tool_call>a" + "<arg_key>" * (1 << 15) + "</arg_value>"),
    ("glm4_5", "<tool_call>" * (1 << 15)),
    ("mistral_v11", "[TOOL_CALLS]" * (1 << 15)),
    ("mistral_v11", "[TOOL_CALLS]a[ARGS]" + "{" * (1 << 19)),
    ("mistral_v3", "[TOOL_CALLS]" + "[" * (1 << 19)),
    ("llama3", '{"name":' + " " * (1 << 19)),
    ("llama3", '{"name": "a"}' + '{"name": "a"}' * (1 << 14)),
]


@pytest.mark.parametrize("size", [16, 1 << 30])
@pytest.mark.parametrize("number", range(len(HOSTILE)))
def test_hostile_answers_are_bounded(number: int, size: int) -> None:
    """What takes quadratic time takes minutes for a megabyte; the text itself takes tenths of a second."""
    family, text = HOSTILE[number]
    parser = parser_of(template_of(family))
    start = time.thread_time()
    for at in range(0, len(text), size):
        parser.feed(text[at : at + size])
    parser.finish()
    assert time.thread_time() - start < 15
