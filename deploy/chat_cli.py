"""deploy/chat: a conversation in the terminal, or one question from a pipe.

Text of the model is data: control characters are replaced before they are printed, so that no answer can move the
cursor, change the title or write to the clipboard. Exit codes: 0 success, 1 a piped question failed, 2 no server or an
option is refused.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import aiohttp
import typer
from rich.console import Console

from common.errors import ConfigError
from deploy.command import run_program
from deploy.conversation import ChatDelta, Conversation, Reply, stream_reply
from deploy.openai_client import (
    CONNECT_SECONDS,
    BadAnswer,
    Unreachable,
    api_base,
    authorization,
    extra_fields,
    first_model,
    require_http,
)
from deploy.terminal_text import printable

EXIT_FAILED, EXIT_REFUSED = 1, 2
MAX_QUESTION_BYTES = 8 << 20  # of a piped one
HELP = """/image PATH    send an image with the next question
/system TEXT   set the system prompt; without TEXT, remove it
/reset         forget the conversation
/quit          leave, like Ctrl-D; Ctrl-C stops a running answer"""


@dataclass(slots=True)
class Printer:
    """Prints an answer as it arrives: reasoning dimmed, then text, then tool calls."""

    out: Console
    began: float
    first: float | None = None  # seconds to the first part
    in_reasoning: bool = False

    def show(self, delta: ChatDelta) -> None:
        """Print a part. A pipe gets the text only."""
        reasoning = delta.reasoning_content or delta.reasoning
        if self.first is None and (reasoning or delta.content or delta.tool_calls):
            self.first = time.monotonic() - self.began
        if reasoning and self.out.is_terminal:
            self.in_reasoning = True
            self._write(reasoning, "dim")
        if delta.content:
            if self.in_reasoning:
                self._write("\n\n")
                self.in_reasoning = False
            self._write(delta.content)

    def end(self, reply: Reply) -> None:
        """Print tool calls and, on a terminal, how fast the answer was."""
        if reply.content or self.in_reasoning:
            self._write("\n")
        for call in reply.calls.values():
            self._write(f"{call.name}({call.arguments})\n", "cyan")
        if self.out.is_terminal and self.first is not None and reply.tokens:
            seconds = max(time.monotonic() - self.began - self.first, 1e-9)
            rate = f", {(reply.tokens - 1) / seconds:.0f} tokens/s" if reply.tokens > 1 else ""
            self._write(f"{reply.tokens} tokens, first after {1e3 * self.first:.0f} ms{rate}\n", "dim")

    def _write(self, text: str, style: str | None = None) -> None:
        self.out.out(printable(text), style=style, highlight=False, end="")
        self.out.file.flush()


class Chat:
    """A conversation with one server."""

    def __init__(
        self, url: str, fields: dict[str, Any], timeout: float, api_key: str | None, out: Console
    ) -> None:
        """`fields`: of every request. The model is the first one that the server lists unless they name one.

        Raises ConfigError for a URL of another scheme than http and https.
        """
        require_http(url)
        self.conversation = Conversation()
        self.out = out
        self._base = api_base(url)
        self._fields = fields
        self._headers = authorization(api_key)
        self._timeout = aiohttp.ClientTimeout(total=timeout, sock_connect=CONNECT_SECONDS)

    async def connect(self) -> str:
        """Return the name of the model. Raises Unreachable."""
        if "model" not in self._fields:
            async with self._session() as session:
                self._fields["model"] = await first_model(session, self._base)
        return str(self._fields["model"])

    async def answer(self) -> Reply:
        """Print the answer to what was asked, and add it to the conversation.

        If it fails or is cancelled, what has arrived is the answer; if nothing has, the question is taken back. Raises
        BadAnswer.
        """
        reply, printer = Reply(), Printer(self.out, time.monotonic())
        body = {**self._fields, "messages": self.conversation.messages}
        try:
            async with self._session() as session:
                await stream_reply(session, f"{self._base}/chat/completions", body, reply, printer.show)
            if reply.has_reasoning and not reply.content and not reply.calls:
                more = "; allow more with --max-tokens" if reply.finish_reason == "length" else ""
                raise BadAnswer(
                    f"the answer is reasoning without text (ended by: {reply.finish_reason}){more}"
                )
        finally:
            printer.end(reply)
            if reply.content or reply.calls:
                self.conversation.add_reply(reply)
            else:
                self.conversation.take_back()
        return reply

    def _session(self) -> aiohttp.ClientSession:
        return aiohttp.ClientSession(headers=self._headers, timeout=self._timeout)


def talk(chat: Chat, runner: asyncio.Runner, read: Callable[[str], str]) -> None:
    """Take questions and commands until the end of the input. `read` shows a prompt and returns a line."""
    while True:
        try:
            line = read("> ").strip()
        except (EOFError, KeyboardInterrupt):
            chat.out.print()
            return
        if line == "/quit":
            return
        if line.startswith("/"):
            command(chat, line)
        elif line:
            chat.conversation.ask(line)
            answer_with_tools(chat, runner, read)


def answer_with_tools(chat: Chat, runner: asyncio.Runner, read: Callable[[str], str]) -> None:
    """Print answers until one has no tool calls; the person at the terminal gives the results of the tools."""
    try:
        while (reply := runner.run(chat.answer())).calls:
            for call in reply.calls.values():
                chat.conversation.add_result(call, read(f"result of {printable(call.name)}: "))
    except BadAnswer as error:
        complain(str(error))
    except (EOFError, KeyboardInterrupt):
        chat.conversation.drop_open_calls()
        chat.out.print("(interrupted)", style="dim", highlight=False)


def command(chat: Chat, line: str) -> None:
    """Carry out a line that begins with a slash."""
    name, _, rest = line.partition(" ")
    if name == "/image":
        try:
            chat.conversation.attach(Path(rest.strip()))
        except ConfigError as error:
            complain(str(error))
    elif name == "/system":
        chat.conversation.system = rest.strip()
    elif name == "/reset":
        chat.conversation.reset()
    else:
        if name != "/help":
            complain(f"{name} is not a command")
        chat.out.print(HELP, markup=False, highlight=False)


def complain(text: str) -> None:
    """Print an error, which may quote the server."""
    Console(stderr=True).print(
        printable(f"deploy/chat: {text}"), style="red", markup=False, highlight=False, soft_wrap=True
    )


def run(
    url: Annotated[str, typer.Argument(help="the server")] = "http://127.0.0.1:8000",
    model: Annotated[str | None, typer.Option(help="default: the first one that the server lists")] = None,
    system: Annotated[str, typer.Option(help="system prompt")] = "",
    image: Annotated[
        list[Path] | None, typer.Option(help="image to send with the first question; may be repeated")
    ] = None,
    temperature: Annotated[float | None, typer.Option(min=0)] = None,
    top_p: Annotated[float | None, typer.Option(min=0, max=1)] = None,
    top_k: Annotated[int | None, typer.Option()] = None,
    min_p: Annotated[float | None, typer.Option(min=0, max=1)] = None,
    repetition_penalty: Annotated[float | None, typer.Option(min=0)] = None,
    presence_penalty: Annotated[float | None, typer.Option(min=-2, max=2)] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1)] = None,
    seed: Annotated[int | None, typer.Option()] = None,
    stop: Annotated[list[str] | None, typer.Option(help="may be repeated")] = None,
    extra_body: Annotated[
        str, typer.Option(metavar="JSON", help="fields to add to every request, such as tools")
    ] = "{}",
    timeout: Annotated[float, typer.Option(min=0.1, help="seconds for one answer")] = 600.0,
    api_key: Annotated[str | None, typer.Option(envvar="OPENAI_API_KEY", help="bearer token")] = None,
) -> None:
    """Chat with a server. Without a terminal, read one question from standard input and print the answer.

    Commands in a chat: /image PATH, /system TEXT, /reset, /quit.
    """
    given: dict[str, Any] = {
        "model": model,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
        "presence_penalty": presence_penalty,
        "max_tokens": max_tokens,
        "seed": seed,
        "stop": stop or None,
    }
    try:
        fields = {name: value for name, value in given.items() if value is not None}
        fields |= extra_fields(extra_body)
        chat = Chat(url, fields, timeout, api_key, Console(highlight=False))
        chat.conversation.system = system
        for path in image or ():
            chat.conversation.attach(path)
        with asyncio.Runner() as runner:
            name = runner.run(chat.connect())
            if not sys.stdin.isatty():
                answer_piped(chat, runner)
                return
            edit_lines()
            chat.out.print(f"{printable(name)}; /help shows commands", style="dim", markup=False)
            talk(chat, runner, input)
    except ConfigError as error:
        complain(str(error))
        raise typer.Exit(EXIT_REFUSED) from None
    except Unreachable as error:
        complain(f"{error}. Is the server running?")
        raise typer.Exit(EXIT_REFUSED) from None


def edit_lines() -> None:
    """Let questions be edited and repeated with the arrow keys; a Python without readline has none of it."""
    with contextlib.suppress(ImportError):
        import readline

        readline.set_auto_history(True)


def read_text() -> str:
    """Return standard input. Raises ConfigError if it is not UTF-8, in whatever locale."""
    try:
        question = sys.stdin.read(MAX_QUESTION_BYTES + 1)
        question.encode()  # in the locale C, bytes that are not text were read as surrogates
    except UnicodeError:
        raise ConfigError("standard input", "is not UTF-8 text; convert it first, as with iconv") from None
    return question


def answer_piped(chat: Chat, runner: asyncio.Runner) -> None:
    """Answer standard input."""
    question = read_text()
    if not question.strip() or len(question) > MAX_QUESTION_BYTES:
        raise ConfigError("standard input", f"is empty or longer than {MAX_QUESTION_BYTES >> 20} MiB")
    chat.conversation.ask(question)
    try:
        runner.run(chat.answer())
    except BadAnswer as error:
        complain(str(error))
        raise typer.Exit(EXIT_FAILED) from None


if __name__ == "__main__":
    run_program(run, "deploy/chat")
