"""The `openai` client calls tools: its stream helper puts calls together, and its messages can be sent back."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from openai import AsyncOpenAI

from router.chat.answer_style import AnswerStyle
from router.tokens.tokenizer import Tokenizer
from tests.fakes.waiting import PATIENCE
from tests.unit.router.chat.wire_formats import OBJECT_CALLS, THOUGHT, TOOLS, template_of
from tests.unit.router.conftest import SERVED, TINY, Serve
from tests.unit.router.scripted_generator import one_by_one

WITH_TOOLS = TINY.parent / "tiny-tools"  # whose chat template prints calls


@pytest.mark.parametrize("stream", [False, True])
async def test_a_conversation_with_tools(serve: Serve, tokenizer: Tokenizer, stream: bool) -> None:
    served = replace(SERVED, path=str(WITH_TOOLS), answers=AnswerStyle(template_of("qwen3")))
    rig = await serve(served=served)
    ids = tokenizer.encode(THOUGHT + "Let me look.\n" + OBJECT_CALLS, add_special_tokens=False)
    rig.generator.will(*one_by_one([*ids, 2], "stop"))
    asked: dict[str, Any] = {
        "model": "tiny-target",
        "messages": [{"role": "user", "content": "weather?"}],
        "tools": TOOLS,
    }
    async with AsyncOpenAI(
        base_url=f"{rig.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE
    ) as client:
        if stream:
            done: list[tuple[str, str]] = []
            async with client.chat.completions.stream(**asked) as events:
                async for event in events:
                    if event.type == "tool_calls.function.arguments.done":
                        done.append((event.name, event.arguments))
                answer = await events.get_final_completion()
            assert done == [("weather", '{"city": "Paris", "days": 3}'), ("clock", "{}")]
        else:
            answer = await client.chat.completions.create(**asked)
        [choice] = answer.choices
        assert choice.finish_reason == "tool_calls"
        message = choice.message
        assert message.content == "Let me look."
        assert message.model_extra is not None
        assert message.model_extra["reasoning_content"] == "They want {the} weather."
        assert message.tool_calls is not None
        assert [(each.function.name, each.function.arguments) for each in message.tool_calls] == [
            ("weather", '{"city": "Paris", "days": 3}'),
            ("clock", "{}"),
        ]
        back: list[Any] = [*asked["messages"], message.model_dump(exclude_none=True)]
        back += [{"role": "tool", "tool_call_id": call.id, "content": "rain"} for call in message.tool_calls]
        again = await client.chat.completions.create(**asked | {"messages": back})
        assert again.choices[0].finish_reason == "tool_calls"
