"""Starts a router of others in front of the cluster and sends requests through it."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from openai import BadRequestError, OpenAI

from tests.clients.features import (
    CALCULATOR,
    KEY,
    MESSAGES,
    MODEL,
    NAMED,
    PARAMETERS,
    PENALTY,
    PRODUCT,
    PROMPT,
    RESULT,
    TOOLS,
    Features,
    is_product,
    is_weather,
    says_product,
    solved,
)
from tests.clients.programs.command import BIN

START_SECONDS = 90.0


def free_port() -> int:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        return int(held.getsockname()[1])


@contextmanager
def running(program: str, *arguments: str, port: int) -> Iterator[str]:
    """Run a router until the block ends, and yield its address once /v1/models answers."""
    started = subprocess.Popen([str(BIN / program), *arguments])
    url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + START_SECONDS
    try:
        while True:
            assert started.poll() is None, f"{program} ended with {started.returncode}"
            try:
                with urllib.request.urlopen(f"{url}/v1/models", timeout=5) as answer:
                    if MODEL.encode() in answer.read():
                        break
            except (urllib.error.URLError, OSError):
                pass
            assert time.monotonic() < deadline, f"{program} does not answer"
            time.sleep(0.3)
        yield url
    finally:
        started.terminate()
        try:
            started.wait(20)
        except subprocess.TimeoutExpired:
            started.kill()


def add_features(features: Features, url: str) -> None:
    """Register what is sent through a router at `url`."""
    client: Any = OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0)
    asked: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "temperature": 0}
    typed = {**asked, "frequency_penalty": PENALTY}
    case = features.case

    @case("models")
    def models() -> None:
        assert MODEL in [each.id for each in client.models.list()]

    @case("chat")
    def chat() -> None:
        solved(client.chat.completions.create(**asked).choices[0].message.content)

    @case("chat stream")
    def stream() -> None:
        chunks = list(
            client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
        )
        solved("".join(each.choices[0].delta.content or "" for each in chunks if each.choices))
        assert chunks[-1].usage.completion_tokens > 0

    @case("completions")
    def completions() -> None:
        plain = {"model": MODEL, "prompt": PROMPT, "max_tokens": 8, "temperature": 0}
        text = client.completions.create(**plain).choices[0].text
        assert text
        assert (
            "".join(each.choices[0].text for each in client.completions.create(**plain, stream=True)) == text
        )

    @case("tools auto, and their result")
    def tools_auto() -> None:
        question: list[Any] = [{"role": "user", "content": PRODUCT}]
        product: dict[str, Any] = {**asked, "tools": [CALCULATOR]}
        message = client.chat.completions.create(**product | {"messages": question}).choices[0].message
        [call] = message.tool_calls
        is_product(call.function.name, call.function.arguments)
        back = [*question, message, {"role": "tool", "tool_call_id": call.id, "content": RESULT}]
        says_product(
            client.chat.completions.create(**product | {"messages": back}).choices[0].message.content
        )

    @case("tools named")
    def tools() -> None:
        [call] = (
            client.chat.completions.create(**typed, tools=TOOLS, tool_choice=NAMED)
            .choices[0]
            .message.tool_calls
        )
        is_weather(call.function.arguments)

    @case("typed output")
    def typed_output() -> None:
        form = {"type": "json_schema", "json_schema": {"name": "forecast", "schema": PARAMETERS}}
        is_weather(client.chat.completions.create(**typed, response_format=form).choices[0].message.content)

    @case("errors")
    def errors() -> None:
        with contextlib.suppress(BadRequestError):
            client.chat.completions.create(**asked | {"temperature": -1})
            raise AssertionError("temperature -1 is accepted")
