"""Real tool calls and real thinking: deploy/clusters/local-tools.yaml, mostly through the `openai` client."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import pytest_asyncio
from openai import AsyncOpenAI
from openai.types.chat import ChatCompletion, ChatCompletionMessage
from rich.progress import Progress
from tokenizers import Tokenizer

from deploy.eval_cli import EvalSettings, evaluate
from deploy.tiny_models.generation import greedy
from deploy.tiny_models.tokenizer import id_of
from deploy.tiny_models.tool_calls import checkpoint
from deploy.tiny_models.tool_calls.catalogue import TOPICS
from deploy.tiny_models.tool_calls.chat_form import END, PAD, THINK
from deploy.tiny_models.tool_calls.declarations import CALCULATOR
from tests.cluster.check_families import shipped
from tests.cluster.harness import ROOT, RunningCluster
from tests.fakes.plain_tools import plain_tool

pytestmark = pytest.mark.timeout(900)  # two busy cores

MODEL = ROOT / "deploy" / "tiny_models" / "tiny-tools"
CALCULATE, WEATHER = plain_tool(CALCULATOR).declaration, plain_tool(TOPICS[0]).declaration
TOOLS = [CALCULATE, WEATHER]
PRODUCT = "What is 12 * 7?"
PROBLEM = (
    "Anna has 12 bags with 7 apples in each bag. Anna gives 20 apples to Ben. "
    "How many apples does Anna have now?"
)
TWO = "What is 12 * 7? And what is the weather in Paris?"
RESULTS = {"calculator": "84", "get_weather": "rainy, 9 degrees"}
MAX_TOKENS = 200  # tokens of one answer


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningCluster]:
    with RunningCluster(tmp_path_factory.mktemp("tools"), config=shipped("tools")) as running:
        yield running


@pytest_asyncio.fixture
async def client(cluster: RunningCluster) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(
        base_url=f"{cluster.url}/v1", api_key="none", max_retries=0, timeout=600
    ) as opened:
        yield opened


async def _send(client: AsyncOpenAI, question: str | list[Any], **fields: Any) -> Any:
    asked = [{"role": "user", "content": question}] if isinstance(question, str) else question
    create: Any = client.chat.completions.create  # its types want dictionaries of their own
    given = {"tools": TOOLS, "temperature": 0, "max_tokens": MAX_TOKENS, **fields}
    return await create(model="tiny", messages=asked, **given)


async def _ask(client: AsyncOpenAI, question: str | list[Any], **fields: Any) -> ChatCompletion:
    answer = await _send(client, question, **fields)
    assert isinstance(answer, ChatCompletion)
    return answer


def _calls(message: ChatCompletionMessage) -> list[tuple[str, dict[str, Any]]]:
    return [
        (call.function.name, json.loads(call.function.arguments))
        for call in message.tool_calls or []
        if call.type == "function"
    ]


def _thought(message: ChatCompletionMessage) -> str | None:
    found = (message.model_extra or {}).get("reasoning_content")
    assert found is None or isinstance(found, str)
    return found


def _with_results(question: str, message: ChatCompletionMessage, thought: bool = True) -> list[Any]:
    """Return the conversation with the results of the calls in a message, which goes back as it came.

    `thought=False` leaves the thought out, as clients do that know only OpenAI's fields.
    """
    results = [
        {"role": "tool", "tool_call_id": call.id, "content": RESULTS[call.function.name]}
        for call in message.tool_calls or []
        if call.type == "function"
    ]
    left_out = None if thought else {"reasoning_content"}
    return [
        {"role": "user", "content": question},
        message.model_dump(exclude_none=True, exclude=left_out),
        *results,
    ]


async def test_a_call_has_its_arguments_and_a_thought_before_it(client: AsyncOpenAI) -> None:
    (choice,) = (await _ask(client, PRODUCT)).choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    assert _calls(choice.message) == [("calculator", {"expression": "12*7"})]
    assert _thought(choice.message) == "I need 12*7 by calculator."


async def test_two_turns_end_with_the_number(client: AsyncOpenAI) -> None:
    first = (await _ask(client, PROBLEM)).choices[0].message
    assert _calls(first) == [("calculator", {"expression": "12*7-20"})]
    asked = _with_results(PROBLEM, first)
    asked[-1]["content"] = "64"
    (choice,) = (await _ask(client, asked)).choices
    assert choice.finish_reason == "stop"
    assert choice.message.content == "The answer is 64."
    assert _thought(choice.message) == "The tool has answered."


async def test_parallel_calls_or_one_after_the_other(client: AsyncOpenAI) -> None:
    together = (await _ask(client, TWO)).choices[0].message
    both = [("calculator", {"expression": "12*7"}), ("get_weather", {"city": "Paris"})]
    assert _calls(together) == both
    end = (await _ask(client, _with_results(TWO, together))).choices[0].message
    assert end.content == "12*7 is 84. The weather in Paris is rainy, 9 degrees."

    one = (await _ask(client, TWO, parallel_tool_calls=False)).choices[0].message
    assert _calls(one) == both[:1]
    asked = _with_results(TWO, one, thought=False)
    other = (await _ask(client, asked, parallel_tool_calls=False)).choices[0].message
    assert _calls(other) == both[1:]
    asked += _with_results(TWO, other, thought=False)[1:]
    assert (await _ask(client, asked, parallel_tool_calls=False)).choices[0].message.content == end.content


async def _streamed(
    client: AsyncOpenAI, question: str
) -> tuple[str, str, list[tuple[str, dict[str, Any]]], list[str | None]]:
    """Return the thought, the content and the calls of a streamed answer, and the finish reason of each chunk."""
    thought, content, calls, reasons = "", "", list[list[str]](), list[str | None]()
    async for chunk in await _send(client, question, stream=True):
        (choice,) = chunk.choices
        thought += (choice.delta.model_extra or {}).get("reasoning_content") or ""
        content += choice.delta.content or ""
        for call in choice.delta.tool_calls or []:
            assert call.function is not None
            if call.id is not None:
                assert call.index == len(calls)
                calls.append([call.function.name or "", ""])
            calls[call.index][1] += call.function.arguments or ""
        reasons.append(choice.finish_reason)
    return thought, content, [(name, json.loads(text)) for name, text in calls], reasons


@pytest.mark.parametrize("question", [TWO, "Thank you!"])
async def test_streamed_deltas_are_the_complete_message(client: AsyncOpenAI, question: str) -> None:
    complete = (await _ask(client, question)).choices[0]
    # A router that does not run for some time sends what has arrived meanwhile in one piece.
    for _ in range(5):
        thought, content, calls, reasons = await _streamed(client, question)
        assert thought == _thought(complete.message)
        assert (content or None) == complete.message.content
        assert calls == _calls(complete.message)
        assert [each for each in reasons if each] == [complete.finish_reason]
        if len(reasons) > 3:
            break
    else:
        raise AssertionError("the answer came in one piece")


@pytest.mark.parametrize(
    "off",
    [{"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}}, {"reasoning_effort": "none"}],
)
async def test_thinking_can_be_turned_off(client: AsyncOpenAI, off: dict[str, Any]) -> None:
    first = (await _ask(client, PRODUCT, **off)).choices[0].message
    assert _thought(first) is None
    assert _calls(first) == [("calculator", {"expression": "12*7"})]
    end = (await _ask(client, _with_results(PRODUCT, first), **off)).choices[0].message
    assert _thought(end) is None
    assert end.content == "12*7 is 84."


async def test_no_call_where_no_tool_is_needed(client: AsyncOpenAI) -> None:
    (choice,) = (await _ask(client, "Thank you!")).choices
    assert choice.finish_reason == "stop"
    assert not choice.message.tool_calls
    assert choice.message.content == "You are welcome."
    assert _thought(choice.message) == "No tool is needed."


async def test_tool_choice_none_and_no_tools_give_an_answer_without_calls(client: AsyncOpenAI) -> None:
    refused = (await _ask(client, PROBLEM, tool_choice="none")).choices[0]
    assert refused.finish_reason == "stop"
    assert not refused.message.tool_calls
    assert refused.message.content is not None
    assert refused.message.content.endswith("#### 64")
    without = (await _ask(client, PROBLEM, tools=[])).choices[0]
    assert without.message.content == refused.message.content


async def test_required_and_named_calls(client: AsyncOpenAI) -> None:
    """The model would not call a tool here by itself; what it must write is in its own format, after its thought."""
    (choice,) = (await _ask(client, "Thank you!", tool_choice="required")).choices
    assert choice.finish_reason == "tool_calls"
    calls = _calls(choice.message)
    assert calls
    keys = {"calculator": {"expression"}, "get_weather": {"city"}}
    assert all(arguments.keys() <= keys[name] for name, arguments in calls)
    named = {"type": "function", "function": {"name": "get_weather"}}
    (choice,) = (await _ask(client, "What is the weather in Oslo?", tool_choice=named)).choices
    assert choice.finish_reason == "stop"
    assert _calls(choice.message) == [("get_weather", {"city": "Oslo"})]
    (choice,) = (await _ask(client, PRODUCT, tool_choice=named)).choices
    ((name, arguments),) = _calls(choice.message)
    assert name == "get_weather"
    assert arguments.keys() <= {"city"}


async def test_strict_tools_constrain_the_call_that_the_model_chooses(client: AsyncOpenAI) -> None:
    strict = json.loads(json.dumps(CALCULATE))
    strict["function"] |= {"strict": True}
    strict["function"]["parameters"]["additionalProperties"] = False
    free = (await _ask(client, PRODUCT)).choices[0].message
    (choice,) = (await _ask(client, PRODUCT, tools=[strict, WEATHER])).choices
    assert choice.finish_reason == "tool_calls"
    assert _calls(choice.message) == _calls(free)
    assert _thought(choice.message) == _thought(free)


async def test_texts_are_those_of_plain_decoding(client: AsyncOpenAI, cluster: RunningCluster) -> None:
    """The text of transformers, greedy and without drafts, special tokens included."""
    model, encoder = checkpoint.load(MODEL), Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    end = id_of(encoder, END)
    for question in (PROBLEM, TWO, "Hello!"):
        answer = await _ask(
            client, question, extra_body={"separate_reasoning": False, "return_token_ids": True}
        )
        prompt = (answer.model_extra or {})["prompt_token_ids"]
        found = (answer.choices[0].model_extra or {})["token_ids"]
        (expected,) = greedy(model, [prompt], id_of(encoder, PAD), end, MAX_TOKENS)
        assert found == expected
        assert encoder.decode(found).startswith(THINK)


async def test_answers_calls_and_accept_length(cluster: RunningCluster) -> None:
    """Held-out conversations through HTTP, with every call carried out."""
    with Progress(disable=True) as progress:
        report = await evaluate(
            EvalSettings(cluster.url, count=32, seed=5, tools=True, timeout=600.0), progress
        )
    assert report.errors == 0, report.first_error
    assert report.calls > 20
    assert report.valid_calls >= 0.95 * report.calls
    assert report.score >= 0.9
    assert report.accept_length is not None
    assert report.accept_length > 1.5
