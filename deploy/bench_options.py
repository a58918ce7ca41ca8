"""The options of deploy/bench, and the measurement that they describe."""

from __future__ import annotations

import contextlib
import os
import platform
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from common.errors import ConfigError
from deploy.load_generator.loads import Load, closed_load, open_load, trace_load
from deploy.load_generator.measurement import Bodies, Measurement, Target
from deploy.load_generator.plan import PromptShape, Replay
from deploy.load_generator.rate_search import SearchBounds
from deploy.load_generator.summary import Limits
from deploy.openai_client import (
    CONNECT_SECONDS,
    api_base,
    authorization,
    extra_fields,
    first_model,
    require_http,
)

DEFAULT_RATE = 4.0


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
    search: SearchBounds | None = None  # find the highest rate within the limits, instead of the loads

    @property
    def shape(self) -> PromptShape:
        """The lengths of synthetic prompts. Raises ConfigError."""
        return PromptShape(self.input, self.output, self.prefixes, self.prefix_tokens)

    @property
    def loads(self) -> list[Load]:
        """The loads to measure; none if rates are searched for. Raises ConfigError."""
        if len(set(map(api_base, self.urls))) < len(self.urls):
            raise ConfigError("--compare", "names the same server: its prefix cache would have the prompts")
        if self.search is not None:
            if self.concurrency or self.trace:
                raise ConfigError(
                    "--search", "finds a rate of Poisson arrivals: --concurrency and --trace are other loads"
                )
            return []
        if sum(map(bool, (self.rates, self.concurrency, self.trace))) > 1:
            raise ConfigError("", "--rate, --concurrency and --trace are different loads: use one of them")
        if self.trace is not None:
            return [trace_load(self.trace, self.replay)]
        if self.concurrency:
            return [closed_load(each, self.requests, self.shape) for each in self.concurrency]
        return [open_load(each, self.seconds, self.shape) for each in self.rates or [DEFAULT_RATE]]


def refuse_options_without_effect(problems: Mapping[str, bool]) -> None:
    """Raise ConfigError for the first problem that exists. A key is the option and what is wrong with it."""
    for problem, exists in problems.items():
        if exists:
            option, _, text = problem.partition(": ")
            raise ConfigError(option, text)


@contextlib.asynccontextmanager
async def open_measurement(
    options: BenchOptions, api_keys: Sequence[str | None]
) -> AsyncIterator[Measurement]:
    """Connect to the servers and warm them up. `api_keys`: of each server. Raises ConfigError, Unreachable."""
    for url in options.urls:
        require_http(url)
    loads, shape, extra = options.loads, options.shape, extra_fields(options.extra_body)
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
        yield measurement


def json_report(options: BenchOptions, trusted: bool, results: dict[str, Any]) -> bytes:
    """Return results as JSON. Values that do not exist, such as percentiles without answers, are null."""
    whole = {
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "client": {"python": platform.python_version(), "cores": os.cpu_count()},
        "options": options,
        "trusted": trusted,
        **results,
    }
    return msgspec.json.format(msgspec.json.encode(whole, enc_hook=str), indent=1) + b"\n"
