"""Clients with known answers: records each request event by event, with times."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import aiohttp

from tests.chaos.cases import Case, said
from tests.chaos.ending import end_tasks
from tests.cluster.harness import Client

Behaviour = Literal["stays", "leaves", "slow"]
BATCH_TOKENS = 200  # cases with longer answers are not part of batches
BURST_TOKENS = 12  # per answer in a burst
BURST_OPEN = 12  # open requests of a burst; more would measure the machine
GIVE_UP = 90.0  # default: after this many silent seconds the client leaves, and the checker calls it a hang


@dataclass
class Exchange:
    """One request as its client saw it. Times are monotonic seconds of this machine."""

    request_id: str
    case: str
    streamed: bool
    behaviour: Behaviour
    sent: float
    limit: int = 0  # max_tokens, if less than the known answer is requested
    leaves_after: float = 0.0  # tokens, or seconds if not streamed
    status: int = 0  # 0: no response
    progress: list[float] = field(default_factory=list)  # times at which something arrived
    tokens: list[str] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    finishes: int = 0  # number of events with a finish_reason
    done: bool = False  # [DONE], or a complete body
    after_done: int = 0  # number of events after [DONE]
    error_code: str | None = None  # if it ended with an explicit error
    error: str = ""
    broken: str = ""  # why the connection ended without a terminal event
    left: bool = False
    ended: float = 0.0

    def record(self) -> dict[str, Any]:
        return asdict(self)


class Load:
    """Runs `clients` in a closed loop until `stop`."""

    def __init__(
        self, url: str, cases: Sequence[Case], clients: int, seed: int, give_up: float = GIVE_UP
    ) -> None:
        self.exchanges: list[Exchange] = []
        self.open: dict[str, Exchange] = {}
        self.observe: Callable[[Exchange], None] = lambda exchange: None  # called at each progress
        self._give_up = give_up
        self._url = url
        self._cases = cases
        self._seed = seed
        self._clients = clients
        self._timeouts: dict[str, asyncio.Timeout] = {}
        self._rng = random.Random(f"{seed}/bursts")
        self._numbered = 0
        self._stopping = False
        self._tasks: list[asyncio.Task[None]] = []

    async def batch(self) -> tuple[float, float, int]:
        """Run all cases but the longest once, as a unit of comparable duration. Returns (since, until, tokens).

        A client takes the next case when it is done, so all are busy except at the very end.
        """
        since, first = time.monotonic(), len(self.exchanges)
        waiting = [case for case in self._cases if case.body["max_tokens"] <= BATCH_TOKENS]

        async def work(index: int) -> None:
            async with Client(self._url) as client:
                while waiting:
                    case = waiting.pop()
                    request_id = f"batch-{first}-{index}-{len(waiting)}"
                    await self.run(client, Exchange(request_id, case.name, True, "stays", 0.0))

        await asyncio.gather(*(work(index) for index in range(self._clients)))
        tokens = sum(len(each.tokens) for each in self.exchanges[first:])
        return since, time.monotonic(), tokens

    async def burst(self, seconds: float, interval: float) -> None:
        """Send a short request each `interval`, unless BURST_OPEN of them are open."""
        short = [case for case in self._cases if "stop" not in case.body]
        under_way: set[asyncio.Task[None]] = set()
        until = time.monotonic() + seconds
        async with Client(self._url) as client, asyncio.TaskGroup() as group:
            while time.monotonic() < until:
                if len(under_way) < BURST_OPEN:
                    self._numbered += 1
                    case = self._rng.choice(short)
                    limit = self._rng.randrange(1, min(case.body["max_tokens"], BURST_TOKENS) + 1)
                    exchange = Exchange(f"burst-{self._numbered}", case.name, True, "stays", 0.0, limit)
                    task = group.create_task(self.run(client, exchange))
                    under_way.add(task)
                    task.add_done_callback(under_way.discard)
                await asyncio.sleep(interval)

    async def long_answer(self) -> None:
        """Run the case with the longest answer to its end."""
        case = max(self._cases, key=lambda each: int(each.body["max_tokens"]))
        self._numbered += 1
        async with Client(self._url) as client:
            await self.run(client, Exchange(f"long-{self._numbered}", case.name, True, "stays", 0.0))

    def start(self) -> None:
        self._tasks = [asyncio.create_task(self._client(i)) for i in range(self._clients)]

    async def stop(self) -> None:
        """Let requests in flight end."""
        self._stopping = True
        await asyncio.gather(*self._tasks)

    async def abandon(self) -> None:
        """Abandon requests in flight, whose outcome remains unknown."""
        await end_tasks(self._tasks)
        self.exchanges = [each for each in self.exchanges if each.ended]

    async def _client(self, index: int) -> None:
        rng = random.Random(f"{self._seed}/{index}")
        number = 0
        async with Client(self._url) as client:
            while not self._stopping:
                number += 1
                exchange = self._draw(rng, f"chaos-{index}-{number}")
                await self.run(client, exchange)
                if exchange.status != 200:
                    await asyncio.sleep(0.2)  # like a client that obeys Retry-After, but sooner

    def _draw(self, rng: random.Random, request_id: str) -> Exchange:
        case = rng.choice(self._cases)
        streamed = rng.random() < 0.75
        behaviour: Behaviour = rng.choices(("stays", "leaves", "slow"), (86, 10, 4))[0]
        leaves_after = 0.0
        if behaviour == "leaves":
            leaves_after = rng.randrange(case.body["max_tokens"]) if streamed else rng.uniform(0.0, 0.5)
        # Vary the length: a prompt that never changes would be suspected of crashing its nodes.
        limit = 0 if "stop" in case.body else rng.randrange(1, case.body["max_tokens"] + 1)
        return Exchange(request_id, case.name, streamed, behaviour, 0.0, limit, leaves_after)

    async def run(self, client: Client, exchange: Exchange) -> None:
        """Run one request; never raises for what a server can do."""
        case = next(case for case in self._cases if case.name == exchange.case)
        exchange.sent = time.monotonic()
        self.exchanges.append(exchange)
        self.open[exchange.request_id] = exchange
        try:
            body = {**case.body, "stream": exchange.streamed}
            body["max_tokens"] = exchange.limit or body["max_tokens"]
            headers = {"X-Request-Id": exchange.request_id}
            async with asyncio.timeout(self._patience(exchange)) as timeout:
                self._timeouts[exchange.request_id] = timeout
                async with client.session.post(f"/v1/{case.path}", json=body, headers=headers) as response:
                    exchange.status = response.status
                    if response.status != 200:
                        self._refused(exchange, await response.text())
                    elif exchange.streamed:
                        await self._stream(exchange, response)
                    else:
                        self._complete(exchange, await response.json())
        except TimeoutError:
            exchange.left = exchange.behaviour == "leaves"
            exchange.broken = "" if exchange.left else f"nothing for {self._give_up:g} s"
        except (aiohttp.ClientError, OSError, json.JSONDecodeError) as error:
            exchange.broken = repr(error)
        exchange.ended = time.monotonic()
        del self.open[exchange.request_id]
        self._timeouts.pop(exchange.request_id, None)
        self.observe(exchange)

    def _patience(self, exchange: Exchange) -> float:
        """Return the seconds until the client leaves: of silence, or in total if it only sees the complete answer."""
        if exchange.streamed:
            return self._give_up
        return exchange.leaves_after if exchange.behaviour == "leaves" else 2 * self._give_up

    def _progress(self, exchange: Exchange) -> None:
        exchange.progress.append(time.monotonic())
        if exchange.streamed and exchange.request_id in self._timeouts:
            self._timeouts[exchange.request_id].reschedule(asyncio.get_running_loop().time() + self._give_up)
        self.observe(exchange)

    def _refused(self, exchange: Exchange, text: str) -> None:
        self._progress(exchange)
        try:
            exchange.error_code = str(json.loads(text)["error"]["code"])
            exchange.error = text[:300]
        except (ValueError, KeyError, TypeError):
            exchange.broken = f"{exchange.status} with a body that is no OpenAI error: {text[:200]}"

    def _complete(self, exchange: Exchange, answer: dict[str, Any]) -> None:
        self._take(exchange, answer["choices"][0])
        exchange.done = True
        self._progress(exchange)

    async def _stream(self, exchange: Exchange, response: aiohttp.ClientResponse) -> None:
        async for line in response.content:
            if not line.startswith(b"data: "):
                continue
            if exchange.done:
                exchange.after_done += 1
            if line.strip() == b"data: [DONE]":
                exchange.done = True
                self._progress(exchange)
                continue
            event = json.loads(line[6:])
            if "error" in event:
                exchange.error_code, exchange.error = str(event["error"]["code"]), str(event["error"])[:300]
            else:
                for choice in event["choices"]:
                    self._take(exchange, choice)
            self._progress(exchange)
            if exchange.behaviour == "leaves" and len(exchange.tokens) >= exchange.leaves_after:
                exchange.left = True
                response.close()
                return
            if exchange.behaviour == "slow":
                await asyncio.sleep(0.03)
        if not exchange.done and exchange.error_code is None:
            exchange.broken = "the stream ended without [DONE] or an error"

    def _take(self, exchange: Exchange, choice: dict[str, Any]) -> None:
        text, tokens, logprobs = said(choice)
        exchange.text += text
        exchange.tokens += tokens
        exchange.logprobs += logprobs
        if choice["finish_reason"] is not None:
            exchange.finish_reason = choice["finish_reason"]
            exchange.finishes += 1
