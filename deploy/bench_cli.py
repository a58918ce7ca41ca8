"""deploy/bench: first tokens, gaps and goodput of OpenAI-compatible servers under load.

Exit codes: 0 success, 1 requests failed, 2 options refused or no server, 3 the generator was too slow to be trusted.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import platform
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, NoReturn

import aiohttp
import msgspec
import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from common.errors import ConfigError
from deploy.load_generator.chart import check_matplotlib, draw
from deploy.load_generator.loads import Load, closed_load, open_load, trace_load
from deploy.load_generator.measurement import Bodies, MeasuredLoad, Measurement, Target
from deploy.load_generator.plan import (
    PromptShape,
    Replay,
)
from deploy.load_generator.summary import Limits
from deploy.openai_client import (
    CONNECT_SECONDS,
    Unreachable,
    api_base,
    authorization,
    first_model,
    json_fields,
)
from deploy.terminal_text import printable

EXIT_FAILED, EXIT_REFUSED, EXIT_NOT_TRUSTED = 1, 2, 3
OPEN_LOOP_SECONDS = 60.0
DEFAULT_RATE = 4.0
MOST_ERRORS = 3  # shown of each row

COLUMNS = {
    "ttft p50": "ttft_ms_p50",
    "p90": "ttft_ms_p90",
    "p99": "ttft_ms_p99",
    "gap p50": "gap_ms_p50",
    "p90 ": "gap_ms_p90",
    "p99 ": "gap_ms_p99",
    "max": "gap_ms_max",
    "token p50": "token_ms_p50",
    "tokens/s": "output_tokens_per_s",
    "requests/s": "requests_per_s",
}


def run(
    url: Annotated[str, typer.Argument(help="the server, e.g. http://127.0.0.1:8000")],
    compare: Annotated[
        str | None, typer.Option(metavar="URL", help="a second server: it takes turns with the first one")
    ] = None,
    rate: Annotated[
        list[float] | None,
        typer.Option(min=0.001, help="open loop: requests per second; may be repeated; default 4"),
    ] = None,
    concurrency: Annotated[
        list[int] | None, typer.Option(min=1, help="closed loop: clients; may be repeated")
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(metavar="FILE", help="replay a trace in Mooncake's format (JSON lines)")
    ] = None,
    seconds: Annotated[
        float | None,
        typer.Option(min=0.1, help="open loop: length of the arrivals; default 60, or the whole trace"),
    ] = None,
    requests: Annotated[
        int | None,
        typer.Option(min=1, help="closed loop: requests per level; default 4 per client, at least 12"),
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="number of repetitions, each with its own times")] = 3,
    first_seed: Annotated[int, typer.Option(min=0, help="the seeds are this number and those after it")] = 1,
    input_tokens: Annotated[int, typer.Option("--input", min=1, help="tokens of a prompt")] = 512,
    output_tokens: Annotated[int, typer.Option("--output", min=1, help="tokens of an answer")] = 64,
    prefixes: Annotated[
        int, typer.Option(min=0, help="number of prefixes that prompts share; 0: every prompt is new")
    ] = 0,
    prefix_tokens: Annotated[int, typer.Option(min=1, help="tokens of a shared prefix")] = 256,
    speed: Annotated[float, typer.Option(min=0.001, help="trace: multiplies the rate of arrivals")] = 1.0,
    length_scale: Annotated[
        float, typer.Option(min=0.001, help="trace: multiplies the lengths of prompts, answers and blocks")
    ] = 1.0,
    max_input: Annotated[
        int | None, typer.Option(min=1, help="trace: leave out prompts with more tokens, after scaling")
    ] = None,
    ttft_ms: Annotated[float, typer.Option(help="limit of first tokens for goodput")] = 200.0,
    gap_ms: Annotated[float, typer.Option(help="limit of every gap for goodput")] = 15.0,
    max_lag_ms: Annotated[
        float, typer.Option(help="largest p99 of this program's own delays; above, the exit code is 3")
    ] = 5.0,
    vocabulary: Annotated[int, typer.Option("--vocab", min=8, help="token ids are drawn below this")] = 700,
    salt: Annotated[
        int | None, typer.Option(min=0, help="prompts are the same for the same salt; default: new ones")
    ] = None,
    warm_up: Annotated[int, typer.Option(min=0, help="requests to each server that do not count")] = 2,
    model: Annotated[str | None, typer.Option(help="default: the first one that each server lists")] = None,
    extra_body: Annotated[str, typer.Option(metavar="JSON", help="fields to add to every request")] = "{}",
    timeout: Annotated[float, typer.Option(min=0.1, help="seconds for one request")] = 600.0,
    api_key: Annotated[
        str | None, typer.Option(envvar="OPENAI_API_KEY", help="bearer token for the first server only")
    ] = None,
    compare_api_key: Annotated[str | None, typer.Option(help="bearer token for the second server")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="write the result here")] = None,
    svg_file: Annotated[Path | None, typer.Option("--svg", help="draw a chart here (matplotlib)")] = None,
) -> None:
    """Measure servers under load: Poisson arrivals (--rate), a closed loop (--concurrency) or a trace (--trace).

    Prompts are random token ids, sent to /v1/completions; answers are streamed and never end early. Times count from
    when a request was due, also if it was sent later.
    """
    options = BenchOptions(
        urls=[url] if compare is None else [url, compare],
        model=model,
        rates=rate or [],
        concurrency=concurrency or [],
        trace=trace,
        replay=Replay(speed, length_scale, seconds, max_input),
        seconds=seconds or OPEN_LOOP_SECONDS,
        requests=requests,
        seeds=list(range(first_seed, first_seed + seeds)),
        input=input_tokens,
        output=output_tokens,
        prefixes=prefixes,
        prefix_tokens=prefix_tokens if prefixes else 0,
        limits=Limits(ttft_ms / 1e3, gap_ms / 1e3, max_lag_ms / 1e3),
        vocabulary=vocabulary,
        salt=random.SystemRandom().randrange(1 << 32) if salt is None else salt,
        warm_up=warm_up,
        extra_body=extra_body,
        timeout=timeout,
    )
    try:
        if svg_file is not None:
            check_matplotlib()
        for file in (json_file, svg_file):
            if file is not None and not file.absolute().parent.is_dir():
                raise ConfigError(str(file), f"there is no folder {file.absolute().parent}")
        measured = asyncio.run(measure(options, [api_key, compare_api_key]))
    except ConfigError as error:
        _refuse(str(error))
    except Unreachable as error:
        _refuse(f"{error}. Is the server running?")
    if json_file is not None:
        json_file.write_bytes(report(options, measured))
    if svg_file is not None:
        draw(measured, options.limits, svg_file)
    raise typer.Exit(show(measured, gap_ms, Console(width=None if sys.stdout.isatty() else 160)))


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """The options of one measurement, without the API key: the report contains them."""

    urls: list[str]
    model: str | None
    rates: list[float]
    concurrency: list[int]
    trace: Path | None
    replay: Replay
    seconds: float  # arrivals of an open loop
    requests: int | None  # per level of a closed loop
    seeds: list[int]
    input: int
    output: int
    prefixes: int
    prefix_tokens: int
    limits: Limits
    vocabulary: int
    salt: int
    warm_up: int
    extra_body: str
    timeout: float

    @property
    def shape(self) -> PromptShape:
        """The lengths of synthetic prompts. Raises ConfigError."""
        return PromptShape(self.input, self.output, self.prefixes, self.prefix_tokens)

    @property
    def loads(self) -> list[Load]:
        """The loads to measure. Raises ConfigError."""
        if len(set(map(api_base, self.urls))) < len(self.urls):
            raise ConfigError("--compare", "names the same server: its prefix cache would have the prompts")
        if sum(map(bool, (self.rates, self.concurrency, self.trace))) > 1:
            raise ConfigError("", "--rate, --concurrency and --trace are different loads: use one of them")
        if self.trace is not None:
            return [trace_load(self.trace, self.replay)]
        if self.concurrency:
            return [closed_load(each, self.requests, self.shape) for each in self.concurrency]
        return [open_load(each, self.seconds, self.shape) for each in self.rates or [DEFAULT_RATE]]


async def measure(options: BenchOptions, api_keys: Sequence[str | None]) -> list[MeasuredLoad]:
    """Measure all loads, with progress on a terminal. `api_keys`: of each server. Raises ConfigError, Unreachable."""
    loads, shape, extra = options.loads, options.shape, json_fields("--extra-body", options.extra_body)
    timeout = aiohttp.ClientTimeout(total=options.timeout, sock_connect=CONNECT_SECONDS)
    async with contextlib.AsyncExitStack() as stack:
        connector = await stack.enter_async_context(aiohttp.TCPConnector(limit=0))
        targets = []
        for url, key in zip(options.urls, api_keys, strict=False):
            session = aiohttp.ClientSession(
                headers={"Content-Type": "application/json", **authorization(key)},
                timeout=timeout,
                connector=connector,
                connector_owner=False,
            )
            await stack.enter_async_context(session)
            base = api_base(url)
            targets.append(Target(url, base, options.model or await first_model(session, base), session))
        bodies = Bodies(options.vocabulary, options.salt, extra)
        measurement = Measurement(targets, loads, options.seeds, bodies, options.limits)
        await measurement.warm_up(options.warm_up, shape)
        total = len(targets) * sum(len(load.plan(seed)) for load in loads for seed in options.seeds)
        console = Console(stderr=True)
        columns = (TextColumn("answered"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
            task = bar.add_task("", total=total)
            results = measurement.run(lambda: bar.advance(task))
            return [each async for each in results]


def report(options: BenchOptions, measured: Sequence[MeasuredLoad]) -> bytes:
    """Return the result as JSON. Values that do not exist, such as percentiles without answers, are null."""
    whole = {
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "client": {"python": platform.python_version(), "cores": os.cpu_count()},
        "options": options,
        "trusted": not any(each.doubts for each in measured),
        "loads": measured,
    }
    return msgspec.json.format(msgspec.json.encode(whole, enc_hook=str), indent=1) + b"\n"


def show(measured: Sequence[MeasuredLoad], gap_ms: float, out: Console) -> int:
    """Print a table, errors, doubts and own delays of more than `gap_ms`, and return the exit code."""
    table = Table("server", "load", "failed", *COLUMNS, "good", title="times in ms")
    for each in measured:
        values = [getattr(each.summary, field) for field in COLUMNS.values()]
        failed = f"{each.summary.failed} of {each.summary.requests}"
        cells = ("-" if math.isnan(value) else f"{value:.4g}" for value in values)
        table.add_row(
            escape(each.target), escape(each.load), failed, *cells, f"{100 * each.summary.goodput:.0f} %"
        )
    out.print(table)
    for each in measured:
        for error in each.errors[:MOST_ERRORS]:
            _line(out, f"{each.target}, {each.load}: {error}")
        own_ms = each.summary.loop_lag_ms_max
        if own_ms > gap_ms:
            late = f"up to {own_ms:.1f} ms of the longest gaps are delays of this program"
            _line(out, f"{each.target}, {each.load}: {late}")
        for doubt in each.doubts:
            _line(out, f"NOT TO BE TRUSTED: {each.target}, {each.load}: {doubt}")
    if any(each.doubts for each in measured):
        return EXIT_NOT_TRUSTED
    return EXIT_FAILED if any(each.summary.failed for each in measured) else 0


def _line(out: Console, text: str) -> None:
    """Print a line that may quote a server."""
    out.print(printable(text), markup=False, highlight=False, soft_wrap=True)


def _refuse(text: str) -> NoReturn:
    typer.echo(f"deploy/bench: {text}", err=True)
    raise typer.Exit(EXIT_REFUSED) from None


def main() -> None:
    """Run the command line of deploy/bench."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command(context_settings={"help_option_names": ["-h", "--help"]})(run)
    app(prog_name="deploy/bench")


if __name__ == "__main__":
    main()
