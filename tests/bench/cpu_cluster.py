"""First tokens and steps of clusters on this machine's CPU, beside the same computation without a cluster, in one run.

    deploy/up &
    python -m tests.bench.cpu_cluster http://127.0.0.1:8000 --input 16 128 512 --json FILE
    python -m tests.bench.cpu_cluster http://127.0.0.1:8000 http://127.0.0.1:8001 --cluster FILE.yaml

Each prompt of random tokens is computed by the engine in a process of its own (cluster_engine.py), then sent to each
cluster, one request at a time. So other load of the machine meets all of them alike, and several clusters (before and
after a change) can be compared. All take the same steps. Usually every event of a stream has the tokens of one step.

    first    time from sending the request to its first token, divided by the engine's forward
    step     time of the answer after its second event, divided by the engine's steps for the same tokens
    token    time per token after the first one, hand-over included, divided by the engine's

Medians over prompts, with their quartiles.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import random
import socket
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from tests.bench.cluster_engine import ClusterEngine, Times
from tests.bench.environment import describe

LOCAL = Path("deploy/clusters/local.yaml")
FIRST_BAR, TOKEN_BAR = 1.3, 1.5
EVENT = b"data: {"
WARM_UP = 2  # prompts of each length that are not counted

_engine: ClusterEngine | None = None  # in the engine's process


@dataclass(frozen=True, slots=True)
class Streamed:
    """One request through HTTP, in seconds."""

    first: float
    gaps: Sequence[float]
    tokens: Sequence[int]  # of each event, the first one included


@dataclass(slots=True)
class Samples:
    """All requests of one length on one cluster, and the engine's times for the same prompts."""

    streamed: list[Streamed] = field(default_factory=list)
    engine: list[Times] = field(default_factory=list)

    def row(self, url: str, length: int) -> Row:
        both = list(zip(self.streamed, self.engine, strict=True))
        return Row(
            url=url,
            prompt_tokens=length,
            requests=len(both),
            forward_ms=quartiles([1e3 * each.forward for each in self.engine]),
            step_ms=quartiles([1e3 * step for each in self.engine for step in each.steps]),
            first_ms=quartiles([1e3 * each.first for each in self.streamed]),
            gap_ms=quartiles([1e3 * gap for each in self.streamed for gap in each.gaps[1:]]),
            second_ms=quartiles([1e3 * each.gaps[0] for each in self.streamed]),
            first=quartiles([a.first / b.forward for a, b in both]),
            step=quartiles([sum(a.gaps[1:]) / b.seconds_after(a.tokens[1]) for a, b in both]),
            token=quartiles([sum(a.gaps) / sum(b.steps) for a, b in both]),
        )


@dataclass(frozen=True, slots=True)
class Row:
    """Medians with lower and upper quartile."""

    url: str
    prompt_tokens: int
    requests: int
    forward_ms: Quartiles
    step_ms: Quartiles
    first_ms: Quartiles
    gap_ms: Quartiles
    second_ms: Quartiles
    first: Quartiles
    step: Quartiles
    token: Quartiles


Quartiles = tuple[float, float, float]


def quartiles(values: Sequence[float]) -> Quartiles:
    """Return the lower quartile, the median and the upper quartile."""
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def start_engine(cluster: Path) -> None:
    """Build the engine of this process."""
    global _engine
    _engine = ClusterEngine(cluster)


def answer(prompt: list[int], output: int) -> Times:
    assert _engine is not None
    return _engine.answer(prompt, output)


class Client:
    """One connection that sends a request at a time and reads nothing but the times and ids of its tokens."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._host = f"{parts.hostname}:{parts.port or 80}"
        self._socket = socket.create_connection((parts.hostname or "", parts.port or 80), timeout=60)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def close(self) -> None:
        self._socket.close()

    def stream(self, prompt: list[int], output: int) -> Streamed:
        """Send one prompt. Raises RuntimeError for an answer that is not a stream of `output` tokens."""
        # With token ids also a step whose tokens do not complete a character has an event.
        fields = {"max_tokens": output, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
        body = json.dumps({"prompt": prompt, "stream": True, **fields})
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {self._host}\r\nContent-Type: application/json\r\n"
        message = f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode()
        began = time.perf_counter()
        self._socket.sendall(message)
        received = b""
        ends, times = [], []
        while not received.endswith(b"\r\n0\r\n\r\n"):
            part = self._socket.recv(1 << 16)
            received += part
            if EVENT in part:
                times.append(time.perf_counter())
                ends.append(len(received))
            elif not part or not received.startswith(b"HTTP/1.1 200 "):
                raise RuntimeError(received.decode())
        tokens = [_count(received[start:end]) for start, end in itertools.pairwise((0, *ends))]
        if sum(tokens) != output:
            raise RuntimeError(f"{sum(tokens)} of {output} tokens: {received.decode()}")
        return Streamed(times[0] - began, [b - a for a, b in itertools.pairwise(times)], tokens)


def _count(events: bytes) -> int:
    """Return the number of tokens in events."""
    lines = [json.loads(line[6:]) for line in events.splitlines() if line.startswith(EVENT)]
    return sum(len(choice["token_ids"]) for line in lines for choice in line["choices"])


def measure(
    urls: Sequence[str],
    engine: ProcessPoolExecutor,
    length: int,
    output: int,
    repeats: int,
    rng: random.Random,
) -> list[Row]:
    found = {url: Samples() for url in urls}
    clients = {url: Client(url) for url in urls}
    for index in range(WARM_UP + repeats):
        prompt = [rng.randrange(3, 700) for _ in range(length)]
        times = engine.submit(answer, prompt, output).result()
        # Each cluster comes first equally often.
        for url in (*urls[index % len(urls) :], *urls[: index % len(urls)]):
            streamed = clients[url].stream(prompt, output)
            if index >= WARM_UP:
                found[url].streamed.append(streamed)
                found[url].engine.append(times)
    for client in clients.values():
        client.close()
    return [samples.row(url, length) for url, samples in found.items()]


def show(row: Row) -> str:
    def text(values: Quartiles, digits: int = 1) -> str:
        low, middle, high = values
        return f"{middle:.{digits}f} ({low:.{digits}f}-{high:.{digits}f})"

    cells = [text(each) for each in (row.forward_ms, row.first_ms, row.step_ms, row.gap_ms, row.second_ms)]
    ratios = [text(each, 2) for each in (row.first, row.step, row.token)]
    return f"{row.prompt_tokens:>6} " + " ".join(f"{cell:>20}" for cell in (*cells, *ratios)) + f" {row.url}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("urls", nargs="+")
    parser.add_argument("--cluster", type=Path, default=LOCAL, help="the file that the clusters run")
    parser.add_argument("--input", type=int, nargs="+", default=[16, 128, 512], help="prompt tokens")
    parser.add_argument("--output", type=int, default=32, help="answer tokens")
    parser.add_argument("--repeats", type=int, default=12, help="prompts of each length")
    parser.add_argument("--seed", type=int, default=0, help="default: another one in each run")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"  # as deploy/env.sh
    # A cluster caches prefixes, so prompts that it has already served would measure the cache.
    rng = random.Random(options.seed or time.time_ns())
    rows: list[Row] = []
    columns = ("forward ms", "first ms", "step ms", "gap ms", "second gap ms", "first", "step", "token")
    print(f"{'tokens':>6} " + " ".join(f"{name:>20}" for name in columns))
    with ProcessPoolExecutor(
        1, multiprocessing.get_context("spawn"), start_engine, (options.cluster,)
    ) as engine:
        for length in options.input:
            for row in measure(options.urls, engine, length, options.output, options.repeats, rng):
                print(show(row), flush=True)
                rows.append(row)
    print(f"bars: first {FIRST_BAR}, token {TOKEN_BAR}")
    if options.json is not None:
        found = {"environment": describe(), "options": vars(options), "rows": [asdict(row) for row in rows]}
        options.json.write_text(json.dumps(found, indent=1, default=str) + "\n")


if __name__ == "__main__":
    main()
