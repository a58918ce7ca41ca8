"""Searches for the highest rate at which a share of requests keeps both limits, on one or two servers.

Each probe is an open loop with the same seeds: a seed's arrivals at twice the rate are the same ones in half the time.
Servers are probed in turns, seed by seed, each at its own rate. A run whose server does not keep up is ended early:
see `SearchShape.early_stop`. A rate counts as kept if all seeds together keep the share.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field

from common.errors import ConfigError
from deploy.load_generator.loads import Load, open_load
from deploy.load_generator.measurement import MeasuredLoad, Measurement, Target, turns
from deploy.load_generator.plan import PromptShape, closed_plan
from deploy.load_generator.rate_search import Outcome, RateSearch, SearchBounds
from deploy.load_generator.runs import CUT_OFF, Answered, EarlyStop, Run, no_progress
from deploy.load_generator.summary import Limits

# Seconds in which answers are awaited that have missed their limits already, for the percentiles.
LATE_ANSWER_SECONDS = 5.0
RECOVERY_SECONDS = 60.0
RETRY_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class SearchShape:
    """The lengths of a search's runs and requests."""

    seconds: float  # arrivals of one seed
    prompts: PromptShape

    def early_stop(self, rate: float, planned: int, share: float, limits: Limits) -> EarlyStop:
        """Return when a run of a probe with `planned` requests in all its seeds is ended.

        A server does not keep up if more requests are overdue than may miss their limits in the whole probe, and more
        than would run at a time if each of them took as long as the limits allow.
        """
        longest = limits.first + limits.gap * (self.prompts.output - 1)
        most = max(most_missed(planned, share), math.ceil(rate * longest))
        return EarlyStop(longest, most, longest + LATE_ANSWER_SECONDS)


@dataclass(frozen=True, slots=True)
class Probe:
    """One rate on one server. Requests that were not sent, or not answered, count as requests that missed."""

    target: str
    number: int  # from 1; probes of two servers with the same number have the same prompts
    rate: float
    kept: bool
    share: float  # of `planned`
    share_by_seed: Mapping[int, float]
    planned: int  # requests of the seeds that were begun
    good: int  # requests within both limits
    failed: int  # refused or broken by the server
    outstanding: int  # cut off, because they were unanswered when a run was ended
    unsent: int
    seeds_left_out: int  # because the server did not keep up with one before
    measured: MeasuredLoad  # percentiles are of answered requests only

    @property
    def ended_early(self) -> bool:
        """True if it was ended early."""
        return bool(self.unsent or self.seeds_left_out)


@dataclass(frozen=True, slots=True)
class SearchResult:
    """The result for one server."""

    target: str
    rate: float | None  # the highest one that was kept, in requests per second
    missed_rate: float | None  # the lowest one that was missed
    outcome: Outcome | None  # None while the search goes on
    sentence: str
    doubts: Sequence[str]  # of the probes at these two rates


def most_missed(planned: int, share: float) -> int:
    """Return how many of the planned requests may miss a limit."""
    return math.floor(round((1 - share) * planned, 9))


@dataclass(slots=True)
class GoodputSearch:
    """Probes the servers of a measurement until the rate of each is known."""

    measurement: Measurement
    bounds: SearchBounds
    shape: SearchShape
    probes: list[Probe] = field(default_factory=list)
    searches: dict[str, RateSearch] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.searches = {target.label: RateSearch(self.bounds) for target in self.measurement.targets}

    @property
    def results(self) -> list[SearchResult]:
        """The results of a search that has ended, by server."""
        return [self._result(label, search) for label, search in self.searches.items()]

    async def run(self, answered: Answered = no_progress) -> AsyncIterator[Probe]:
        """Probe until every search has ended; yield the results of a probe for each server in turn."""
        await self._check_servers()
        number = 0
        while rates := self._next_rates():
            number += 1
            runs = await self._probe(number, rates, answered)
            for label, rate in rates.items():
                self.probes.append(probe := self._judge(number, label, rate, runs[label]))
                self._note(probe)
                yield probe

    def check(self) -> None:
        """Raise ConfigError if a seed has no request at the lowest rate."""
        plan = self._load(self.bounds.lowest).plan
        if empty := [seed for seed in self.measurement.seeds if not plan(seed)]:
            text = (
                f"{self.bounds.lowest:g}/s for {self.shape.seconds:g} s has no request with seed {empty[0]}"
            )
            raise ConfigError("--min-rate", f"{text}: raise it or --seconds")

    def _load(self, rate: float) -> Load:
        return open_load(rate, self.shape.seconds, self.shape.prompts)

    def _early_stop(self, rate: float) -> EarlyStop:
        plan = self._load(rate).plan
        planned = sum(len(plan(seed)) for seed in self.measurement.seeds)
        return self.shape.early_stop(rate, planned, self.bounds.share, self.measurement.limits)

    async def _check_servers(self) -> None:
        """End the search for a server that fails a single request: the rate is not why."""
        [request] = closed_plan(1, self.shape.prompts, 0)
        for target in self.measurement.targets:
            times = await self.measurement.send_one(target, request)
            if times.error:
                reason = f"a request before the first probe failed: {times.error}"
                self.searches[target.label].end(Outcome.FAILED, reason)

    def _next_rates(self) -> dict[str, float]:
        rates = {label: search.next_rate() for label, search in self.searches.items()}
        return {label: rate for label, rate in rates.items() if rate is not None}

    async def _probe(
        self, number: int, rates: Mapping[str, float], answered: Answered
    ) -> dict[str, dict[int, Run]]:
        """Run all seeds at the rate of each server; a server that does not keep up is left alone after that."""
        measurement = self.measurement
        runs: dict[str, dict[int, Run]] = {label: {} for label in rates}
        stopped: set[str] = set()
        targets = [target for target in measurement.targets if target.label in rates]
        loads = {label: self._load(rate) for label, rate in rates.items()}
        early_stops = {label: self._early_stop(rate) for label, rate in rates.items()}
        for target, seed in turns(targets, measurement.seeds):
            if target.label in stopped:
                continue
            load, early_stop = loads[target.label], early_stops[target.label]
            run = await measurement.run_seed(target, load, (number, seed), answered, early_stop)
            runs[target.label][seed] = run
            if run.unsent or run.outstanding > early_stop.max_overdue:
                stopped.add(target.label)
                await self._recover(target)
            elif _only_failures(run):
                stopped.add(target.label)
        return runs

    async def _recover(self, target: Target) -> None:
        """Wait until an overloaded server answers again, so that its queue disturbs no other run."""
        [request] = closed_plan(1, self.shape.prompts, 0)
        error = "no answer"
        try:
            async with asyncio.timeout(RECOVERY_SECONDS):
                while error := (await self.measurement.send_one(target, request)).error:
                    await asyncio.sleep(RETRY_SECONDS)
        except TimeoutError:
            reason = f"it answered no request within {RECOVERY_SECONDS:g} s after an overload ({error})"
            self.searches[target.label].end(Outcome.STUCK, reason)

    def _judge(self, number: int, label: str, rate: float, runs: Mapping[int, Run]) -> Probe:
        """Summarise the runs of one probe, by seed."""
        measurement, limits = self.measurement, self.measurement.limits
        good = {
            seed: sum(each.within(limits.first, limits.gap) for each in run.requests)
            for seed, run in sorted(runs.items())
        }
        planned = {seed: len(run.requests) + run.unsent for seed, run in runs.items()}
        total, all_good = sum(planned.values()), sum(good.values())
        left_out = len(measurement.seeds) - len(runs)
        enough = total - all_good <= most_missed(total, self.bounds.share)
        measured = measurement.measured(label, f"{rate:g}/s", dict(runs))
        outstanding = sum(run.outstanding for run in runs.values())
        return Probe(
            target=label,
            number=number,
            rate=rate,
            kept=enough and not left_out,
            share=all_good / max(total, 1),
            share_by_seed={seed: count / max(planned[seed], 1) for seed, count in good.items()},
            planned=total,
            good=all_good,
            failed=measured.summary.failed - outstanding,
            outstanding=outstanding,
            unsent=sum(run.unsent for run in runs.values()),
            seeds_left_out=left_out,
            measured=measured,
        )

    def _note(self, probe: Probe) -> None:
        search = self.searches[probe.target]
        search.note(probe.rate, probe.kept)
        if probe.failed and probe.failed == probe.measured.summary.requests and not search.ended:
            error = next(each for each in probe.measured.errors if each != CUT_OFF)
            search.end(Outcome.FAILED, f"every request failed at {probe.rate:g}/s: {error}")

    def _result(self, label: str, search: RateSearch) -> SearchResult:
        decisive = [
            each
            for each in self.probes
            if each.target == label and each.rate in (search.kept, search.missed) and each.measured.doubts
        ]
        return SearchResult(
            target=label,
            rate=search.kept,
            missed_rate=search.missed,
            outcome=search.outcome,
            sentence=search.sentence,
            doubts=[f"at {each.rate:g}/s {doubt}" for each in decisive for doubt in each.measured.doubts],
        )


def _only_failures(run: Run) -> bool:
    return bool(run.requests) and all(each.error and each.error != CUT_OFF for each in run.requests)
