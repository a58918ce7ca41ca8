"""deploy/eval: scores a running OpenAI-compatible server on fresh, held-out word problems.

The problems are generated from the seed, the temperature is 0, and only the number after `####` counts. With --vision
the questions are about pictures drawn from the seed, and the numbers, colours and shapes of an answer count. With
--tools each problem is a conversation: the program carries out the model's calls and scores the answer after them. A
failed request counts as a wrong answer and as an error. Any error makes the exit code 1, an unreachable server makes
it 2.
"""

from __future__ import annotations

import asyncio
import base64
import io
import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, Literal

import aiohttp
import typer
from PIL import Image
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from common.errors import ConfigError
from deploy.command import run_program
from deploy.openai_client import (
    CONNECT_SECONDS,
    BadAnswer,
    Unreachable,
    api_base,
    authorization,
    call,
    first_model,
)
from deploy.result_file import check_result_file
from deploy.tiny_models.prompts import SHOT_END, chat_messages, few_shot_prompt
from deploy.tiny_models.vision.questions import Question, questions
from deploy.tiny_models.vision.questions import is_right as is_right_about
from deploy.tiny_models.vision.scenes import Pixels
from deploy.tiny_models.word_problems import Problem, exam, is_right
from deploy.tool_exam import Calls, conversations

Mode = Literal["chat", "completions"]

MAX_NEW_TOKENS = 96  # the longest correct answer has 53
GIVE_UP_AFTER = 8  # consecutive failed requests after which the server counts as broken


@dataclass(frozen=True, slots=True)
class EvalSettings:
    """The parameters of one evaluation."""

    url: str  # with or without /v1
    count: int
    seed: int
    shots: int = 0
    mode: Mode = "chat"
    vision: bool = False
    tools: bool = False
    concurrency: int = 16
    model: str | None = None  # None: the first model that the server lists
    timeout: float = 120.0  # seconds for one request
    api_key: str | None = None

    @property
    def base(self) -> str:
        """The URL up to and including /v1."""
        return api_base(self.url)


@dataclass(frozen=True, slots=True)
class Report:
    """The result that `--json` writes."""

    score: float
    ci_low: float
    ci_high: float
    count: int
    right: int
    errors: int
    first_error: str | None
    seed: int
    shots: int
    mode: Mode
    vision: bool
    model: str
    url: str
    seconds: float
    tools: bool
    calls: int  # tool calls that the model made
    valid_calls: int  # those that an offered tool takes
    accept_length: float | None  # the server's, if it reports one


def wilson(right: int, count: int) -> tuple[float, float]:
    """Return the 95 % confidence interval of a proportion (Wilson), which stays valid near 0 and 1."""
    if count == 0:
        return 0.0, 1.0
    z = 1.96  # standard deviations on each side of the mean that hold 95 %
    share = right / count
    centre = share + z * z / (2 * count)
    spread = z * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    scale = 1 + z * z / count
    return max(0.0, (centre - spread) / scale), min(1.0, (centre + spread) / scale)


@dataclass(frozen=True, slots=True)
class Asked:
    """One request and the check of its answer."""

    body: dict[str, Any]  # without the model name
    right: Callable[[str], bool]
    # the request that follows a reply; None if the reply is the answer
    follow: Callable[[Any], dict[str, Any] | None] = lambda reply: None


def asked(settings: EvalSettings, calls: Calls) -> Iterator[Asked]:
    """Yield the requests of an evaluation; `calls` counts the tool calls in replies."""
    if settings.tools:
        for each in conversations(settings.count, settings.seed, calls):
            yield Asked(each.body, each.is_right, each.follow)
        return
    if settings.vision:
        for question in islice(questions(settings.seed, "heldout"), settings.count):
            yield Asked(picture_body(question), partial(is_right_about, question))
        return
    for shots, problem in exam(settings.count, settings.seed, settings.shots):
        yield Asked(request_body(settings.mode, shots, problem), partial(is_right, problem))


def picture_body(question: Question) -> dict[str, Any]:
    """Build a chat request with its pictures as PNG data URLs."""
    parts: list[dict[str, Any]] = [
        {"type": "image_url", "image_url": {"url": data_url(pixels)}} for pixels in question.images
    ]
    content = [*parts, {"type": "text", "text": question.text}]
    return {
        "temperature": 0,
        "max_tokens": MAX_NEW_TOKENS,
        "messages": [{"role": "user", "content": content}],
    }


def data_url(pixels: Pixels) -> str:
    """Encode pixels [height, width, 3] as a PNG data URL."""
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def request_body(mode: Mode, shots: list[Problem], problem: Problem) -> dict[str, Any]:
    """Build a text request. Completions stop at the blank line that would precede the next question."""
    body: dict[str, Any] = {"temperature": 0, "max_tokens": MAX_NEW_TOKENS}
    if mode == "chat":
        return {**body, "messages": chat_messages(shots, problem.question)}
    return {**body, "prompt": few_shot_prompt(shots, problem.question), "stop": [SHOT_END]}


def answer_text(mode: Mode, reply: Any) -> str:
    """Return the generated text of a reply. Raises BadAnswer if there is none."""
    try:
        choice = reply["choices"][0]
        text = choice["message"]["content"] if mode == "chat" else choice["text"]
    except (KeyError, IndexError, TypeError):
        raise BadAnswer(f"the reply has no choices[0] with text: {str(reply)[:200]}") from None
    if not isinstance(text, str):
        raise BadAnswer(f"the reply's text is {text!r}")
    return text


async def evaluate(settings: EvalSettings, progress: Progress) -> Report:
    """Ask all questions and score the answers.

    It always ends: every request has a deadline, and a broken server is given up.
    """
    start = time.monotonic()
    timeout = aiohttp.ClientTimeout(total=settings.timeout, sock_connect=CONNECT_SECONDS)
    connector = aiohttp.TCPConnector(limit=settings.concurrency)
    async with aiohttp.ClientSession(
        headers=authorization(settings.api_key), timeout=timeout, connector=connector
    ) as session:
        model = settings.model or await first_model(session, settings.base)
        calls = Calls()
        room = _Room(asked(settings, calls), progress, settings.count)
        async with asyncio.TaskGroup() as group:
            for _ in range(min(settings.concurrency, settings.count)):
                group.create_task(_answer_questions(session, settings, model, room))
        accept_length = await _accept_length(session, settings.base)
    low, high = wilson(room.right, settings.count)
    return Report(
        score=room.right / settings.count,
        ci_low=low,
        ci_high=high,
        count=settings.count,
        right=room.right,
        errors=room.errors + room.unfinished,
        first_error=room.first_error,
        seed=settings.seed,
        shots=settings.shots,
        mode=settings.mode,
        vision=settings.vision,
        model=model,
        url=settings.url,
        seconds=time.monotonic() - start,
        tools=settings.tools,
        calls=calls.made,
        valid_calls=calls.valid,
        accept_length=accept_length,
    )


class _Room:
    """State that the concurrent requests share."""

    def __init__(self, questions: Iterator[Asked], progress: Progress, count: int) -> None:
        self.questions = questions
        self.right = 0
        self.errors = 0
        self.first_error: str | None = None
        self.unfinished = count
        self._in_a_row = 0
        self._progress = progress
        self._task = progress.add_task("asking", total=count)

    @property
    def given_up(self) -> bool:
        return self._in_a_row >= GIVE_UP_AFTER

    def answered(self, right: bool) -> None:
        self.right += right
        self._in_a_row = 0
        self._finish()

    def failed(self, why: str) -> None:
        self.errors += 1
        self._in_a_row += 1
        self.first_error = self.first_error or why
        self._finish()

    def _finish(self) -> None:
        self.unfinished -= 1
        self._progress.update(self._task, advance=1, description=f"{self.right} right")


async def _answer_questions(
    session: aiohttp.ClientSession, settings: EvalSettings, model: str, room: _Room
) -> None:
    path = "/chat/completions" if settings.mode == "chat" else "/completions"
    for question in room.questions:
        if room.given_up:
            return
        try:
            reply = await call(session, "POST", settings.base + path, {"model": model, **question.body})
            while (body := question.follow(reply)) is not None:
                reply = await call(session, "POST", settings.base + path, {"model": model, **body})
            text = answer_text(settings.mode, reply)
        except BadAnswer as error:
            room.failed(str(error))
        else:
            room.answered(question.right(text))


async def _accept_length(session: aiohttp.ClientSession, base: str) -> float | None:
    """Return the accept length that the server reports; None if it reports none."""
    try:
        info = await call(session, "GET", f"{base.removesuffix('/v1')}/server_info", None)
        lengths = [float(state["avg_spec_accept_length"]) for state in info["internal_states"]]
    except (BadAnswer, KeyError, TypeError, ValueError):
        return None
    return max(lengths, default=None)


def run(
    url: Annotated[str, typer.Argument(help="the server, e.g. http://127.0.0.1:8000")],
    count: Annotated[int, typer.Option(min=1, help="number of problems")] = 200,
    seed: Annotated[int, typer.Option(help="seed of the problems, which are held out for every seed")] = 7,
    shots: Annotated[int, typer.Option(min=0, help="solved problems shown before each question")] = 0,
    json_file: Annotated[Path | None, typer.Option("--json", help="write the report here")] = None,
    vision: Annotated[
        bool, typer.Option("--vision", help="ask about freshly drawn pictures instead")
    ] = False,
    tools: Annotated[
        bool, typer.Option("--tools", help="hold conversations with tool calls instead")
    ] = False,
    mode: Annotated[
        Mode | None, typer.Option(help="default: chat without shots, completions with shots")
    ] = None,
    concurrency: Annotated[int, typer.Option(min=1, help="concurrent requests")] = 16,
    model: Annotated[str | None, typer.Option(help="default: the first one that the server lists")] = None,
    timeout: Annotated[float, typer.Option(min=0.1, help="seconds for one request")] = 120.0,
    api_key: Annotated[str | None, typer.Option(envvar="OPENAI_API_KEY", help="bearer token")] = None,
) -> None:
    """Score a running server on fresh word problems; prints the share of right answers."""
    chosen: Mode = mode or ("completions" if shots else "chat")
    if vision and tools:
        raise typer.BadParameter("--vision and --tools are two evaluations: leave out one of them")
    if (vision or tools) and (shots or mode == "completions"):
        raise typer.BadParameter(
            f"--{'vision' if vision else 'tools'} uses chat without shots: leave out --shots and --mode"
        )
    settings = EvalSettings(
        url, count, seed, shots, chosen, vision, tools, concurrency, model, timeout, api_key
    )
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    try:
        if json_file is not None:
            check_result_file(json_file)
        with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
            report = asyncio.run(evaluate(settings, progress))
    except ConfigError as error:
        typer.echo(f"deploy/eval: {error}", err=True)
        raise typer.Exit(2) from None
    except Unreachable as error:
        typer.echo(f"deploy/eval: {error}. Is the server running?", err=True)
        raise typer.Exit(2) from None
    if json_file is not None:
        json_file.write_text(json.dumps(asdict(report), indent=2) + "\n")
    what = "pictures" if vision else "tools" if tools else f"{chosen}, {shots} shots"
    typer.echo(
        f"{report.score:.3f} ({report.right} of {count} right, 95 % interval {report.ci_low:.3f} to "
        f"{report.ci_high:.3f}), {what}, seed {seed}, {report.seconds:.1f} s"
    )
    if tools:
        length = "" if report.accept_length is None else f", accept length {report.accept_length:.2f}"
        typer.echo(f"{report.valid_calls} of {report.calls} calls valid{length}")
    if report.errors:
        typer.echo(
            f"deploy/eval: {report.errors} of {count} requests failed, the first with: {report.first_error}",
            err=True,
        )
        raise typer.Exit(1)


if __name__ == "__main__":
    run_program(run, "deploy/eval")
