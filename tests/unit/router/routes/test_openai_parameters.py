"""Every parameter of the `openai` client has an effect, is ignored as documented, or is refused by its name.

A parameter is served if it changes what the nodes are asked for or what the client receives.
"""

from __future__ import annotations

import inspect
import shutil
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import openai
import pytest
from openai import AsyncOpenAI

from router.chat.answer_style import AnswerStyle
from router.tokens.tokenizer import Tokenizer
from tests.fakes.waiting import PATIENCE
from tests.unit.router.chat.wire_formats import OBJECT_CALLS, TOOLS, template_of
from tests.unit.router.conftest import SERVED, TINY, Rig, Serve
from tests.unit.router.scripted_generator import one_by_one

TEMPLATE = "{{ tools }} {{ reasoning_effort }} {% for m in messages %}{{ m.content }}{% endfor %}"
OWN = {"extra_headers", "extra_query", "extra_body", "timeout"}  # options of the client, not of the API
CHANGING = {"id", "call_id", "item_id", "created", "created_at", "completed_at", "_request_id"}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
FUNCTION = {"type": "function", "name": "weather", "parameters": SCHEMA}
OPTIONS = {"include_usage": True}


@dataclass(frozen=True)
class Case:
    """A value of a parameter. `given`: parameters sent with it; what they do is not its effect."""

    outcome: Literal["served", "ignored", "refused"]
    value: Any
    given: dict[str, Any] = field(default_factory=dict)


def served(value: Any, **given: Any) -> Case:
    return Case("served", value, given)


def ignored(value: Any) -> Case:
    return Case("ignored", value)


def refused(value: Any, **given: Any) -> Case:
    return Case("refused", value, given)


LABELS = {
    "metadata": ignored({"a": "b"}),
    "prompt_cache_key": ignored("k"),
    "prompt_cache_options": ignored({"mode": "explicit"}),
    "prompt_cache_retention": ignored("24h"),
    "safety_identifier": ignored("s"),
    "service_tier": ignored("flex"),
    "store": ignored(True),
    "user": ignored("u"),
}
SAMPLING = {
    "model": refused("other"),
    "temperature": served(0.5),
    "top_p": served(0.5),
    "stream": served(True),
}
PENALTIES = {
    "frequency_penalty": served(1.0),
    "presence_penalty": served(1.0),
    "logit_bias": served({"7": 5}),
    "seed": served(8),
    "stop": served("call"),
    "max_tokens": served(3),
    "n": served(2, temperature=1.0),
    "stream_options": served(OPTIONS, stream=True),
}
CHAT = {
    **LABELS,
    **SAMPLING,
    **PENALTIES,
    "messages": served([{"role": "user", "content": "other"}]),
    "audio": refused({"voice": "v", "format": "wav"}),
    "function_call": refused({"name": "weather"}),
    "functions": refused([{"name": "weather"}]),
    "logprobs": served(True),
    "max_completion_tokens": served(3),
    "modalities": refused(["text", "audio"]),
    "moderation": refused({"model": "m"}),
    "parallel_tool_calls": served(False, tools=TOOLS),
    "prediction": ignored({"type": "content", "content": "x"}),
    "reasoning_effort": served("low"),
    "response_format": served({"type": "json_object"}),
    "tool_choice": served("none", tools=TOOLS),
    "tools": served(TOOLS),
    "top_logprobs": served(2, logprobs=True),
    "verbosity": ignored("low"),
    "web_search_options": refused({"search_context_size": "low"}),
}
COMPLETIONS = {
    **SAMPLING,
    **PENALTIES,
    "prompt": served("other"),
    "best_of": refused(3),
    "echo": served(True),
    "logprobs": served(2),
    "suffix": refused("x"),
    "user": ignored("u"),
}
RESPONSES = {
    **LABELS,
    **SAMPLING,
    "metadata": served({"a": "b"}),  # the answer repeats them
    "input": served("other"),
    "access_programs": refused({"x": True}),
    "background": refused(True),
    "background_options": refused({"completion_window": "2h"}),
    "context_management": refused([{"type": "compaction"}]),
    "conversation": refused("conv_1"),
    "image": refused({"detail": "low"}),
    "include": ignored(["file_search_call.results"]),
    "instructions": served("Be short."),
    "max_output_tokens": served(3),
    "max_tool_calls": served(1),  # the answer repeats it
    "moderation": refused({"model": "m"}),
    "parallel_tool_calls": served(False, tools=[FUNCTION]),
    "previous_response_id": refused("resp_1"),
    "prompt": refused({"id": "pmpt_1"}),
    "reasoning": served({"effort": "low"}),
    "stream_options": ignored({"include_obfuscation": False}),
    "text": served({"format": {"type": "json_object"}}),
    "tool_choice": served("none", tools=[FUNCTION]),
    "tools": served([FUNCTION]),
    "top_logprobs": served(2, include=["message.output_text.logprobs"]),
    "truncation": served("auto"),
}
APIS = {"chat.completions": CHAT, "completions": COMPLETIONS, "responses": RESPONSES}
PLAIN: dict[str, dict[str, Any]] = {
    "chat.completions": {"messages": [{"role": "user", "content": "hi"}], "seed": 7},
    "completions": {"prompt": "hi", "seed": 7},
    "responses": {"input": "hi", "extra_body": {"seed": 7}},
}


def create(client: AsyncOpenAI, api: str) -> Any:
    found: Any = client
    for name in api.split("."):
        found = getattr(found, name)
    return found.create


def comparable(value: Any) -> Any:
    """Return a value of JSON without ids and times."""
    if isinstance(value, list):
        return [comparable(each) for each in value]
    if isinstance(value, dict):
        return {name: comparable(each) for name, each in value.items() if name not in CHANGING}
    return value


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose chat template shows each variable."""
    made = shutil.copytree(TINY, tmp_path_factory.mktemp("model") / "model")
    (made / "chat_template.jinja").write_text(TEMPLATE)
    return made


@pytest.fixture
async def rig(serve: Serve, model: Path, tokenizer: Tokenizer) -> Rig:
    """A server whose model always calls two functions."""
    style = AnswerStyle(template_of("qwen3"), template_variables=frozenset({"reasoning_effort"}))
    started = await serve(served=replace(SERVED, path=str(model), answers=style))
    ids = tokenizer.encode("A call. " + OBJECT_CALLS, add_special_tokens=False)
    started.generator.will(*one_by_one([*ids, 2], "stop", 2))
    return started


@pytest.fixture
async def client(rig: Rig) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"{rig.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE) as made:
        yield made


async def effect(rig: Rig, client: AsyncOpenAI, api: str, **parameters: Any) -> Any:
    """Return what the nodes are asked for and what the client receives."""
    rig.generator.requests.clear()
    body = PLAIN[api] | {"model": "tiny-target"} | parameters
    answer = await create(client, api)(**body)
    if body.get("stream"):
        received = [comparable(event.model_dump()) async for event in answer]
    else:
        received = comparable(answer.model_dump())
    return [(each.token_ids, each.sampling) for each in rig.generator.requests], received


@pytest.mark.parametrize("api", APIS)
def test_every_parameter_of_the_client_is_listed(api: str) -> None:
    client = AsyncOpenAI(base_url="http://127.0.0.1:1", api_key="none")
    assert set(inspect.signature(create(client, api)).parameters) - OWN <= set(APIS[api])


@pytest.mark.parametrize(("api", "name"), [(api, name) for api, cases in APIS.items() for name in cases])
async def test_a_parameter(rig: Rig, client: AsyncOpenAI, api: str, name: str) -> None:
    case = APIS[api][name]
    known = inspect.signature(create(client, api)).parameters
    # An older client has fewer parameters.
    sent = {name: case.value} if name in known else {"extra_body": {name: case.value}}
    if case.outcome == "refused":
        with pytest.raises(openai.APIStatusError) as refusal:
            await effect(rig, client, api, **case.given, **sent)
        assert refusal.value.status_code == (404 if name == "model" else 400)
        assert (refusal.value.param or "").startswith(name)
        return
    without = await effect(rig, client, api, **case.given)
    assert (await effect(rig, client, api, **case.given, **sent) == without) == (case.outcome == "ignored")
