"""How many Python functions the router calls for an ordinary request: a count that other work does not change.

Most of the CPU time of a request is spent in the interpreter, so the calls hold the cost (tests/bench/NOTES.md).
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
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
from common.messages.router_inbox import FirstToken, PrefillDone
from common.observability.logs import Log, configure
from router.app import RouterApp
from router.build import build
from tests.fakes.fake_node import FakeNode
from tests.fakes.waiting import PATIENCE
from tests.unit.router.conftest import TINY
from tests.unit.router.test_app import node_of

WARM, COUNTED = 20, 20
COMPLETION = {"prompt": [*range(300, 364)], "max_tokens": 1, "temperature": 0}
MOST_CALLS = 450  # of a completion of one token
MOST_STREAM_CALLS = 470  # of the same as a stream


class Profile:
    """Counts the calls of Python functions in the thread that enters it. Awaiting again counts as a call, too."""

    def __init__(self) -> None:
        self.requests: list[Counter[str]] = []  # the calls of each request
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


def calls_of_a_request(directory: Path, body: dict[str, Any]) -> Counter[str]:
    """Return the calls of each function for one request on a connection that stays open.

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
            await asyncio.to_thread(asyncio.run, _drive(app, body, profile))
        finally:
            sys.setprofile(None)
            await asyncio.wait_for(app.drain(), PATIENCE)

    # In a thread: the profile of the test's own thread may belong to a tool that measures coverage.
    with ThreadPoolExecutor(1) as outside, logging_to_stderr():
        outside.submit(uvloop.run, router()).result(PATIENCE)
    return min(profile.requests, key=Counter.total)


async def _drive(app: RouterApp, body: dict[str, Any], profile: Profile) -> None:
    context = zmq.Context[zmq.Socket[bytes]]()
    prefill, decode = node_of(context, app, "p0"), node_of(context, app, "d0")
    for node in (prefill, decode):
        assert isinstance(await node.register(), Registered)
    host, port = app.http.public.addresses[0][:2]
    reader, writer = await asyncio.open_connection(host, port)
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    try:
        for number in range(WARM + COUNTED):
            if number >= WARM:
                profile.requests.append(Counter())
                profile.counting = True
            writer.write(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
            await _serve(prefill)
            if "stream" in body:
                await asyncio.wait_for(reader.readuntil(b"\r\n0\r\n\r\n"), PATIENCE)
                continue
            answer = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), PATIENCE)
            assert answer.startswith(b"HTTP/1.1 200 ")
            length = int(answer.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
            await reader.readexactly(length)
    finally:
        profile.counting = False
        writer.close()
        prefill.close()
        decode.close()
        context.term()


async def _serve(prefill: FakeNode) -> None:
    """Answer one request with one token."""
    room = (await prefill.expect(Prefill)).room
    prefill.say(
        FirstToken(room=room, token=OutputToken(300), finish_reason="length", cached_tokens=0),
        PrefillDone(room=room, stages={"computed": 0.001}),
    )


@pytest.mark.parametrize(
    ("body", "bound"), [(COMPLETION, MOST_CALLS), ({**COMPLETION, "stream": True}, MOST_STREAM_CALLS)]
)
def test_the_calls_of_an_ordinary_request_are_bounded(
    tmp_path: Path, body: dict[str, Any], bound: int
) -> None:
    calls = calls_of_a_request(tmp_path, body)
    most = "\n".join(f"{count:4} {name}" for name, count in calls.most_common())
    assert calls.total() <= bound, f"{calls.total()} calls of a request:\n{most}"
