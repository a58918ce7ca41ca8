"""Requests that are interrupted before any callback of the event loop: nothing of them is left anywhere.

One run of a request has some 40 to 120 callbacks, among which are all points at which a task of the router waits. By
default, each test interrupts it before some of them; with TANDEM_EXPLORE=1 before every one.
"""

from __future__ import annotations

import asyncio
import base64
import gc
import io
import os
import zlib
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from router.http.request_body import memory_key
from tests.fakes.child_stand_ins import FetchStandIn, TextStandIn
from tests.fakes.stepped_router import MemoryClient, SteppedRouter

STRIDE = 1 if "TANDEM_EXPLORE" in os.environ else 7  # callbacks from one interruption to the next
MODEL = {"model": "tiny"}
CHAT = {**MODEL, "messages": [{"role": "user", "content": "hi"}]}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
CHATS, TEXTS = "/v1/chat/completions", "/v1/completions"
REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": (CHATS, CHAT),
    "stream": (CHATS, {**CHAT, "stream": True}),
    "streams": (CHATS, {**CHAT, "stream": True, "n": 2}),
    "stop string": (CHATS, {**CHAT, "stop": ["nn"], "n": 2}),
    "grammar": (CHATS, {**CHAT, "response_format": {"type": "json_object", "schema": SCHEMA}}),
    "large body": (CHATS, {**CHAT, "user": "x" * 100_000}),
    "prompts": (TEXTS, {**MODEL, "prompt": ["a", "b"], "n": 2, "stream": True}),
    "responses": ("/v1/responses", {**MODEL, "input": "hi", "stream": True}),
    "messages": ("/v1/messages", {**CHAT, "max_tokens": 5, "stream": True}),
    "generate": ("/generate", {"text": ["a", "b"], "sampling_params": {"max_new_tokens": 5, "n": 2}}),
    "tokens": ("/inference/v1/generate", {"token_ids": [5, 6, 7], "sampling_params": {"max_tokens": 5}}),
    "tokenize": ("/tokenize", {**MODEL, "prompt": "hi"}),
}


def end_children(router: SteppedRouter) -> None:
    for child in router.spawner.children:
        child.end(-9)


def leave_soon(router: SteppedRouter, client: MemoryClient) -> None:
    router.loop.call_soon(client.leave)


Event = Callable[[SteppedRouter, MemoryClient], object]
Ask = Callable[[SteppedRouter], list[MemoryClient]]
# What a client, node or child process does to a request, and the seconds after which nothing of it is left.
EVENTS: dict[str, tuple[Event, float]] = {
    "leaves": (lambda router, client: client.leave(), 0.5),
    "leaves slowly": (lambda router, client: (client.slow_down(), client.leave()), 0.5),
    "reads slowly": (lambda router, client: client.slow_down(), 0.5),
    "aborts": (lambda router, client: router.core.dispatcher.running.abort_all(), 0.5),
    "loses its decode node": (lambda router, client: router.lose("decode"), 3.5),
    "loses its prefill node": (lambda router, client: router.lose("prefill"), 3.5),
    "loses its decode node, and leaves": (
        lambda router, client: (router.lose("decode"), leave_soon(router, client)),
        3.5,
    ),
    "loses its text worker": (lambda router, client: end_children(router), 1.0),
}
CASES = [(request, "leaves") for request in REQUESTS]
CASES += [(request, event) for event in EVENTS for request in ("stream", "streams") if event != "leaves"]


def png() -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (32, 32)).save(file, "PNG")
    return file.getvalue()


def held(router: SteppedRouter) -> dict[str, object]:
    """Return all that requests may hold."""
    app, dispatcher = router.app, router.core.dispatcher
    admission, memory = dispatcher.admission, app.http.public.app[memory_key]
    return {
        "requests": (app.active, dispatcher.active, len(dispatcher.running)),
        "admitted": (admission.waiting, admission.tokens, admission.requests, admission.clients),
        "bodies": (memory.reserved, memory.small),
        "images": getattr(app.children.images, "held_bytes", 0),
        "connections": len(app.http.plan.limit),
        "rooms": [(len(node.rooms), node.rooms.tokens, node.rooms.ms) for node in router.core.registry],
        "jobs": [list(node.jobs) for node in router.nodes],
        "tasks": len(asyncio.all_tasks(router.loop)),
        "timers": len(router.loop.timers()),
        "text workers": sum(isinstance(child, TextStandIn) for child in router.spawner.children),
        "broken": list(router.broken),
        "problems": list(router.loop.problems),
    }


def settled(router: SteppedRouter, seconds: float = 0.5) -> dict[str, object]:
    """Return what is held once nodes have read everything and some time has passed."""
    router.start_missing()
    router.work()
    router.pass_time(seconds)
    router.work()
    return held(router)


def ask_one(path: str, body: object, router: SteppedRouter) -> list[MemoryClient]:
    """Ask once."""
    client = router.connect()
    client.post(path, body, pieces=3)
    return [client]


def finish(router: SteppedRouter, clients: Sequence[MemoryClient]) -> None:
    """Let the answers end, and the clients disconnect."""
    router.wait(lambda: all(client.over for client in clients))
    for client in clients:
        router.loop.run_now(client.leave)


def check_interruptions(router: SteppedRouter, ask: Ask, event: Event, seconds: float, offset: int) -> None:
    """Let `event` happen to a request at many steps, each time followed by an undisturbed one.

    `ask` returns the client of the request first, then others that ask at the same time.
    """
    finish(router, ask(router))
    idle = settled(router, seconds)
    step, happened = offset, True
    while happened:
        clients = ask(router)
        router.counted.after(router.counted.steps + step, partial(event, router, clients[0]))
        finish(router, clients)
        happened = router.counted.forget()
        assert settled(router, seconds) == idle, f"after step {step}"
        clients = ask(router)
        finish(router, clients)
        assert [client.status for client in clients] == [200] * len(clients), f"after step {step}"
        assert settled(router, seconds) == idle, f"after step {step}"
        step += STRIDE
    assert step > offset + STRIDE, "no interruption"
    router.close()
    gc.collect()
    assert not router.loop.problems


@pytest.mark.parametrize(("request_", "event"), CASES)
def test_nothing_is_left_of_a_request(request_: str, event: str, tmp_path: Path) -> None:
    path, body = REQUESTS[request_]
    offset = zlib.crc32(f"{request_} {event}".encode()) % STRIDE
    router = SteppedRouter(tmp_path, router="max_crashes: 0")
    check_interruptions(router, partial(ask_one, path, body), *EVENTS[event], offset)


@pytest.mark.parametrize("event", ["leaves", "aborts"])
def test_nothing_is_left_of_images(event: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One image arrives with the request, and one is fetched."""
    monkeypatch.setattr(FetchStandIn, "file", png())
    given = "data:image/png;base64," + base64.b64encode(png()).decode()
    parts = [
        {"type": "image_url", "image_url": {"url": url}} for url in (given, "https://images.example/a.png")
    ]
    body = {**MODEL, "messages": [{"role": "user", "content": parts}]}
    router = SteppedRouter(tmp_path, "tiny-vision", router="images: {fetch_hosts: [images.example]}")
    check_interruptions(router, partial(ask_one, CHATS, body), *EVENTS[event], 3 % STRIDE)


def test_nothing_is_left_of_requests_that_wait_for_each_other(tmp_path: Path) -> None:
    """Each node runs two requests at a time: others wait for room, and one of those leaves, too."""

    def ask(router: SteppedRouter) -> list[MemoryClient]:
        clients[:] = [router.connect() for _ in range(6)]
        for each in reversed(clients):
            each.post(CHATS, {**CHAT, "stream": True})
        return clients

    def leave(router: SteppedRouter, client: MemoryClient) -> None:
        for each in (client, clients[3]):
            each.leave()

    clients: list[MemoryClient] = []
    router = SteppedRouter(tmp_path, decode="max_running: 1, max_transferring: 1")
    check_interruptions(router, ask, leave, 0.5, 3 % STRIDE)


@pytest.mark.parametrize("works", [True, False])
@pytest.mark.parametrize("request_", ["chat", "streams"])
def test_a_router_drains_at_any_step_of_a_request(request_: str, works: bool, tmp_path: Path) -> None:
    """`works`: the nodes do so, too; otherwise the router ends the requests after health.drain_timeout."""
    path, body = REQUESTS[request_]
    begin_at = step = 2 % STRIDE
    happened, problems = True, list[list[dict[str, Any]]]()
    while happened:
        directory = tmp_path / str(step)
        directory.mkdir()
        router = SteppedRouter(directory)
        drains: list[asyncio.Task[None]] = []
        begin = partial(begin_drain, router, drains)
        clients = ask_one(path, body, router) + ask_one(path, body, router)
        router.counted.after(router.counted.steps + step, begin)
        for _ in range(250):
            if works:
                router.work()
            router.loop.run_for(0.05)
        happened = router.counted.forget()
        if happened:
            assert [task.result() for task in drains] == [None]
            assert {client.status for client in clients} <= {200, 503}
            assert all(client.over for client in clients)
            router.loop.run_for(10.0)
            assert not asyncio.all_tasks(router.loop)
            assert not router.loop.timers()
            assert not router.spawner.children
            assert not router.broken
        router.close()
        problems.append(router.loop.problems)
        step += 2 * STRIDE if STRIDE > 1 else 1
    gc.collect()
    assert not any(problems)
    assert step > begin_at + 3 * STRIDE, "no interruption"


def begin_drain(router: SteppedRouter, drains: list[asyncio.Task[None]]) -> None:
    drains.append(router.loop.create_task(router.app.drain()))
