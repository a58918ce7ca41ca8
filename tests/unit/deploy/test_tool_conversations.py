"""Conversations with tools: the same from the same seed, right by their own rules, rendered as by the template."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import jinja2
import msgspec
import pytest
from tokenizers import Tokenizer

from deploy.tiny_models.tool_calls import vocabulary
from deploy.tiny_models.tool_calls.catalogue import SMALL_TALK, TOPICS
from deploy.tiny_models.tool_calls.chat_form import (
    END,
    FULL,
    MARKERS,
    NONE,
    TEMPLATE,
    WHOLE,
    Turns,
    messages,
    results,
    segments,
)
from deploy.tiny_models.tool_calls.conversations import KINDS, TRAINED, Conversation, Conversations, exam
from deploy.tiny_models.tool_calls.declarations import CALCULATOR, varied_tool
from deploy.tiny_models.tool_calls.documents import TURNS, ConversationSource
from deploy.tiny_models.tool_calls.expressions import drawn, evaluate, expression_of, shown, small
from deploy.tiny_models.word_problems import problems, split_of
from router.chat.families import family_of
from router.requests.chat_fields import Tool as RequestTool
from router.requests.chat_fields import check_tools
from router.requests.openai_schema import Message
from router.templates.chat_template import ChatTemplate
from router.tokens.tokenizer import Tokenizer as RouterTokenizer
from tests.fakes.plain_tools import plain_tool


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return vocabulary.build(sample=300)


@pytest.fixture(scope="module")
def directory(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    written = tmp_path_factory.mktemp("tools")
    vocabulary.write(tokenizer, written)
    return written


@pytest.fixture(scope="module")
def template(directory: Path) -> ChatTemplate:
    return ChatTemplate(directory)


def _drawn(count: int, seed: int = 3) -> list[Conversation]:
    source = Conversations(seed, "train")
    return [source.after(source.draw(KINDS, TRAINED), index % 3) for index in range(count)]


def test_expressions_have_the_value_of_their_problems() -> None:
    source = problems(5, "train")
    for _ in range(200):
        problem = next(source)
        assert evaluate(expression_of(problem)) == problem.value, problem


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("12*7", "84"),
        (" 2 + 3 * (4 - 1) ", "11"),
        ("7/2", "3.5"),
        ("-3+1", "-2"),
        ("1.5*4", "6"),
        ("1/0", None),
        ("2**9", None),
        ("__import__('os')", None),
        ("12 *", None),
        ("'a'", None),
        ("(" * 300, None),
    ],
)
def test_the_calculator_takes_arithmetic_only(text: str, value: str | None) -> None:
    found = evaluate(text)
    assert (None if found is None else shown(found)) == value


def test_drawn_expressions_have_whole_values() -> None:
    rng = random.Random(1)
    for _ in range(300):
        assert (evaluate(drawn(rng)) or Fraction(0)).denominator == 1
        value = evaluate(small(rng))
        assert value is not None
        assert value.denominator == 1
        assert 0 <= value <= 199


def test_a_seed_and_a_split_decide_everything() -> None:
    assert _drawn(40) == _drawn(40)
    assert [each.exchange.question for each in _drawn(40)] != [
        each.exchange.question for each in _drawn(40, seed=4)
    ]
    for each in exam(60, seed=1):
        assert split_of(each.exchange.question) == "heldout" or each.exchange.question in SMALL_TALK
    for each in _drawn(60):
        assert split_of(each.exchange.question) == "train" or each.exchange.question in SMALL_TALK


def test_right_calls_get_their_results_and_right_answers_count() -> None:
    kinds = set()
    for each in exam(300, seed=1):
        kinds.add(each.kind)
        for call, result in zip(each.exchange.calls, each.exchange.results, strict=True):
            assert each.respond(call.tool.name, call.arguments) == result
            assert each.respond(call.tool.name, {**call.arguments, "unheard_of": 1}) is None
            assert each.respond(call.tool.name, {}) is None
            assert each.respond("unheard_of", call.arguments) is None
        assert each.is_right(each.exchange.answer)
        assert not each.is_right("The answer is 123456.")
        check_tools(msgspec.convert(each.declarations, list[RequestTool]))
    assert kinds == {"problem", "arithmetic", "lookup", "parallel", "small_talk", "missing"}


def test_another_expression_is_evaluated_and_another_city_is_not_found() -> None:
    calculator, weather = plain_tool(CALCULATOR), plain_tool(TOPICS[0])
    conversation = Conversations(1, "train").draw(["bare"], [1.0])
    conversation = replace(conversation, tools=(calculator, weather))
    assert conversation.respond("calculator", {"expression": "12*7"}) == "84"
    assert conversation.respond("calculator", {"expression": "twelve"}) == "nothing found"
    assert conversation.respond("get_weather", {"city": "Atlantis"}) == "nothing found"


def test_tools_vary_and_every_call_of_the_corpus_fits_its_schema() -> None:
    rng = random.Random(2)
    names = {varied_tool(rng, CALCULATOR).name for _ in range(100)}
    assert "calculator" in names
    assert len(names) > 10
    optional = 0
    for each in _drawn(300):
        for call in each.exchange.calls:
            assert call.tool.takes(call.arguments)
            declared = call.tool.declaration["function"]["parameters"]
            optional += len(declared["properties"]) > len(declared.get("required", declared["properties"]))
    assert optional > 0


def _messages(conversation: Conversation, upto: str) -> list[Message]:
    return msgspec.convert(messages(conversation, upto), list[Message])


def _asked(conversation: Conversation, turns: Turns) -> str:
    """Return the text before what the model writes last."""
    found = list(segments(conversation, turns))
    last = max(index for index, (_, weight) in enumerate(found) if weight == FULL)
    return "".join(text for text, _ in found[:last])


def test_documents_have_the_form_of_the_chat_template(template: ChatTemplate) -> None:
    """Compared through the router, for the first turn and after the results of tools, thinking and not."""
    off = {"enable_thinking": False}
    for each in _drawn(120):
        tools = each.declarations
        upto = "results" if each.exchange.calls else "question"
        found = template.render(_messages(each, upto), tools=tools)
        last = Turns(thinks=True, first=False, second=True, keeps=False)
        assert found == _asked(each, last)
        found = template.render(_messages(each, upto), tools=tools, variables=off)
        assert found == _asked(each, replace(last, thinks=False))
        found = template.render(_messages(each, "question"), tools=tools, variables=off)
        assert found == _asked(each, Turns(thinks=False, first=True, second=False, keeps=False))


def test_a_thought_that_comes_back_is_rendered_again(template: ChatTemplate) -> None:
    each = Conversations(1, "train").draw(["parallel"], [1.0])
    asked = messages(each, "results")
    called = next(message for message in asked if "tool_calls" in message)
    called["reasoning_content"] = each.exchange.thought
    found = template.render(msgspec.convert(asked, list[Message]), tools=each.declarations)
    assert found == _asked(each, WHOLE)
    del called["reasoning_content"]
    called["content"] = f"<think>\n{each.exchange.thought}\n</think>\n\n"
    assert template.render(msgspec.convert(asked, list[Message]), tools=each.declarations) == found
    asked.append({"role": "user", "content": "Thank you!"})
    later = template.render(msgspec.convert(asked, list[Message]), tools=each.declarations)
    assert each.exchange.thought not in later


def test_one_call_at_a_time() -> None:
    each = Conversations(1, "train").draw(["parallel"], [1.0])
    turns = Turns(thinks=False, first=False, second=True, keeps=False, singly=True)
    text = "".join(text for text, _ in segments(each, turns))
    assert text.count("<tool_call>\n") == len(each.exchange.calls)
    assert text.count(results(["x"]).split("x")[0]) == len(each.exchange.calls)
    counted = [text for text, weight in segments(each, turns) if weight == FULL]
    assert len(counted) == len(each.exchange.calls)
    assert counted[-1] == f"{each.exchange.answer}{END}"


def test_the_router_reads_the_format_as_that_of_qwen3() -> None:
    family = family_of(TEMPLATE)
    assert family is not None
    assert family.name == "qwen3"


def test_unknown_roles_and_images_are_refused(template: ChatTemplate) -> None:
    with pytest.raises(jinja2.TemplateError, match="role"):
        template.render_plain([{"role": "critic", "content": "x"}])
    with pytest.raises(jinja2.TemplateError, match="reads text only"):
        template.render_plain([{"role": "user", "content": [{"type": "image"}]}])


def test_every_byte_has_a_token_and_text_comes_back(directory: Path, tokenizer: Tokenizer) -> None:
    router = RouterTokenizer(directory)
    for text in ("".join(map(chr, range(1, 0x300))), "日本語 🦀 \r\n\t  x", "<think>\n12*7\n</think>"):
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert tokenizer.decode(ids) == text
        assert router.decode(ids, skip_special_tokens=True) == text


def test_markers_are_single_tokens_that_are_not_special(tokenizer: Tokenizer) -> None:
    described: list[dict[str, Any]] = json.loads(tokenizer.to_str())["added_tokens"]
    special = {each["content"]: each["special"] for each in described}
    assert all(special[marker] is False for marker in MARKERS)
    assert special[END] is True
    for marker in MARKERS:
        assert len(tokenizer.encode(f"a{marker}b", add_special_tokens=False).ids) == 3


def test_a_word_has_the_same_tokens_in_a_question_and_in_a_call(tokenizer: Tokenizer) -> None:
    (inside,) = tokenizer.encode(" weather", add_special_tokens=False).ids[1:]
    quoted = tokenizer.encode('"weather"', add_special_tokens=False).ids
    assert inside in quoted


def test_documents_encode_as_their_whole_text(tokenizer: Tokenizer) -> None:
    """Training encodes segments, a server encodes the whole prompt."""
    for index, each in enumerate(_drawn(80)):
        found = list(segments(each, TURNS[index % len(TURNS)]))
        whole = tokenizer.encode("".join(text for text, _ in found), add_special_tokens=False).ids
        parts = [tokenizer.encode(text, add_special_tokens=False).ids for text, _ in found]
        assert whole == [token for part in parts for token in part]


def test_only_what_the_model_writes_counts_fully(tokenizer: Tokenizer) -> None:
    source = ConversationSource(tokenizer, seed=1)
    end, counted = tokenizer.token_to_id(END), 0
    for _ in range(50):
        ids, weights = source.document()
        assert len(ids) == len(weights)
        assert weights[-1] == NONE
        counted += sum(token == end and weight == FULL for token, weight in zip(ids, weights, strict=True))
    assert counted >= 50


def test_windows_of_one_seed_are_the_same(tokenizer: Tokenizer) -> None:
    first, again = (next(ConversationSource(tokenizer, seed=1).batches(4096)) for _ in range(2))
    assert (first.ids == again.ids).all()
    assert first.ids.shape == first.weights.shape
    assert first.ids.max() < tokenizer.get_vocab_size()
