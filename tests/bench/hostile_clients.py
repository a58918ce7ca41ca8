"""Hostile connections and crowds of clients: each function attacks a port and returns the statuses received."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

from tests.bench.scripted_pair import ScriptedPair
from tests.fakes.proc_files import with_children

PATIENCE = 60.0
CROWD = 1000
CROWD_STEP_SECONDS = 0.5  # two tokens per second each: measures one step, not whether the machine keeps up
MIB = 1 << 20
HEAD = "POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n{fields}\r\n"
Attack = Callable[[int, ScriptedPair], Awaitable[list[int]]]


async def _exchange(port: int, pieces: list[bytes], read: bool = True) -> int:
    """Return the first status received; 0 if the connection is closed instead."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=MIB)

    async def write() -> None:
        with contextlib.suppress(ConnectionError):
            for piece in pieces:
                writer.write(piece)
                await writer.drain()

    writing = asyncio.create_task(write())
    try:
        async with asyncio.timeout(PATIENCE):
            if not read:
                await writing
                return 0
            line = await reader.readline()
            while await reader.read(MIB):
                pass
            return int(line[9:12]) if line else 0
    except (ConnectionError, TimeoutError):
        return 0
    finally:
        writing.cancel()
        writer.transport.abort()


def _post(path: str, fields: str) -> bytes:
    return HEAD.format(path=path, fields=fields).encode()


async def small_chunks(port: int, pair: ScriptedPair) -> list[int]:
    """Send a body in chunks of one byte."""
    body = b'{"prompt":"' + b"x" * (2 * MIB)
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in body)
    head = _post("/v1/completions", "Transfer-Encoding: chunked\r\nConnection: close\r\n")
    return [await _exchange(port, [head, chunks, b"0\r\n\r\n"])]


async def pipelined(port: int, pair: ScriptedPair) -> list[int]:
    """Send requests without a pause and without reading their answers."""
    many = b"GET /live HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n" * 40_000
    return [await _exchange(port, [many + b"GET /live HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"])]


async def many_headers(port: int, pair: ScriptedPair) -> list[int]:
    """Send as many and as long headers as are accepted, and more."""
    found = []
    for count in (90, 100_000):
        fields = "".join(f"X-{n}: {'x' * 150}\r\n" for n in range(count))
        request = f"GET /live HTTP/1.1\r\nHost: 127.0.0.1\r\n{fields}Connection: close\r\n\r\n".encode()
        found += await asyncio.gather(*(_exchange(port, [request]) for _ in range(16)))
    return found


async def garbage(port: int, pair: ScriptedPair) -> list[int]:
    """Send bytes that are not HTTP."""
    return list(await asyncio.gather(*(_exchange(port, [os.urandom(64 << 10)]) for _ in range(500))))


async def multipart(port: int, pair: ScriptedPair) -> list[int]:
    """Send a form of a gibibyte."""
    fields = f"Content-Length: {1 << 30}\r\nConnection: close\r\n"
    head = _post("/v1/completions", fields).replace(b"application/json", b"multipart/form-data; boundary=b")
    return [await _exchange(port, [head] + [bytes(MIB)] * 1024)]


async def uploads_cut_off(port: int, pair: ScriptedPair) -> list[int]:
    """Send bodies of 9 MiB that end early."""
    head = _post("/v1/completions", f"Content-Length: {10 * MIB - 64}\r\n")
    body = [head] + [b"[" * MIB] * 9
    return list(await asyncio.gather(*(_exchange(port, body, read=False) for _ in range(20))))


async def _streams(port: int, count: int) -> list[asyncio.StreamWriter]:
    """Open `count` streams, each with another prompt."""
    pairs = await asyncio.gather(
        *(asyncio.open_connection("127.0.0.1", port, limit=MIB) for _ in range(count))
    )
    for number, (_, writer) in enumerate(pairs):
        prompt = [3 + number % 600, 3 + number // 600, *range(5, 85)]
        body = {"prompt": prompt, "max_tokens": 3900, "ignore_eos": True, "stream": True}
        data = json.dumps(body).encode()
        writer.write(_post("/v1/completions", f"Content-Length: {len(data)}\r\n") + data)
    async with asyncio.timeout(PATIENCE):
        await asyncio.gather(*(reader.readuntil(b"data: ") for reader, _ in pairs))
    _drains.update(asyncio.create_task(_discard(reader)) for reader, _ in pairs)
    return [writer for _, writer in pairs]


_drains: set[asyncio.Task[None]] = set()


async def _discard(reader: asyncio.StreamReader) -> None:
    with contextlib.suppress(ConnectionError):
        while await reader.read(MIB):
            pass


@contextlib.asynccontextmanager
async def _crowd(port: int, pair: ScriptedPair) -> AsyncIterator[None]:
    """Run streams of one token per step that all start at once and are all cut at once."""
    before = pair.tokens_per_step, pair.step_seconds
    pair.tokens_per_step, pair.step_seconds = 1, CROWD_STEP_SECONDS
    try:
        writers = await _streams(port, CROWD)
        yield
        for writer in writers:
            writer.transport.abort()
        await _until(lambda: pair.running == 0)
    finally:
        pair.tokens_per_step, pair.step_seconds = before


async def crowd(port: int, pair: ScriptedPair) -> list[int]:
    """Run many streams for three seconds."""
    async with _crowd(port, pair):
        await asyncio.sleep(3)
    return []


async def crowd_that_loses_a_node(port: int, pair: ScriptedPair) -> list[int]:
    """Kill the decode node of all streams; its successor takes them over."""
    async with _crowd(port, pair):
        await pair.replace_decode()
        await _until(lambda: pair.running == CROWD)
    return []


async def many_large_bodies(port: int, pair: ScriptedPair) -> list[int]:
    """Send whole chats of 8 MiB from many clients."""
    content = b'{"messages":[{"role":"user","content":"' + b"hello " * (8 * MIB // 6) + b'"}]}'
    head = _post("/v1/chat/completions", f"Content-Length: {len(content)}\r\nConnection: close\r\n")
    return list(await asyncio.gather(*(_exchange(port, [head, content]) for _ in range(20))))


async def many_small_chunks(port: int, pair: ScriptedPair) -> list[int]:
    """Send bodies in chunks of one byte from many clients."""
    return [
        status
        for each in await asyncio.gather(*(small_chunks(port, pair) for _ in range(10)))
        for status in each
    ]


async def connections(port: int, pair: ScriptedPair) -> list[int]:
    """Connect a thousand clients at once, each of which sends one request."""
    request = b"GET /live HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n"
    return list(await asyncio.gather(*(_exchange(port, [request]) for _ in range(CROWD))))


async def slow_uploads(port: int, pair: ScriptedPair) -> list[int]:
    """Four bodies of 10 MiB from two addresses that hardly arrive. Returns the statuses of other clients' chats."""
    head = _post("/v1/completions", f"Content-Length: {10 * MIB - 64}\r\n")
    writers = []
    for address in ("127.0.0.2", "127.0.0.2", "127.0.0.3", "127.0.0.3"):
        _, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=(address, 0))
        writer.write(head + b"[" * 1024)
        writers.append(writer)
    await asyncio.sleep(0.5)
    found = await many_large_bodies(port, pair)
    for writer in writers:
        writer.transport.abort()
    return found


async def silent_connections(port: int, pair: ScriptedPair) -> list[int]:
    """Six thousand connections of six addresses that never complete their heads. Returns the status of another one."""
    head = b"GET /live HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Long: " + b"x" * 15_000
    writers = []
    for number in range(6):
        address = (f"127.0.0.{number + 2}", 0)
        opened = await asyncio.gather(
            *(asyncio.open_connection("127.0.0.1", port, local_addr=address) for _ in range(CROWD))
        )
        for _, writer in opened:
            writer.write(head)
            writers.append(writer)
    request = b"GET /live HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n"
    found = [await _exchange(port, [request])]
    for writer in writers:
        writer.transport.abort()
    return found


async def worker_killed(port: int, pair: ScriptedPair) -> list[int]:
    """Kill every text worker of the router, and wait until they have been started again."""
    killed = 0
    for each in with_children(Path(f"/proc/{pair.router_pid}")):
        if b"router.text.process" in (each / "cmdline").read_bytes():
            os.kill(int(each.name), signal.SIGKILL)
            killed += 1
    assert killed, "no text worker is running"
    await asyncio.sleep(10)
    return []


async def cut_requests(port: int, pair: ScriptedPair) -> list[int]:
    """Send chats whose clients disconnect at once."""
    body = json.dumps({"messages": [{"role": "user", "content": "x"}], "max_tokens": 3000}).encode()
    request = _post("/v1/chat/completions", f"Content-Length: {len(body)}\r\n") + body
    for _ in range(10):
        await asyncio.gather(*(_exchange(port, [request], read=False) for _ in range(200)))
    return []


async def _until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE):
        while not holds():
            await asyncio.sleep(0.05)


ATTACKS: dict[str, Attack] = {
    "chunks of one byte": small_chunks,
    "pipelined requests": pipelined,
    "many headers": many_headers,
    "garbage": garbage,
    "a form of 1 GiB": multipart,
    "uploads cut off": uploads_cut_off,
    "10 bodies in chunks of one byte": many_small_chunks,
    "20 chats of 8 MiB": many_large_bodies,
    "4 slow uploads and 20 chats of 8 MiB": slow_uploads,
    "1,000 connections at once": connections,
    "6,000 incomplete heads": silent_connections,
    "text workers are killed": worker_killed,
    "clients that leave at once": cut_requests,
    "1,000 streams begin and end at once": crowd,
    "1,000 streams lose their decode node": crowd_that_loses_a_node,
}
