"""The chat template in the form of Qwen3, and the same form as segments of text with loss weights for training."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from deploy.tiny_models.tool_calls.conversations import Call, Conversation, Exchange

PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CALL, CALL_END = "<tool_call>", "</tool_call>"
RESULT, RESULT_END = "<tool_response>", "</tool_response>"
THINK, THINK_END = "<think>", "</think>"
CONTROL = (PAD, START, END)  # special: not part of decoded text
MARKERS = (CALL, CALL_END, RESULT, RESULT_END, THINK, THINK_END)  # single tokens that are text

HOW_TO_CALL = f"To call a tool, write its name and its arguments as a JSON object within {CALL}{CALL_END}."
TEMPLATE = """\
{%- macro text(content) -%}
    {%- if content is string -%}
        {{- content -}}
    {%- elif content is iterable -%}
        {%- for part in content -%}
            {%- if part['type'] != 'text' -%}
                {{- raise_exception('content of type ' + part['type'] + ': this model reads text only') -}}
            {%- endif -%}
            {{- part['text'] -}}
        {%- endfor -%}
    {%- endif -%}
{%- endmacro -%}
{%- set last = namespace(question=-1) %}
{%- for message in messages %}
    {%- if message['role'] not in ['system', 'user', 'assistant', 'tool'] %}
        {{- raise_exception('unknown role ' + message['role'] + ': use system, user, assistant or tool') }}
    {%- endif %}
    {%- if message['role'] == 'user' %}
        {%- set last.question = loop.index0 %}
    {%- endif %}
{%- endfor %}
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0]['role'] == 'system' %}
        {{- text(messages[0]['content']) + '\\n\\n' }}
    {%- endif %}
    {{- '# Tools\\n\\n<tools>\\n' }}
    {%- for tool in tools %}
        {{- (tool | tojson) + '\\n' }}
    {%- endfor %}
    {{- '</tools>\\n\\nHOW_TO_CALL<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- set content = text(message['content']) | trim %}
    {%- if message['role'] == 'assistant' %}
        {%- set reasoning = '' %}
        {%- if message['reasoning_content'] is string %}
            {%- set reasoning = message['reasoning_content'] | trim %}
        {%- elif '</think>' in content %}
            {%- set reasoning = content.split('</think>')[0].split('<think>')[-1] | trim %}
            {%- set content = content.split('</think>')[-1] | trim %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if reasoning and loop.index0 > last.question %}
            {{- '<think>\\n' + reasoning + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- content }}
        {%- for call in message['tool_calls'] or [] %}
            {%- if content or not loop.first %}
                {{- '\\n' }}
            {%- endif %}
            {%- set function = call['function'] if 'function' in call else call %}
            {{- '<tool_call>\\n{"name": "' + function['name'] + '", "arguments": ' }}
            {%- if function['arguments'] is string %}
                {{- function['arguments'] }}
            {%- else %}
                {{- function['arguments'] | tojson }}
            {%- endif %}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message['role'] == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1]['role'] != 'tool' %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' + content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1]['role'] != 'tool' %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- elif not (tools and loop.first and message['role'] == 'system') %}
        {{- '<|im_start|>' + message['role'] + '\\n' + content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and not enable_thinking %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
""".replace("HOW_TO_CALL", HOW_TO_CALL)

FULL, FAINT, NONE = 10, 1, 0  # loss weights in tenths
Segment = tuple[str, int]  # text and loss weight


@dataclass(frozen=True, slots=True)
class Turns:
    """The part of an exchange that a document teaches.

    Attributes:
        thinks: the model thinks before it answers; otherwise the prompt holds an empty thought.
        first: the turn with the calls counts.
        second: the document goes on with the results and the answer.
        keeps: the thought of the first turn is still there in the second.
        singly: each turn has one call only, although the question needs several.
    """

    thinks: bool
    first: bool
    second: bool
    keeps: bool
    singly: bool = False


WHOLE = Turns(thinks=True, first=True, second=True, keeps=True)


def segments(conversation: Conversation, turns: Turns) -> Iterator[Segment]:
    """Render a conversation as the template does, up to the end of the turn that counts last."""
    yield from _head(conversation)
    for exchange in conversation.earlier:
        yield _message("user", exchange.question), NONE
        if exchange.calls:
            yield _message("assistant", _calls(exchange.calls)), NONE
            yield results(exchange.results), NONE
        yield _message("assistant", exchange.answer), NONE
    exchange = conversation.exchange
    yield _message("user", exchange.question), FAINT
    if turns.singly:
        yield from _one_by_one(exchange, turns.thinks)
    elif exchange.calls:
        yield from _first_turn(exchange, turns)
        if not turns.second:
            return
        yield results(exchange.results), NONE
    yield f"{START}assistant\n", NONE
    if not turns.thinks:
        yield _thought(""), NONE
        yield f"{exchange.answer}{END}", FULL
    else:
        thought = exchange.conclusion if exchange.calls else exchange.thought
        yield f"{_thought(thought)}{exchange.answer}{END}", FULL
    yield "\n", NONE


def _head(conversation: Conversation) -> Iterator[Segment]:
    if not conversation.tools:
        if conversation.system is not None:
            yield _message("system", conversation.system), NONE
        return
    before = f"{conversation.system}\n\n" if conversation.system is not None else ""
    tools = "".join(f"{json.dumps(each, ensure_ascii=False)}\n" for each in conversation.declarations)
    yield (
        f"{START}system\n{before}# Tools\n\n<tools>\n{tools}</tools>\n\n{HOW_TO_CALL}{END}\n",
        NONE,
    )


def _first_turn(exchange: Exchange, turns: Turns) -> Iterator[Segment]:
    yield f"{START}assistant\n", NONE
    if turns.thinks and (turns.first or turns.keeps):
        yield _thought(exchange.thought), FULL if turns.first else NONE
    elif turns.first:
        yield _thought(""), NONE
    yield f"{_calls(exchange.calls)}{END}", FULL if turns.first else NONE
    yield "\n", NONE


def _one_by_one(exchange: Exchange, thinks: bool) -> Iterator[Segment]:
    """Yield one turn per call. The first one does not count: the model makes all calls at once if it may."""
    for index, (call, need, result) in enumerate(
        zip(exchange.calls, exchange.needs, exchange.results, strict=True)
    ):
        weight = FULL if index else NONE
        yield f"{START}assistant\n", NONE
        if index and not thinks:
            yield _thought(""), NONE
        said = _thought(f"I need {need}.") if index and thinks else ""
        yield f"{said}{_calls([call])}{END}", weight
        yield "\n", NONE
        yield results([result]), NONE


def _message(role: str, content: str) -> str:
    return f"{START}{role}\n{content}{END}\n"


def _thought(text: str) -> str:
    return f"{THINK}\n{text}\n{THINK_END}\n\n"


def _calls(calls: Sequence[Call]) -> str:
    return "\n".join(
        f'{CALL}\n{{"name": "{call.tool.name}", "arguments": {_json(call.arguments)}}}\n{CALL_END}'
        for call in calls
    )


def results(found: Sequence[str]) -> str:
    """Render the results of the calls of one turn."""
    wrapped = "".join(f"\n{RESULT}\n{result}\n{RESULT_END}" for result in found)
    return f"{START}user{wrapped}{END}\n"


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def messages(conversation: Conversation, upto: str = "question") -> list[dict[str, Any]]:
    """Return the messages of a request.

    Args:
        upto: the last message: `question`, or `results` with the right calls before them.
    """
    found: list[dict[str, Any]] = []
    if conversation.system is not None:
        found.append({"role": "system", "content": conversation.system})
    for exchange in conversation.earlier:
        found.append({"role": "user", "content": exchange.question})
        if exchange.calls:
            found += _called(exchange)
        found.append({"role": "assistant", "content": exchange.answer})
    found.append({"role": "user", "content": conversation.exchange.question})
    if upto == "results":
        found += _called(conversation.exchange)
    return found


def _called(exchange: Exchange) -> list[dict[str, Any]]:
    calls = [
        {
            "id": f"call_{index}",
            "type": "function",
            "function": {"name": call.tool.name, "arguments": call.arguments},
        }
        for index, call in enumerate(exchange.calls)
    ]
    results = [
        {"role": "tool", "tool_call_id": f"call_{index}", "content": result}
        for index, result in enumerate(exchange.results)
    ]
    return [{"role": "assistant", "content": None, "tool_calls": calls}, *results]
