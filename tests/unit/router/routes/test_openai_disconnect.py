"""Clients that disconnect or stop reading: the generator is closed at once, and others are unaffected."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from typing import Any

import pytest

from tests.fakes.waiting import PATIENCE, eventually
from tests.unit.router.conftest import Rig, Serve
from tests.unit.router.scripted_generator import delta, one_by_one


async def connect(
    rig: Rig, path: str, body: dict[str, Any]
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection(rig.host, rig.port)
    writer.write(request_bytes(path, body))
    await writer.drain()
    return reader, writer


def request_bytes(path: str, body: dict[str, Any]) -> bytes:
    raw = json.dumps(body).encode()
    return _head(path, raw) + raw


def _head(path: str, raw: bytes) -> bytes:
    lines = (
        f"POST {path} HTTP/1.1",
        "Host: x",
        "Content-Type: application/json",
        f"Content-Length: {len(raw)}",
    )
    return "\r\n".join((*lines, "", "")).encode()


async def leave(writer: asyncio.StreamWriter) -> None:
    writer.transport.abort()
    await asyncio.sleep(0)


async def running(rig: Rig, count: int) -> None:
    await eventually(lambda: rig.generator.active >= count)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", ["a", ["a", "b", "c"]])
async def test_client_leaves_before_the_first_byte(rig: Rig, stream: bool, prompt: Any) -> None:
    rig.generator.will(300.0)
    _, writer = await connect(rig, "/v1/completions", {"prompt": prompt, "stream": stream})
    count = 1 if prompt == "a" else 3
    await running(rig, count)
    await leave(writer)
    await rig.settled(count)


@pytest.mark.parametrize("prompt", ["a", ["a", "b", "c"]])
async def test_client_leaves_while_nothing_comes(rig: Rig, prompt: Any) -> None:
    rig.generator.will(delta([10]), 300.0)
    reader, writer = await connect(rig, "/v1/completions", {"prompt": prompt, "stream": True})
    await reader.readuntil(b"data: ")
    await leave(writer)
    await rig.settled(1 if prompt == "a" else 3)


async def test_client_leaves_while_tokens_come(rig: Rig) -> None:
    rig.generator.will(*[step for _ in range(2000) for step in (delta([10]), 0.002)])
    reader, writer = await connect(rig, "/v1/completions", {"prompt": "a", "stream": True})
    await reader.readuntil(b"data: ")
    await leave(writer)
    await rig.settled(1)


async def test_a_whole_answer_closes_nothing_early(rig: Rig) -> None:
    rig.generator.will(*one_by_one([10, 11]))
    await rig.raw("/v1/completions", {"prompt": "a", "stream": True})
    await rig.settled(0)
    await rig.post("/v1/completions", {"prompt": ["a", "b"]})
    assert rig.generator.closed == []


async def test_only_the_slow_reader_is_dropped(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    """One client never reads; its stream is cut after the timeout while another one gets every token.

    The log says so: to the client it looks like a fault of the server.
    """
    caplog.set_level(logging.INFO)
    rig = await serve(write_timeout=0.3, send_buffer=1 << 14)
    ids = rig.tokenizer.encode(" hello" * 20, add_special_tokens=False)
    flood = [step for _ in range(50_000) for step in (delta(ids), 0.0)]
    rig.generator.scripts = [
        flood,
        [step for _ in range(60) for step in (delta([10]), 0.01)] + one_by_one([10]),
    ]
    asleep = socket.socket()
    asleep.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    asleep.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(asleep, (rig.host, rig.port))
    await loop.sock_sendall(asleep, request_bytes("/v1/completions", {"prompt": "a", "stream": True}))
    await running(rig, 1)
    other = asyncio.create_task(rig.raw("/v1/completions", {"prompt": "b", "stream": True}))
    await eventually(lambda: rig.generator.closed)
    assert (await other).endswith(b"data: [DONE]\n\n")
    assert len(rig.generator.requests) == 2
    asleep.close()
    assert [each.getMessage() for each in caplog.records if "does not read" in each.getMessage()] == [
        "the connection to the client has ended: the client does not read"
    ]


async def test_a_reader_that_pauses_is_served(serve: Serve) -> None:
    rig = await serve(write_timeout=600.0)
    ids = rig.tokenizer.encode(" hello" * 100, add_special_tokens=False)
    rig.generator.will(*[delta(ids) for _ in range(1500)], delta([10], "length"))
    reader, writer = await connect(rig, "/v1/completions", {"prompt": "a", "stream": True})
    await asyncio.sleep(0.3)
    received = b""
    async with asyncio.timeout(PATIENCE):
        while not received.endswith(b"0\r\n\r\n"):
            received = received[-8:] + await reader.read(1 << 20)
    await leave(writer)


async def test_body_that_never_ends(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.http.request_body.READ_TIMEOUT", 0.05)
    reader, writer = await asyncio.open_connection(rig.host, rig.port)
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 99\r\n\r\n{"
    )
    assert b" 408 " in await asyncio.wait_for(reader.readline(), PATIENCE)
    await leave(writer)


async def test_a_body_declared_too_large_is_refused_without_waiting_for_it(rig: Rig) -> None:
    """The length is in the head: the client need not send the body, nor hold a connection for READ_TIMEOUT."""
    reader, writer = await asyncio.open_connection(rig.host, rig.port)
    head = "POST /v1/completions HTTP/1.1", "Host: x", "Content-Type: application/json"
    writer.write("\r\n".join((*head, f"Content-Length: {10**12}", "", "{")).encode())
    assert b" 413 " in await asyncio.wait_for(reader.readline(), PATIENCE)
    await leave(writer)
