"""deploy/bench --search: runs the search, prints its probes and its results, and reports them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import msgspec
from rich.console import Console

from common.errors import ConfigError
from deploy.bench_options import DEFAULT_RATE, BenchOptions, json_report, open_measurement
from deploy.bench_screen import EXIT_FAILED, EXIT_NOT_TRUSTED, MAX_ERRORS, print_line, progress
from deploy.load_generator.goodput_search import GoodputSearch, Probe, SearchShape
from deploy.load_generator.rate_search import SearchBounds
from deploy.load_generator.runs import CUT_OFF
from deploy.load_generator.summary import percent
from deploy.openai_client import extra_fields

MIN_ARRIVALS = 15
HIGHEST_RATE = 1024.0
# The fields of SearchBounds, by option.
FIELDS = {
    "--share": "share",
    "--min-rate": "lowest",
    "--max-rate": "highest",
    "--resolution": "resolution",
    "--max-probes": "probes",
}


def search_bounds(values: Mapping[str, float | None], rates: Sequence[float], seconds: float) -> SearchBounds:
    """Return the bounds of a search whose runs last `seconds`. Raises ConfigError.

    `values`: of the options in FIELDS; None: the default. By default, each run has about `MIN_ARRIVALS` or more.
    """
    if len(rates) > 1:
        raise ConfigError("--rate", "is the first rate of a search: give only one")
    given = {FIELDS[option]: value for option, value in values.items() if value is not None}
    lowest = given.get("lowest", min([MIN_ARRIVALS / seconds, *rates]))
    highest = given.get("highest", max([HIGHEST_RATE, *rates]))
    if lowest > highest:
        raise ConfigError("--min-rate", f"{lowest:g}/s is above --max-rate, {highest:g}/s")
    start = rates[0] if rates else min(max(DEFAULT_RATE, lowest), highest)
    fields = {**given, "lowest": lowest, "highest": highest, "start": start}
    return msgspec.convert(fields, SearchBounds)


async def search(
    options: BenchOptions,
    api_keys: Sequence[str | None],
    begins: Callable[[], None],
    probed: Callable[[GoodputSearch], None],
) -> GoodputSearch:
    """Search the rate of each server. `probed` is called after every probe. Raises ConfigError, Unreachable."""
    bounds = options.search or SearchBounds()
    if "max_tokens" in extra_fields(options.extra_body):
        raise ConfigError("--extra-body", "contains max_tokens: a search has to know it; use --output")
    shape = SearchShape(options.seconds, options.shape)
    async with open_measurement(options, api_keys) as measurement:
        found = GoodputSearch(measurement, bounds, shape)
        found.check()
        begins()
        with progress(None) as answered:
            async for _ in found.run(answered):
                probed(found)
    return found


def search_report(options: BenchOptions, found: GoodputSearch) -> bytes:
    """Return the result and every probe as JSON."""
    trusted = not any(each.doubts for each in found.results)
    return json_report(options, trusted, {"results": found.results, "probes": found.probes})


def announce(options: BenchOptions, out: Console) -> None:
    """Print what is searched for, and how long that may take."""
    bounds = options.search or SearchBounds()
    limits, servers, seeds = options.limits, len(options.urls), len(options.seeds)
    minutes = bounds.probes * servers * seeds * options.seconds / 60
    print_line(
        out,
        f"Searching for the highest rate at which {100 * bounds.share:g} % of requests have their first token within "
        f"{1e3 * limits.first:g} ms and every gap within {1e3 * limits.gap:g} ms. At most {bounds.probes} probes of "
        f"{seeds} x {options.seconds:g} s on each server: up to {minutes:.3g} min, plus last answers.",
    )


def probe_line(probe: Probe, seeds: int) -> str:
    """Return a probe as text. `seeds`: of a whole probe."""
    shares, summary = probe.share_by_seed.values(), probe.measured.summary
    spread = f"by seed {percent(min(shares))} to {percent(max(shares))}" if len(shares) > 1 else "one seed"
    verdict = f"{probe.rate:g}/s: {'kept' if probe.kept else 'MISSED'}, {percent(probe.share)} %"
    # Other requests have no times, which may make the percentiles look good.
    answered = summary.requests - summary.failed
    of = "" if answered == probe.planned else f"of the {answered} answered: "
    parts = [
        f"probe {probe.number}, {probe.target}, {verdict} of {probe.planned} requests within both limits ({spread})",
        f"{of}first token p99 {_ms(summary.ttft_ms_p99)}",
        f"gap p99 {_ms(summary.gap_ms_p99)}, longest {_ms(summary.gap_ms_max)}",
    ]
    if probe.failed:
        parts.append(f"{probe.failed} failed")
    if probe.outstanding:
        parts.append(f"{probe.outstanding} unanswered")
    if probe.ended_early:
        left = f", {probe.seeds_left_out} of {seeds} seeds left out" if probe.seeds_left_out else ""
        parts.append(f"ended early: {probe.unsent} not sent{left}")
    return "; ".join(parts)


def show_probe(probe: Probe, seeds: int, out: Console) -> None:
    """Print a probe and its errors. `seeds`: of a whole probe."""
    print_line(out, probe_line(probe, seeds))
    for error in [each for each in probe.measured.errors if each != CUT_OFF][:MAX_ERRORS]:
        print_line(out, f"    {error}")


def show_results(found: GoodputSearch, out: Console) -> int:
    """Print the result for each server, and return the exit code."""
    for each in found.results:
        print_line(out, f"{each.target}: {each.sentence}")
        for doubt in each.doubts:
            print_line(out, f"NOT TO BE TRUSTED: {each.target}: {doubt}")
    if any(each.doubts for each in found.results):
        return EXIT_NOT_TRUSTED
    return EXIT_FAILED if any(each.rate is None for each in found.results) else 0


def _ms(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.4g} ms"
