"""deploy/bench: measures first tokens, gaps and goodput of OpenAI-compatible servers under load.

Exit codes: 0 success, 1 requests failed or a search found no rate, 2 options refused or no server, 3 the generator was
too slow to be trusted.
"""

from __future__ import annotations

import asyncio
import math
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from common.descriptors import prepare_descriptors
from common.errors import ConfigError
from deploy.bench_options import BenchOptions, json_report, open_measurement, refuse_options_without_effect
from deploy.bench_screen import (
    EXIT_FAILED,
    EXIT_NOT_TRUSTED,
    EXIT_REFUSED,
    MAX_ERRORS,
    print_line,
    progress,
)
from deploy.bench_search import (
    announce,
    search_bounds,
    search_report,
    show_probe,
    show_results,
)
from deploy.bench_search import search as run_search
from deploy.command import run_program
from deploy.load_generator.chart import check_matplotlib, draw, draw_search
from deploy.load_generator.goodput_search import GoodputSearch
from deploy.load_generator.measurement import MeasuredLoad
from deploy.load_generator.plan import Replay
from deploy.load_generator.summary import Limits, percent
from deploy.openai_client import Unreachable
from deploy.result_file import check_result_file

OPEN_LOOP_SECONDS = 60.0
PREFIX_TOKENS = 256

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
        str | None, typer.Option(metavar="URL", help="second server, measured in turns with the first")
    ] = None,
    rate: Annotated[
        list[float] | None,
        typer.Option(
            min=0.001,
            help="open loop: requests per second; may be repeated; default 4. With --search: rate to start at",
        ),
    ] = None,
    concurrency: Annotated[
        list[int] | None, typer.Option(min=1, help="closed loop: number of clients; may be repeated")
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(metavar="FILE", help="replay a trace in Mooncake's format (JSON lines)")
    ] = None,
    search: Annotated[
        bool,
        typer.Option("--search", help="find the highest rate at which --share of requests meet both limits"),
    ] = False,
    share: Annotated[
        float | None, typer.Option(help="search: share of requests that must meet both limits; default 0.99")
    ] = None,
    min_rate: Annotated[
        float | None,
        typer.Option(min=0.001, help="search: lowest rate to probe; default 15 / --seconds (0.25 for 60 s)"),
    ] = None,
    max_rate: Annotated[
        float | None, typer.Option(min=0.001, help="search: highest rate to probe; default 1024")
    ] = None,
    resolution: Annotated[
        float | None,
        typer.Option(
            min=0.001,
            help="search: maximum relative gap between the rate found and a higher one that misses; "
            "default 0.05",
        ),
    ] = None,
    max_probes: Annotated[
        int | None,
        typer.Option(min=1, help="search: maximum number of rates to probe on each server; default 12"),
    ] = None,
    seconds: Annotated[
        float | None,
        typer.Option(min=0.1, help="open loop: seconds of arrivals; default 60, or the whole trace"),
    ] = None,
    requests: Annotated[
        int | None,
        typer.Option(min=1, help="closed loop: requests per level; default 4 per client, at least 12"),
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="number of repetitions, each with new arrivals")] = 3,
    first_seed: Annotated[int, typer.Option(min=0, help="first seed; repetitions count up from it")] = 1,
    input_tokens: Annotated[int, typer.Option("--input", min=1, help="tokens of a prompt")] = 512,
    output_tokens: Annotated[int, typer.Option("--output", min=1, help="tokens of an answer")] = 64,
    prefixes: Annotated[
        int, typer.Option(min=0, help="number of prefixes that prompts share; 0: every prompt is new")
    ] = 0,
    prefix_tokens: Annotated[
        int | None, typer.Option(min=1, help="tokens of a shared prefix; default 256")
    ] = None,
    speed: Annotated[float, typer.Option(min=0.001, help="trace: factor for the rate of arrivals")] = 1.0,
    length_scale: Annotated[
        float, typer.Option(min=0.001, help="trace: factor for the lengths of prompts, answers and blocks")
    ] = 1.0,
    max_input: Annotated[
        int | None, typer.Option(min=1, help="trace: leave out prompts with more tokens, after scaling")
    ] = None,
    ttft_ms: Annotated[float, typer.Option(min=0.001, help="goodput: maximum time to first token")] = 200.0,
    gap_ms: Annotated[float, typer.Option(min=0.001, help="goodput: maximum length of any gap")] = 15.0,
    max_lag_ms: Annotated[
        float, typer.Option(help="maximum p99 of this program's own delays; beyond it, the exit code is 3")
    ] = 5.0,
    vocabulary: Annotated[
        int,
        typer.Option(
            "--vocab", min=8, help="prompts have token ids below this; the default fits every tiny model"
        ),
    ] = 600,
    salt: Annotated[
        int | None, typer.Option(min=0, help="the same salt gives the same prompts; default: new ones")
    ] = None,
    warm_up: Annotated[int, typer.Option(min=0, help="unmeasured requests sent to each server first")] = 2,
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

    --search finds the highest rate of Poisson arrivals at which --share of the requests meet --ttft-ms and --gap-ms.

    Prompts are random token ids, sent to /v1/completions; answers are streamed and never end early. Times are measured
    from when a request was due, even if it was sent later.
    """
    search_values = {
        "--share": share,
        "--min-rate": min_rate,
        "--max-rate": max_rate,
        "--resolution": resolution,
        "--max-probes": max_probes,
    }
    out = Console(width=None if sys.stdout.isatty() else 160)
    try:
        refuse_options_without_effect(
            {
                "--requests: belongs to --concurrency": requests is not None and not concurrency,
                "--seconds: has no effect with --concurrency, which has --requests": bool(
                    seconds and concurrency
                ),
                "--speed: belongs to --trace": speed != 1 and trace is None,
                "--length-scale: belongs to --trace": length_scale != 1 and trace is None,
                "--max-input: belongs to --trace": max_input is not None and trace is None,
                "--prefixes: has no effect with --trace, which has its own": bool(prefixes and trace),
                "--prefix-tokens: belongs to --prefixes": prefix_tokens is not None and not prefixes,
                "--compare-api-key: belongs to --compare": compare_api_key is not None and compare is None,
            }
            | {
                f"{option}: belongs to --search": value is not None and not search
                for option, value in search_values.items()
            }
        )
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
            prefix_tokens=(prefix_tokens or PREFIX_TOKENS) if prefixes else 0,
            limits=Limits(ttft_ms / 1e3, gap_ms / 1e3, max_lag_ms / 1e3),
            vocabulary=vocabulary,
            salt=random.SystemRandom().randrange(1 << 32) if salt is None else salt,
            warm_up=warm_up,
            extra_body=extra_body,
            timeout=timeout,
            search=search_bounds(search_values, rate or [], seconds or OPEN_LOOP_SECONDS) if search else None,
        )
        files = Files(json_file, svg_file)
        files.check()
        api_keys = api_key, compare_api_key
        code = _search(options, api_keys, files, out) if search else _measure(options, api_keys, files, out)
    except ConfigError as error:
        _refuse(str(error))
    except Unreachable as error:
        _refuse(f"{error}. Is the server running?")
    raise typer.Exit(code)


@dataclass(frozen=True, slots=True)
class Files:
    """The files for the result."""

    json: Path | None
    svg: Path | None

    def check(self) -> None:
        """Raise ConfigError for what cannot be written, before anything is measured."""
        if self.svg is not None:
            check_matplotlib()
        for file in (self.json, self.svg):
            if file is not None:
                check_result_file(file)


def _search(options: BenchOptions, api_keys: Sequence[str | None], files: Files, out: Console) -> int:
    """Search, keeping the probes so far in the JSON file, and return the exit code."""

    def probed(found: GoodputSearch) -> None:
        show_probe(found.probes[-1], len(options.seeds), out)
        if files.json is not None:
            files.json.write_bytes(search_report(options, found))

    found = asyncio.run(run_search(options, api_keys, lambda: announce(options, out), probed))
    if files.json is not None:
        files.json.write_bytes(search_report(options, found))
    code = show_results(found, out)
    if files.svg is not None:
        draw_search(found, files.svg)
    return code


def _measure(options: BenchOptions, api_keys: Sequence[str | None], files: Files, out: Console) -> int:
    """Measure all loads, write the files and return the exit code."""
    measured = asyncio.run(measure(options, api_keys))
    if files.json is not None:
        files.json.write_bytes(report(options, measured))
    if files.svg is not None:
        draw(measured, options.limits, files.svg)
    return show(measured, 1e3 * options.limits.gap, out)


async def measure(options: BenchOptions, api_keys: Sequence[str | None]) -> list[MeasuredLoad]:
    """Measure all loads, with progress on a terminal. `api_keys`: of each server. Raises ConfigError, Unreachable."""
    async with open_measurement(options, api_keys) as measurement:
        plans = [load.plan(seed) for load in measurement.loads for seed in options.seeds]
        with progress(len(options.urls) * sum(map(len, plans))) as answered:
            return [each async for each in measurement.run(answered)]


def report(options: BenchOptions, measured: Sequence[MeasuredLoad]) -> bytes:
    """Return the result as JSON."""
    return json_report(options, not any(each.doubts for each in measured), {"loads": measured})


def show(measured: Sequence[MeasuredLoad], gap_ms: float, out: Console) -> int:
    """Print a table, errors, doubts and own delays of more than `gap_ms`, and return the exit code."""
    table = Table("server", "load", "failed", *COLUMNS, "good", title="times in ms")
    for each in measured:
        values = [getattr(each.summary, field) for field in COLUMNS.values()]
        failed = f"{each.summary.failed} of {each.summary.requests}"
        cells = ("-" if math.isnan(value) else f"{value:.4g}" for value in values)
        table.add_row(
            escape(each.target), escape(each.load), failed, *cells, f"{percent(each.summary.goodput)} %"
        )
    out.print(table)
    for each in measured:
        for error in each.errors[:MAX_ERRORS]:
            print_line(out, f"{each.target}, {each.load}: {error}")
        own_ms = each.summary.loop_lag_ms_max
        if own_ms > gap_ms:
            late = f"up to {own_ms:.1f} ms of the longest gaps are delays of this program"
            print_line(out, f"{each.target}, {each.load}: {late}")
        for doubt in each.doubts:
            print_line(out, f"NOT TO BE TRUSTED: {each.target}, {each.load}: {doubt}")
    if any(each.doubts for each in measured):
        return EXIT_NOT_TRUSTED
    return EXIT_FAILED if any(each.summary.failed for each in measured) else 0


def _refuse(text: str) -> NoReturn:
    typer.echo(f"deploy/bench: {text}", err=True)
    raise typer.Exit(EXIT_REFUSED) from None


def main() -> None:
    """Run the command line of deploy/bench."""
    prepare_descriptors()
    run_program(run, "deploy/bench")


if __name__ == "__main__":
    main()
