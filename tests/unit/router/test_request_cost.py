"""How many Python functions the router calls for a request and for a step of a stream: other work does not change it.

Most of the CPU time of both is spent in the interpreter, so the calls hold the cost (tests/bench/NOTES.md).
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import uvloop
import zmq

from common.config import load_cluster
from common.config.router_processes import RouterProcess
from common.messages.generation import OutputToken
from common.messages.node_inbox import Registered
from common.messages.prefill_inbox import Prefill
from common.messages.router_inbox import FinishReason, FirstToken, PrefillDone, TokenRun, Tokens
from common.observability.logs import Log, configure
from router.app import RouterApp
from router.build import build
from tests.fakes.fake_node import FakeNode
from tests.fakes.waiting import PATIENCE
from tests.unit.router.conftest import TINY
from tests.unit.router.test_app import node_of

WARM, COUNTED = 20, 20
QUIET = 0.005  # seconds after which everything that a request or step has caused is over
COMPLETION = {"prompt": [*range(300, 364)], "max_tokens": 1, "temperature": 0}
STREAM = {**COMPLETION, "stream": True}
# Some more than were counted: 454, 459 and 27. On a slow machine periodic work may fall into each of them.
MAX_CALLS = 456  # of a completion of one token
MAX_STREAM_CALLS = 462  # of the same as a stream
MAX_STEP_CALLS = 29  # of a step that brings the only stream one token


class Profile:
    """Counts the calls of Python functions in the thread that enters it. Awaiting again counts as a call, too."""

    def __init__(self) -> None:
        self.requests: list[Counter[str]] = []  # the calls of each request or step
        self.counting = False

    @contextmanager
    def one(self, number: int) -> Iterator[None]:
        """Count the calls of a request or step, unless it warms the router up."""
        if number >= WARM:
            self.requests.append(Counter())
            self.counting = True
        yield
        self.counting = False

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        if self.counting and event == "call":
            code = frame.f_code
            self.requests[-1][f"{code.co_filename}:{code.co_firstlineno} {code.co_qualname}"] += 1


@contextmanager
def logging_to_stderr() -> Iterator[None]:
    """Log as a router process does: the handlers of pytest cost more."""
    root, own = logging.getLogger(), logging.getLogger("tandem")
    handlers, levels = list(root.handlers), (root.level, own.level)
    flags = logging.logThreads, logging.logProcesses, logging.logMultiprocessing
    configure("router", "info")
    try:
        yield
    finally:
        root.handlers[:] = handlers
        root.setLevel(levels[0])
        own.setLevel(levels[1])
        logging.logThreads, logging.logProcesses, logging.logMultiprocessing = flags


@dataclass
class Client:
    """A connection to the router that stays open, and the nodes behind it."""

    prefill: FakeNode
    decode: FakeNode
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    host: str

    def send(self, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {self.host}\r\nContent-Type: application/json\r\n"
        self.writer.write(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)

    async def transferred(self, room: int) -> None:
        """Report the end of a prompt after its first token, as prefill nodes do, and let the router finish."""
        self.prefill.say(PrefillDone(room=room, stages={"computed": 0.001}))
        await asyncio.sleep(QUIET)

    async def until(self, end: bytes) -> bytes:
        return await asyncio.wait_for(self.reader.readuntil(end), PATIENCE)


# Sends requests, and begins a counter for each of them or for each step.
Drive = Callable[[Client, Profile], Awaitable[None]]


def least_calls(directory: Path, drive: Drive) -> Counter[str]:
    """Return the calls of each function for one request or step.

    It is the cheapest of several: what the router does from time to time falls into some of them.
    """
    profile = Profile()

    async def router() -> None:
        cluster = directory / "cluster.yaml"
        cluster.write_text(
            f"""
model: {{path: "{TINY}"}}
router: {{port: 0, control_address: "ipc://{directory}/c"}}
health: {{node_timeout: 600, drain_timeout: 1.0}}
process: {{run_dir: "{directory}/r"}}
prefill: {{nodes: [{{name: p0}}]}}
decode: {{nodes: [{{name: d0}}]}}
"""
        )
        app = build(load_cluster(cluster, []), RouterProcess(0, ()), Log("test"))
        await app.start()
        sys.set_asyncgen_hooks(firstiter=None)  # as in router/__main__.py
        sys.setprofile(profile)
        try:
            await asyncio.to_thread(asyncio.run, _connected(app, drive, profile))
        finally:
            sys.setprofile(None)
            await asyncio.wait_for(app.drain(), PATIENCE)

    # In a thread: the profile of the test's own thread may belong to a tool that measures coverage.
    with ThreadPoolExecutor(1) as outside, logging_to_stderr():
        outside.submit(uvloop.run, router()).result(PATIENCE)
    return min(profile.requests, key=Counter.total)


async def _connected(app: RouterApp, drive: Drive, profile: Profile) -> None:
    context = zmq.Context[zmq.Socket[bytes]]()
    prefill, decode = node_of(context, app, "p0"), node_of(context, app, "d0")
    for node in (prefill, decode):
        assert isinstance(await node.register(), Registered)
    host, port = app.http.public.addresses[0][:2]
    reader, writer = await asyncio.open_connection(host, port)
    try:
        await drive(Client(prefill, decode, reader, writer, host), profile)
    finally:
        profile.counting = False
        writer.close()
        prefill.close()
        decode.close()
        context.term()


async def _first_token(prefill: FakeNode, finish_reason: FinishReason | None) -> int:
    """Send the first token of the next request, and return its room."""
    room = (await prefill.expect(Prefill)).room
    token = OutputToken(300)
    prefill.say(FirstToken(room=room, token=token, finish_reason=finish_reason, cached_tokens=0))
    return room


async def completions(client: Client, profile: Profile) -> None:
    for number in range(WARM + COUNTED):
        with profile.one(number):
            client.send(COMPLETION)
            room = await _first_token(client.prefill, "length")
            answer = await client.until(b"\r\n\r\n")
            assert answer.startswith(b"HTTP/1.1 200 ")
            length = int(answer.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
            await client.reader.readexactly(length)
            await client.transferred(room)


async def streams(client: Client, profile: Profile) -> None:
    for number in range(WARM + COUNTED):
        with profile.one(number):
            client.send(STREAM)
            room = await _first_token(client.prefill, "length")
            await client.until(b"\r\n0\r\n\r\n")
            await client.transferred(room)


async def steps(client: Client, profile: Profile) -> None:
    client.send(STREAM | {"max_tokens": 2 * (WARM + COUNTED)})
    room = await _first_token(client.prefill, None)
    await client.until(b"\r\n\r\n")
    await client.until(b"\n\n")  # the event of the first token
    await client.transferred(room)
    for number in range(1, WARM + COUNTED):
        with profile.one(number):
            client.decode.say(Tokens(runs=[TokenRun(room, number, [OutputToken(300)])]))
            await client.until(b"\n\n")
            await asyncio.sleep(QUIET)


@pytest.mark.parametrize(
    ("drive", "bound"), [(completions, MAX_CALLS), (streams, MAX_STREAM_CALLS), (steps, MAX_STEP_CALLS)]
)
def test_the_calls_of_ordinary_requests_and_steps_are_bounded(
    tmp_path: Path, drive: Drive, bound: int
) -> None:
    calls = least_calls(tmp_path, drive)
    most = "\n".join(f"{count:4} {name}" for name, count in calls.most_common())
    assert 20 < calls.total() <= bound, f"{calls.total()} calls of {drive.__name__}:\n{most}"
