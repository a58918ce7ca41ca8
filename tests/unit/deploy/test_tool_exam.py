"""deploy/eval --tools against a server in this process: calls are carried out, counted, and answers scored."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import typer
from aiohttp import web
from aiohttp.test_utils import TestServer
from typer.testing import CliRunner

from deploy.eval_cli import run
from deploy.tiny_models.tool_calls.conversations import Conversation, exam
from deploy.tool_exam import MAX_CALL_TURNS, Calls, ToolConversation, conversations

app = typer.Typer()
app.command()(run)
COUNT, SEED = 40, 7


def _calls(conversation: Conversation) -> list[dict[str, Any]]:
    return [
        {
            "id": f"call_{index}",
            "type": "function",
            "function": {"name": call.tool.name, "arguments": json.dumps(call.arguments)},
        }
        for index, call in enumerate(conversation.exchange.calls)
    ]


def _reply(content: str | None, calls: list[dict[str, Any]]) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if calls:
        message["tool_calls"] = calls
    return {"choices": [{"message": message}]}


class KnowingServer:
    """Knows the held-out conversations of the seed: makes the right calls, and answers once it has their results."""

    def __init__(self) -> None:
        self.known = {_question(each): each for each in exam(COUNT, SEED)}
        self.results: list[str] = []
        self.always_calls = False

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "tiny-tools"}]})

    async def info(self, request: web.Request) -> web.Response:
        return web.json_response({"internal_states": [{"avg_spec_accept_length": 3.25}]})

    async def chat(self, request: web.Request) -> web.Response:
        body = await request.json()
        messages = body["messages"]
        asked = next(message["content"] for message in reversed(messages) if message["role"] == "user")
        conversation = self.known[(asked, json.dumps(body.get("tools", [])))]
        given = [message["content"] for message in messages if message["role"] == "tool"]
        self.results += given
        calls = [] if given and not self.always_calls else _calls(conversation)
        return web.json_response(_reply(None if calls else conversation.exchange.answer, calls))


def _question(conversation: Conversation) -> tuple[str, str]:
    return conversation.exchange.question, json.dumps(conversation.declarations)


async def _report(server: KnowingServer, file: Path) -> tuple[dict[str, Any], str]:
    site = web.Application()
    site.router.add_get("/v1/models", server.models)
    site.router.add_get("/server_info", server.info)
    site.router.add_post("/v1/chat/completions", server.chat)
    async with TestServer(site) as running:
        words = [str(running.make_url("/")), "--tools", "--count", str(COUNT), "--json", str(file)]
        result = await asyncio.to_thread(lambda: CliRunner().invoke(app, words))
    assert result.exit_code == 0, result.output
    return json.loads(file.read_text()), result.stdout


async def test_a_perfect_server_scores_one(tmp_path: Path) -> None:
    server = KnowingServer()
    report, shown = await _report(server, tmp_path / "report.json")
    wanted = [result for each in server.known.values() for result in each.exchange.results]
    assert report["score"] == 1.0
    assert report["calls"] == report["valid_calls"] == len(wanted)
    assert sorted(server.results) == sorted(wanted)
    assert report["accept_length"] == 3.25
    assert f"{len(wanted)} of {len(wanted)} calls valid, accept length 3.25" in shown


async def test_a_server_that_only_calls_is_not_asked_for_ever(tmp_path: Path) -> None:
    server = KnowingServer()
    server.always_calls = True
    called = [each for each in server.known.values() if each.exchange.calls]
    words = CliRunner()
    site = web.Application()
    site.router.add_get("/v1/models", server.models)
    site.router.add_post("/v1/chat/completions", server.chat)
    async with TestServer(site) as running:
        arguments = [str(running.make_url("/")), "--tools", "--count", str(COUNT), "--concurrency", "1"]
        result = await asyncio.to_thread(lambda: words.invoke(app, arguments))
    assert result.exit_code == 1
    assert len(called) > MAX_CALL_TURNS
    assert "the reply's text is None" in result.stderr


def test_calls_that_no_tool_takes_are_counted_and_answered() -> None:
    calls = Calls()
    taken = next(
        each for each in conversations(COUNT, SEED, calls) if each.follow(_reply(None, [_call("", "{}")]))
    )
    (asked,) = [message for message in taken.body["messages"] if message["role"] == "tool"]
    assert asked["content"] == "error: no tool takes these arguments"
    body = taken.follow(_reply(None, [_call("calculator", '{"expression": ')]))
    assert body is not None
    assert body["messages"][-1]["content"] == "error: the arguments are not JSON"
    assert (calls.made, calls.valid) == (2, 0)
    assert taken.follow(_reply("The answer is 4.", [])) is None
    assert taken.follow({"choices": []}) is None


def _call(name: str, arguments: str) -> dict[str, Any]:
    return {"id": "call_0", "type": "function", "function": {"name": name, "arguments": arguments}}


@pytest.mark.parametrize("other", [["--vision"], ["--shots", "2"], ["--mode", "completions"]])
def test_other_exams_cannot_be_combined_with_it(other: list[str]) -> None:
    result = CliRunner().invoke(app, ["http://127.0.0.1:9", "--tools", *other])
    assert result.exit_code == 2
    assert "--tools" in result.stderr


def test_a_conversation_without_tools_sends_none() -> None:
    plain = next(each for each in exam(400, SEED) if not each.tools)
    assert "tools" not in ToolConversation(plain, Calls()).body
