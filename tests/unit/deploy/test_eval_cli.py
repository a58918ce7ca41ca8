"""deploy/eval against a server in this process: it sends the right requests and reports failures plainly."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import typer
from aiohttp import web
from aiohttp.test_utils import TestServer
from PIL import Image
from typer.testing import CliRunner, Result

from deploy.eval_cli import GIVE_UP_AFTER, EvalSettings, answer_text, run, wilson
from deploy.tiny_models.vision.questions import questions
from deploy.tiny_models.word_problems import take

app = typer.Typer()
app.command()(run)


class FakeServer:
    """Knows the answer to every held-out problem of the seeds that the tests use."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[str | None] = []
        self.delay = 0.0
        self.reply: Callable[[str], Any] | None = None  # None: the right answer
        self.answer_of: Callable[[Any], str] | None = None  # computed from a message's content
        self.status = 200
        self.models: Any = {"object": "list", "data": [{"id": "tiny-target"}]}
        self._answers = {p.question: p.answer for p in take(400, 7, "heldout")}
        self.url = ""

    async def list_models(self, request: web.Request) -> web.Response:
        return web.json_response(self.models)

    async def chat(self, request: web.Request) -> web.Response:
        body = await self._read(request)
        text = (self.answer_of or self._answer)(body["messages"][-1]["content"])
        return self._respond({"choices": [{"message": {"role": "assistant", "content": text}}]})

    async def completions(self, request: web.Request) -> web.Response:
        body = await self._read(request)
        question = body["prompt"].rsplit("Question: ", 1)[1].removesuffix("\nAnswer:")
        return self._respond({"choices": [{"text": self._answer(question)}]})

    async def _read(self, request: web.Request) -> Any:
        body = await request.json()
        self.bodies.append(body)
        self.headers.append(request.headers.get("Authorization"))
        await asyncio.sleep(self.delay)
        return body

    def _answer(self, question: str) -> Any:
        return self.reply(question) if self.reply else f" {self._answers[question]}"

    def _respond(self, body: dict[str, Any]) -> web.Response:
        refusal = {"error": {"message": "the pool is empty", "type": "x", "param": None, "code": 503}}
        return web.json_response(body if self.status == 200 else refusal, status=self.status)


@pytest_asyncio.fixture
async def server() -> AsyncIterator[FakeServer]:
    fake = FakeServer()
    site = web.Application()
    site.router.add_get("/v1/models", fake.list_models)
    site.router.add_post("/v1/chat/completions", fake.chat)
    site.router.add_post("/v1/completions", fake.completions)
    async with TestServer(site) as running:
        fake.url = str(running.make_url("/"))
        yield fake


Invoke = Callable[..., Awaitable[Result]]


@pytest.fixture
def invoke() -> Invoke:
    async def call(*arguments: object) -> Result:
        words = [str(argument) for argument in arguments]
        return await asyncio.to_thread(lambda: CliRunner().invoke(app, words))  # the server runs in this loop

    return call


async def test_a_perfect_server_scores_one(server: FakeServer, invoke: Invoke, tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    result = await invoke(server.url, "--count", 40, "--seed", 7, "--json", file)
    assert result.exit_code == 0, result.output
    report = json.loads(file.read_text())
    assert (report["score"], report["count"], report["right"], report["seed"]) == (1.0, 40, 40, 7)
    assert (report["shots"], report["mode"], report["errors"]) == (0, "chat", 0)
    assert report["model"] == "tiny-target"
    assert 0.9 < report["ci_low"] < report["ci_high"] == 1.0
    assert report["seconds"] > 0
    assert "1.000 (40 of 40 right" in result.stdout
    assert len({body["messages"][0]["content"] for body in server.bodies}) == 40
    assert all(body["temperature"] == 0 and body["model"] == "tiny-target" for body in server.bodies)


async def test_half_right(server: FakeServer, invoke: Invoke, tmp_path: Path) -> None:
    problems = take(20, 7, "heldout")
    right = {p.question: p.value for p in problems[:10]}
    server.reply = lambda question: f"#### {right.get(question, 999)}"
    file = tmp_path / "report.json"
    result = await invoke(server.url, "--count", 20, "--json", file)
    assert result.exit_code == 0
    report = json.loads(file.read_text())
    assert report["score"] == 0.5
    assert report["ci_low"] == pytest.approx(0.299, abs=0.001)
    assert report["ci_high"] == pytest.approx(0.701, abs=0.001)


async def test_shots_use_completions_that_stop_at_a_blank_line(server: FakeServer, invoke: Invoke) -> None:
    result = await invoke(f"{server.url}v1/", "--count", 10, "--shots", 8)
    assert result.exit_code == 0, result.output
    assert "1.000" in result.stdout
    for body in server.bodies:
        assert body["prompt"].count("Question: ") == 9
        assert body["prompt"].endswith("\nAnswer:")
        assert body["stop"] == ["\n\n"]


async def test_shots_in_chat_are_earlier_turns(server: FakeServer, invoke: Invoke) -> None:
    result = await invoke(server.url, "--count", 3, "--shots", 2, "--mode", "chat", "--model", "other")
    assert result.exit_code == 0, result.output
    for body in server.bodies:
        assert [m["role"] for m in body["messages"]] == ["user", "assistant"] * 2 + ["user"]
        assert body["model"] == "other"


async def test_the_key_is_sent(server: FakeServer, invoke: Invoke) -> None:
    assert (await invoke(server.url, "--count", 1, "--api-key", "abc")).exit_code == 0
    assert server.headers == ["Bearer abc"]


async def test_an_error_is_counted_quoted_and_given_up_on(
    server: FakeServer, invoke: Invoke, tmp_path: Path
) -> None:
    server.status = 503
    file = tmp_path / "report.json"
    result = await invoke(server.url, "--count", 50, "--concurrency", 1, "--json", file)
    assert result.exit_code == 1
    assert "50 of 50 requests failed" in result.stderr
    assert "answered 503" in result.stderr
    assert "the pool is empty" in result.stderr
    assert len(server.bodies) == GIVE_UP_AFTER
    report = json.loads(file.read_text())
    assert (report["score"], report["errors"]) == (0.0, 50)


async def test_a_slow_server_meets_a_deadline(server: FakeServer, invoke: Invoke) -> None:
    server.delay = 5.0
    result = await invoke(server.url, "--model", "m", "--count", 2, "--timeout", 0.2)
    assert result.exit_code == 1
    assert "did not answer in time" in result.stderr


async def test_a_report_that_cannot_be_written_is_refused_before_anything_is_asked(
    server: FakeServer, invoke: Invoke, tmp_path: Path
) -> None:
    result = await invoke(server.url, "--json", tmp_path / "none" / "report.json")
    assert result.exit_code == 2
    assert f"there is no folder {tmp_path / 'none'}" in result.stderr
    assert server.bodies == []


async def test_a_missing_server_is_reported(invoke: Invoke) -> None:
    with socket.socket() as deaf:  # holds its port, so that no other process listens there
        deaf.bind(("127.0.0.1", 0))
        result = await invoke(f"http://127.0.0.1:{deaf.getsockname()[1]}", "--count", 2)
    assert result.exit_code == 2
    assert "cannot reach" in result.stderr
    assert "Is the server running?" in result.stderr


async def test_a_server_without_models_is_reported(server: FakeServer, invoke: Invoke) -> None:
    server.models = {"data": []}
    result = await invoke(server.url, "--count", 2)
    assert result.exit_code == 2
    assert "lists no model" in result.stderr


@pytest.mark.parametrize("reply", [{}, {"choices": []}, {"choices": [{"message": {"content": None}}]}, []])
def test_a_reply_without_text_is_an_error(reply: Any) -> None:
    with pytest.raises(Exception, match="the reply"):
        answer_text("chat", reply)


def test_wilson() -> None:
    assert wilson(0, 0) == (0.0, 1.0)
    low, high = wilson(95, 100)
    assert (round(low, 3), round(high, 3)) == (0.888, 0.978)
    assert wilson(10, 10)[1] == 1.0


@pytest.mark.parametrize("url", ["http://h:1", "http://h:1/", "http://h:1/v1", "http://h:1/v1/"])
def test_the_base_url(url: str) -> None:
    assert EvalSettings(url, 1, 1).base == "http://h:1/v1"


def pixels_of(part: dict[str, Any]) -> Any:
    head, _, payload = part["image_url"]["url"].partition(",")
    assert (part["type"], head) == ("image_url", "data:image/png;base64")
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(payload))))


async def test_pictures_are_drawn_from_the_seed_and_sent_as_they_are(
    server: FakeServer, invoke: Invoke
) -> None:
    asked = list(islice(questions(5, "heldout"), 12))
    known = {(q.text, *(image.tobytes() for image in q.images)): q.answer for q in asked}

    def answer(content: Any) -> str:
        *pictures, text = content
        return known[text["text"], *(pixels_of(each).tobytes() for each in pictures)]

    server.answer_of = answer
    result = await invoke(server.url, "--vision", "--count", 12, "--seed", 5)
    assert result.exit_code == 0, result.output
    assert "12 of 12 right" in result.stdout
    server.answer_of = lambda content: "I see nothing."
    result = await invoke(server.url, "--vision", "--count", 12, "--seed", 5)
    assert "0 of 12 right" in result.stdout


async def test_pictures_are_asked_about_only_in_chats(server: FakeServer, invoke: Invoke) -> None:
    result = await invoke(server.url, "--vision", "--shots", 2)
    assert result.exit_code == 2
    assert not server.bodies
