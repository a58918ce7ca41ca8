"""deploy/chat: what is sent, what is printed, and that an answer cannot control the terminal."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from PIL import Image
from rich.console import Console
from typer.testing import CliRunner, Result

from common.errors import ConfigError
from deploy import chat_cli
from deploy.chat_cli import Chat, talk
from deploy.conversation import ChatDelta, Conversation, FunctionDelta, Reply, ToolCallDelta, image_url
from deploy.openai_client import BadAnswer, error_sentence
from deploy.terminal_text import printable
from tests.fakes.openai_server import DONE, Event, OpenAiServer, serving


def part(**delta: Any) -> Event:
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]}


ANSWER: list[Event] = [
    part(role="assistant", content=""),
    part(reasoning_content="let me see"),
    part(content="It is \x1b]0;title\x07four"),
    part(content=".\x1b"),
    part(content="[2J"),
    {"choices": [], "usage": {"completion_tokens": 4}},
    DONE,
]
SHOWN = "It is \u241b]0;title\u2407four.\u241b[2J"


# -- text of models ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain\ttext\n日本 é 🙂\n", "plain\ttext\n日本 é 🙂\n"),
        ("\x1b[31mred\x1b[0m", "␛[31mred␛[0m"),
        ("a\rb\x08c\x07\x00\x7f", "a␍b␈c␇␀␡"),
        ("\x9b2J\x9d0;t\x9c\x85", "\ufffd2J\ufffd0;t\ufffd\ufffd"),
        ("\u202eevil\u2066\u2028\ud800", "\ufffdevil\ufffd\ufffd\ufffd"),
    ],
)
def test_control_characters_become_visible(text: str, shown: str) -> None:
    assert printable(text) == shown


def test_no_character_that_a_terminal_obeys_is_left() -> None:
    left = printable("".join(map(chr, range(0x110000))))
    obeyed = [*range(0x20), *range(0x7F, 0xA0), *range(0x202A, 0x202F), *range(0x2066, 0x206A)]
    assert {ord(each) for each in left} & set(obeyed) == {ord("\n"), ord("\t")}


# -- conversations -----------------------------------------------------------------------------------------------


def picture(tmp_path: Path) -> Path:
    path = tmp_path / "a.png"
    Image.new("RGB", (4, 4)).save(path)
    return path


def test_images_go_with_the_next_question_only(tmp_path: Path) -> None:
    conversation = Conversation("Be brief.")
    conversation.attach(picture(tmp_path))
    conversation.ask("What is it?")
    conversation.add_reply(Reply("A square."))
    conversation.ask("Sure?")
    system, first, answer, second = conversation.messages
    assert system == {"role": "system", "content": "Be brief."}
    assert [each["type"] for each in first["content"]] == ["image_url", "text"]
    assert first["content"][0]["image_url"]["url"].startswith("data:image/png;base64,iVBOR")
    assert answer == {"role": "assistant", "content": "A square."}
    assert second == {"role": "user", "content": "Sure?"}
    conversation.reset()
    assert conversation.messages == [system]


def test_the_home_of_a_user_who_does_not_exist_is_refused() -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        image_url(Path("~nobody-of-this-host/a.png"))


@pytest.mark.parametrize(("content", "problem"), [(b"text", "is not an image"), (b"", "is empty")])
def test_files_that_are_no_images_are_refused(tmp_path: Path, content: bytes, problem: str) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=problem):
        image_url(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        image_url(tmp_path / "none")


def call(index: int, id: str | None, name: str | None, arguments: str) -> ChatDelta:
    return ChatDelta(tool_calls=[ToolCallDelta(index, id, FunctionDelta(name, arguments))])


def test_tool_calls_are_put_together() -> None:
    reply = Reply()
    for delta in (call(0, "a", "add", '{"x"'), call(1, "b", "sub", "{}"), call(0, None, None, ": 1}")):
        reply.add(delta)
    assert [each["function"] for each in reply.message["tool_calls"]] == [
        {"name": "add", "arguments": '{"x": 1}'},
        {"name": "sub", "arguments": "{}"},
    ]
    many = ChatDelta(tool_calls=[ToolCallDelta(index) for index in range(129)])
    with pytest.raises(BadAnswer, match="more than 128 tool calls"):
        reply.add(many)


# -- in a terminal -----------------------------------------------------------------------------------------------


def script(*lines: str | type[BaseException]) -> Callable[[str], str]:
    """Return a reader of these lines; an exception is a key, as Ctrl-C. Afterwards the input ends."""
    left: Iterator[str | type[BaseException]] = iter(lines)

    def read(prompt: str) -> str:
        line = next(left, EOFError)
        if isinstance(line, str):
            return line
        raise line

    return read


async def terminal(server: OpenAiServer, *lines: str | type[BaseException]) -> tuple[Chat, str]:
    """Return the chat after these lines, and what a terminal has received."""
    out = Console(file=io.StringIO(), force_terminal=True, color_system="standard", width=200)

    def run() -> Chat:
        with asyncio.Runner() as runner:
            chat = Chat(server.url, {"temperature": 0}, 60, None, out)
            runner.run(chat.connect())
            talk(chat, runner, script(*lines))
            return chat

    async with serving(server):
        chat = await asyncio.to_thread(run)
    assert isinstance(out.file, io.StringIO)
    return chat, out.file.getvalue()


async def test_turns_are_sent_together_and_reasoning_is_dimmed() -> None:
    server = OpenAiServer(ANSWER)
    chat, shown = await terminal(server, "/system Be brief.", "2 + 2?", "", "Sure?", "/reset", "Hello")
    assert "\x1b[2mlet me see\x1b[0m\n\nIt is" in shown
    assert SHOWN in shown.replace("\x1b[0m", "")
    assert "4 tokens, first after" in shown
    system = {"role": "system", "content": "Be brief."}
    raw = "It is \x1b]0;title\x07four.\x1b[2J"
    first = [system, {"role": "user", "content": "2 + 2?"}]
    second = [*first, {"role": "assistant", "content": raw}, {"role": "user", "content": "Sure?"}]
    assert [body["messages"] for body in server.asked] == [
        first,
        second,
        [system, {"role": "user", "content": "Hello"}],
    ]
    assert server.asked[0]["model"] == "tiny"
    assert len(chat.conversation.messages) == 3


async def test_a_question_that_fails_is_taken_back(capsys: pytest.CaptureFixture[str]) -> None:
    chat, _ = await terminal(OpenAiServer(status=503), "one", "/image /none", "/nothing")
    assert chat.conversation.messages == []
    said = capsys.readouterr().err
    assert "answered 503" in said
    assert "/none: cannot be read" in said
    assert "/nothing is not a command" in said


ONLY_REASONING: list[Event] = [
    part(reasoning_content="hmm"),
    {"choices": [{"delta": {}, "finish_reason": "length"}]},
    DONE,
]


async def test_an_answer_of_reasoning_only_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    chat, shown = await terminal(OpenAiServer(ONLY_REASONING), "one")
    assert "hmm\x1b[0m\n" in shown, "the prompt begins a line"
    said = " ".join(capsys.readouterr().err.split())
    assert "the answer is reasoning without text (ended by: length); allow more with --max-tokens" in said
    assert chat.conversation.messages == []


CALL: list[Event] = [
    part(tool_calls=[{"index": 0, "id": "a", "function": {"name": "add\x1b", "arguments": "{}"}}]),
    DONE,
]


async def test_the_person_gives_the_results_of_tools() -> None:
    """The server answers with a call each time, until Ctrl-C: then nothing is left of the question."""
    server = OpenAiServer(CALL)
    chat, shown = await terminal(server, "one", "42", KeyboardInterrupt)
    assert "add␛({})" in shown
    assert "(interrupted)" in shown
    assert server.asked[1]["messages"][-1] == {"role": "tool", "tool_call_id": "a", "content": "42"}
    assert chat.conversation.messages == []


# -- from a pipe -------------------------------------------------------------------------------------------------


def piped(url: str, question: str | bytes, *arguments: str) -> Result:
    app = typer.Typer()
    app.command()(chat_cli.run)
    return CliRunner().invoke(app, [url, *arguments], input=question)


async def test_a_piped_question_is_answered_with_text_only() -> None:
    server = OpenAiServer(ANSWER)
    async with serving(server):
        options = ("--top-k", "3", "--seed", "5", "--stop", "x", "--system", "s", "--extra-body", '{"n": 1}')
        result = await asyncio.to_thread(piped, server.url, "2 + 2?\nor 5?\n", *options)
    assert result.exit_code == 0, result.output
    assert result.stdout == SHOWN + "\n"
    assert server.asked == [
        {
            "model": "tiny",
            "top_k": 3,
            "seed": 5,
            "stop": ["x"],
            "n": 1,
            "stream": True,
            "stream_options": {"include_usage": True},
            "messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "2 + 2?\nor 5?\n"}],
        }
    ]


@pytest.mark.parametrize(
    ("server", "question", "code", "said"),
    [
        (OpenAiServer(status=503), "x", 1, "/v1/chat/completions answered 503: too busy\n"),
        (
            OpenAiServer([part(content="a"), {"error": {"message": "no \x1b[2J", "code": 5}}]),
            "x",
            1,
            "the answer broke off: no ␛[2J\n",
        ),
        (OpenAiServer([part(content="a")]), "x", 1, "ended without [DONE]"),
        (OpenAiServer(["{"]), "x", 1, "not a stream of chat events"),
        (OpenAiServer(['{"error": "\udcff"}']), "x", 1, "not a stream of chat events"),
        (OpenAiServer(), "  ", 2, "is empty"),
        (OpenAiServer(), b"\xff\xfe", 2, "is not UTF-8"),
    ],
)
async def test_failures_of_a_pipe(server: OpenAiServer, question: str | bytes, code: int, said: str) -> None:
    async with serving(server):
        result = await asyncio.to_thread(piped, server.url, question)
    assert result.exit_code == code
    assert said in result.stderr
    assert "\x1b" not in result.output


@pytest.mark.parametrize(
    ("raw", "sentence"),
    [
        (b'{"error": {"message": "top_p must be at most 1", "param": "top_p"}}', "top_p must be at most 1"),
        (b'{"object": "error", "message": "old vLLM"}', "old vLLM"),
        (b'{"detail": "Not Found"}', "Not Found"),
        (b'{"error": "text"}', "text"),
        (b'{"error": {"code": 5}}', '{"code":5}'),
        (b'{"detail": [{"loc": []}]}', '{"detail":[{"loc":[]}]}'),
        (b"<h1>Bad Gateway</h1>\n", "<h1>Bad Gateway</h1>"),
        (b"[1]", "[1]"),
        (b"\xff" * 2000, "\ufffd" * 1000),
        (b'{"error": "\xff"}', '{"error": "\ufffd"}'),
    ],
)
def test_the_sentence_of_an_error(raw: bytes, sentence: str) -> None:
    assert error_sentence(raw) == sentence


def test_without_a_server_it_says_so() -> None:
    result = piped("http://127.0.0.1:1", "x")
    assert result.exit_code == 2
    assert "Is the server running?" in result.stderr


def test_other_urls_are_refused_by_name() -> None:
    result = piped("ftp://127.0.0.1", "x")
    assert result.exit_code == 2
    assert "ftp://127.0.0.1: is not an http or https URL" in result.stderr
