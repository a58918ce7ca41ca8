"""The search for the highest load within limits, on simulated servers whose clock is computed."""

from __future__ import annotations

import asyncio
import math
from bisect import bisect_left, bisect_right
from dataclasses import dataclass, field

import aiohttp
import pytest

from common.errors import ConfigError
from deploy.bench_search import probe_line
from deploy.load_generator import goodput_search
from deploy.load_generator.goodput_search import GoodputSearch, Probe, SearchShape, most_missed
from deploy.load_generator.loads import Load
from deploy.load_generator.measurement import Bodies, Measurement, Target
from deploy.load_generator.plan import PlannedRequest, PromptShape
from deploy.load_generator.rate_search import Outcome, SearchBounds
from deploy.load_generator.runs import CUT_OFF, Answered, EarlyStop, Run, no_progress
from deploy.load_generator.stream import RequestTimes
from deploy.load_generator.summary import Limits

LIMITS = Limits(first=0.2, gap=0.015)
SHAPE = SearchShape(60, PromptShape(100, 5))
SHORT = SearchShape(10, PromptShape(100, 5))
SEEDS = 1, 2, 3


@dataclass
class SimulatedServer:
    """One queue: a request is served for `service` seconds, in order, before its first token."""

    service: float = 0.01
    gap: float = 0.01
    fails_above: float = math.inf  # requests per second
    error: str = ""  # of requests that do not count
    hangs: bool = False  # after the first request that does not count
    runs: list[tuple[str, int, int]] = field(default_factory=list)  # load, number, seed
    warmed_up: int = 0

    def run(self, load: Load, number: int, seed: int, early_stop: EarlyStop) -> Run:
        plan = load.plan(seed)
        self.runs.append((load.label, number, seed))
        run, free = Run(seconds=plan[-1].due + early_stop.drain), 0.0
        fails = float(load.label.removesuffix("/s")) > self.fails_above
        dues, ends = [each.due for each in plan], list[float]()
        for due in dues:
            # Requests are served in order, so the unanswered ones are those after the last one that has ended.
            overdue = bisect_left(dues, due - early_stop.overdue) - bisect_right(ends, due)
            if overdue > early_stop.max_overdue:
                break
            free = max(free, due) + self.service
            ends.append(free)
        run.unsent = len(dues) - len(ends)
        last = dues[len(ends)] if run.unsent else dues[-1] + early_stop.drain
        for request, end in zip(plan, ends, strict=False):
            gaps = [self.gap] * (request.output - 1)
            times = RequestTimes(first=end - request.due, gaps=gaps, tokens=request.output)
            times.error = "status 503" if fails else CUT_OFF if end > last else ""
            run.outstanding += times.error == CUT_OFF
            run.requests.append(times)
        return run


class SimulatedMeasurement(Measurement):
    """Servers by label instead of connections."""

    servers: dict[str, SimulatedServer]

    async def run_seed(
        self,
        target: Target,
        load: Load,
        run: tuple[int, int],
        answered: Answered = no_progress,
        early_stop: EarlyStop | None = None,
    ) -> Run:
        assert early_stop is not None
        return self.servers[target.label].run(load, *run, early_stop)

    async def send_one(self, target: Target, request: PlannedRequest) -> RequestTimes:
        server = self.servers[target.label]
        server.warmed_up += 1
        if server.hangs and server.warmed_up > 1:
            await asyncio.sleep(3600)
        return RequestTimes(error=server.error)


async def searched(
    bounds: SearchBounds, shape: SearchShape = SHAPE, **servers: SimulatedServer
) -> tuple[GoodputSearch, list[Probe]]:
    async with aiohttp.ClientSession() as session:
        targets = [Target(label, "", "", session) for label in servers]
        measurement = SimulatedMeasurement(targets, [], SEEDS, Bodies(700, 1), LIMITS)
        measurement.servers = servers
        search = GoodputSearch(measurement, bounds, shape)
        return search, [probe async for probe in search.run()]


async def test_the_highest_rate_that_keeps_the_share_is_found() -> None:
    """Each probe has every seed, and its share is of all of them together."""
    server = SimulatedServer(service=0.05)
    search, probes = await searched(SearchBounds(start=2, resolution=0.1), a=server)
    [result] = search.results
    assert result.outcome is Outcome.FOUND
    assert result.rate is not None
    assert result.missed_rate is not None
    assert 8 <= result.rate < result.missed_rate <= 1.1 * result.rate
    for probe in probes:
        assert probe.kept is (probe.share >= 0.99)
        assert probe.kept is (probe.rate <= result.rate)
        assert set(probe.share_by_seed) == set(SEEDS)
        assert min(probe.share_by_seed.values()) <= probe.share <= max(probe.share_by_seed.values())
        assert abs(probe.planned - 180 * probe.rate) < 5 * math.sqrt(180 * probe.rate)
    assert [number for _, number, _ in server.runs] == [
        each for each in range(1, len(probes) + 1) for _ in SEEDS
    ]


async def test_one_late_gap_of_a_request_costs_it_its_goodput() -> None:
    search, _ = await searched(SearchBounds(), a=SimulatedServer(gap=0.0151))
    assert search.results[0].outcome is Outcome.BELOW


async def test_two_servers_are_probed_in_turns_each_at_its_own_rates() -> None:
    a, b = SimulatedServer(service=0.05), SimulatedServer(service=0.02)
    search, probes = await searched(SearchBounds(lowest=1, resolution=0.2), SHORT, a=a, b=b)
    alone, _ = await searched(SearchBounds(lowest=1, resolution=0.2), SHORT, a=SimulatedServer(service=0.05))
    rates = {each.target: each.rate for each in search.results}
    assert rates["a"] == alone.results[0].rate
    assert (rates["b"] or 0) > 2 * (rates["a"] or 0)
    first_round = [(each.target, each.number) for each in probes[:4]]
    assert first_round == [("a", 1), ("b", 1), ("a", 2), ("b", 2)]
    assert a.runs[:3] == b.runs[:3], "the same arrivals and prompts, as long as they have the same rate"


async def test_an_overloaded_probe_ends_early_and_does_not_count_as_kept() -> None:
    server = SimulatedServer(service=0.5)
    _, probes = await searched(SearchBounds(start=16, probes=1), a=server)
    [probe] = probes
    assert not probe.kept
    assert probe.ended_early
    assert (len(server.runs), probe.seeds_left_out) == (1, 2)
    assert probe.unsent > 0
    assert probe.outstanding > 16 * 0.26, "more than run at a time within the limits"
    assert probe.planned == probe.unsent + probe.measured.summary.requests
    assert probe.share == probe.good / probe.planned, "requests that were not sent have missed their limits"
    assert probe.failed == 0
    assert server.warmed_up == 2, "it has to answer again before anything else is measured"


async def test_a_low_share_does_not_end_a_probe_that_keeps_it() -> None:
    """Half of the requests may be late, so that many overdue ones say nothing yet."""
    early_stop = SHAPE.early_stop(16, 2880, 0.5, LIMITS)
    assert early_stop.max_overdue == 1440
    assert SHAPE.early_stop(16, 2880, 0.99, LIMITS).max_overdue == 28
    assert SHAPE.early_stop(400, 72000, 1.0, LIMITS).max_overdue == math.ceil(400 * 0.26)
    assert early_stop.overdue == pytest.approx(0.26)


@pytest.mark.parametrize(
    ("planned", "share", "most"), [(100, 0.99, 1), (99, 0.99, 0), (1000, 1, 0), (10, 0.7, 3)]
)
def test_the_requests_that_may_miss(planned: int, share: float, most: int) -> None:
    assert most_missed(planned, share) == most


async def test_a_server_that_fails_a_single_request_is_not_probed() -> None:
    search, probes = await searched(SearchBounds(), a=SimulatedServer(error="status 401"))
    assert probes == []
    assert search.results[0].outcome is Outcome.FAILED
    assert search.results[0].sentence == (
        "the search ended early: a request before the first probe failed: status 401. No rate was probed"
    )


async def test_a_server_that_fails_every_request_of_a_probe_ends_its_search() -> None:
    server = SimulatedServer(fails_above=4)
    search, probes = await searched(SearchBounds(), a=server)
    assert [(each.rate, each.kept, each.failed) for each in probes] == [
        (4, True, 0),
        (8, False, probes[1].planned),
    ]
    assert probes[1].seeds_left_out == 2
    [result] = search.results
    assert (result.rate, result.missed_rate, result.outcome) == (4, 8, Outcome.FAILED)
    assert "every request failed at 8/s: status 503" in result.sentence


async def test_a_server_that_does_not_recover_ends_its_search_and_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(goodput_search, "RECOVERY_SECONDS", 0.01)
    bounds = SearchBounds(start=16, probes=2)
    search, probes = await searched(
        bounds, SHORT, a=SimulatedServer(service=0.5, hangs=True), b=SimulatedServer()
    )
    assert [each.target for each in probes] == ["a", "b", "b"]
    assert search.results[0].outcome is Outcome.STUCK
    assert "answered no request within 0.01 s after an overload" in search.results[0].sentence


async def test_a_seed_without_requests_is_refused() -> None:
    async with aiohttp.ClientSession() as session:
        measurement = Measurement([Target("a", "", "", session)], [], SEEDS, Bodies(700, 1), LIMITS)
        with pytest.raises(ConfigError, match=r"--min-rate: 0.001/s for 60 s has no request with seed 1"):
            GoodputSearch(measurement, SearchBounds(lowest=0.001), SHAPE).check()
        GoodputSearch(measurement, SearchBounds(), SHAPE).check()


async def test_a_line_says_which_requests_its_times_are_of() -> None:
    """Requests that were cut off have no times, so the percentiles of an overloaded probe are too good."""
    once = SearchBounds(start=16, probes=1)
    _, [overloaded] = await searched(once, a=SimulatedServer(service=0.5))
    _, [kept] = await searched(once, a=SimulatedServer())
    sent, cut = overloaded.measured.summary.requests, overloaded.outstanding
    line = probe_line(overloaded, 3)
    assert f"; of the {sent - cut} answered: first token p99 " in line
    assert f"; {cut} unanswered; ended early: {overloaded.unsent} not sent, 2 of 3 seeds left out" in line
    assert "(one seed)" in line
    line = probe_line(kept, 3)
    assert line.startswith(f"probe 1, a, 16/s: kept, 100 % of {kept.planned} requests within both limits")
    assert "(by seed 100 to 100)" in line
    assert "; first token p99 " in line
