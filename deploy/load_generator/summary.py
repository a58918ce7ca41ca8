"""Percentiles, rates and goodput of a run, and the reasons not to trust them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from deploy.load_generator.runs import Run

CURVE_POINTS = 200


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a good request, and of the delays of this process, in seconds."""

    first: float = 0.200
    gap: float = 0.015  # of every gap
    lag: float = 0.005  # p99 of how late requests are sent, and of how late the event loop is


@dataclass(frozen=True, slots=True)
class Summary:
    """One run, or all runs of one load. Times count from the due time of each request; failed ones have none."""

    requests: int
    failed: int
    seconds: float
    ttft_ms_p50: float
    ttft_ms_p90: float
    ttft_ms_p99: float
    gap_ms_p50: float
    gap_ms_p90: float
    gap_ms_p99: float
    gap_ms_max: float
    second_ms_p50: float  # the first gap of a request: it includes the transfer of the prompt's KV
    second_ms_p99: float
    token_ms_p50: float  # time per token after the first, of each request
    token_ms_p99: float
    total_ms_p50: float
    total_ms_p99: float
    output_tokens_per_s: float
    requests_per_s: float  # answered
    goodput: float  # share of all requests, failed ones included, within the limits
    good_requests_per_s: float
    ttft_good: float  # share of all requests with a first token within its limit, whatever their gaps
    gaps_good: float  # share of all requests with every gap within the limit, however late their first token
    send_lag_ms_p99: float
    loop_lag_ms_p99: float
    loop_lag_ms_max: float  # the gaps of that moment are longer by as much


def percentile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that at least `share` of the values do not exceed; NaN without values."""
    if not values:
        return math.nan
    ordered = sorted(values)
    # Rounded, because 0.29 * 100 is 28.999999999999996 and 0.07 * 100 is 7.000000000000001.
    return ordered[max(math.ceil(round(share * len(ordered), 9)) - 1, 0)]


def percent(share: float) -> str:
    """Return a share in percent, rounded down: what missed 99 % never reads 99, and 100 means every request."""
    return f"{math.floor(round(1e4 * share, 6)) / 100:g}"


def curve(values: Sequence[float], points: int = CURVE_POINTS) -> list[float]:
    """Return quantiles at equal distances from the smallest to the largest value, for a plot."""
    ordered = sorted(values)
    if not ordered:
        return []
    return [ordered[round(index * (len(ordered) - 1) / (points - 1))] for index in range(points)]


def summarise(run: Run, limits: Limits) -> Summary:
    """Summarise a run."""
    answered = [each for each in run.requests if not each.error]
    firsts = [1e3 * each.first for each in answered]
    gaps = [1e3 * gap for each in answered for gap in each.gaps]
    seconds = [1e3 * each.gaps[0] for each in answered if each.gaps]
    per_token = [1e3 * each.per_token for each in answered if each.gaps]
    totals = [1e3 * each.total for each in answered]
    count = max(len(run.requests), 1)

    def good(first: float, gap: float) -> int:
        return sum(each.within(first, gap) for each in run.requests)

    within_both = good(limits.first, limits.gap)
    return Summary(
        requests=len(run.requests),
        failed=len(run.requests) - len(answered),
        seconds=run.seconds,
        ttft_ms_p50=percentile(firsts, 0.5),
        ttft_ms_p90=percentile(firsts, 0.9),
        ttft_ms_p99=percentile(firsts, 0.99),
        gap_ms_p50=percentile(gaps, 0.5),
        gap_ms_p90=percentile(gaps, 0.9),
        gap_ms_p99=percentile(gaps, 0.99),
        gap_ms_max=percentile(gaps, 1),
        second_ms_p50=percentile(seconds, 0.5),
        second_ms_p99=percentile(seconds, 0.99),
        token_ms_p50=percentile(per_token, 0.5),
        token_ms_p99=percentile(per_token, 0.99),
        total_ms_p50=percentile(totals, 0.5),
        total_ms_p99=percentile(totals, 0.99),
        output_tokens_per_s=sum(each.tokens for each in answered) / run.seconds,
        requests_per_s=len(answered) / run.seconds,
        goodput=within_both / count,
        good_requests_per_s=within_both / run.seconds,
        ttft_good=good(limits.first, math.inf) / count,
        gaps_good=good(math.inf, limits.gap) / count,
        send_lag_ms_p99=1e3 * percentile([each.lag for each in run.requests], 0.99),
        loop_lag_ms_p99=1e3 * percentile(run.loop_lags or [0.0], 0.99),
        loop_lag_ms_max=1e3 * max(run.loop_lags, default=0.0),
    )


def doubts(summary: Summary, limits: Limits) -> list[str]:
    """Return the reasons not to trust a summary, each as a sentence; none if this process kept up."""
    allowed = 1e3 * limits.lag
    found = []
    if summary.send_lag_ms_p99 > allowed:
        late = f"{summary.send_lag_ms_p99:.1f} ms after they were due"
        found.append(f"requests were sent up to {late} (p99; {allowed:g} ms allowed)")
    if summary.loop_lag_ms_p99 > allowed:
        late = f"{summary.loop_lag_ms_p99:.1f} ms late"
        found.append(f"the generator read events up to {late} (p99; {allowed:g} ms allowed)")
    return found
