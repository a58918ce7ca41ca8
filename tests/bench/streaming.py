"""The two ends of a streamed completion: an HTTP engine with steps, and a client that notes when tokens arrive.

An engine labels the tokens of a step with a text of its own and keeps the time of the step under that label, so the
client can tell how old a token is.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any

END_OF_CHUNKS = b"0\r\n\r\n"
EVENT = b"data: {"
TEXT = b'"text":"'


def body(model: str, tokens: int, stream: bool = True) -> dict[str, Any]:
    """Return a completions request of 64 token ids that ends after `tokens`."""
    fields = {"prompt": list(range(300, 364)), "max_tokens": tokens, "ignore_eos": True, "temperature": 0}
    return fields | {"stream": stream} | ({"model": model} if model else {})


def request(path: str, port: int, fields: Mapping[str, Any]) -> bytes:
    data = json.dumps(fields).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data


class Stream(asyncio.Protocol):
    """A connection with one request at a time. Use it as an async context."""

    def __init__(self, port: int, sent: Callable[[str], float | None] = lambda text: None) -> None:
        """`sent` returns when the latest token with a text was sent; None if no step sends it."""
        self._port = port
        self._sent = sent
        self.status = 0
        self.delays: list[float] = []  # seconds, of each token of a step
        loop = asyncio.get_running_loop()
        self.begun: asyncio.Future[None] = loop.create_future()
        self.ended: asyncio.Future[None] = loop.create_future()

    async def __aenter__(self) -> Stream:
        self._transport, _ = await asyncio.get_running_loop().create_connection(
            lambda: self, "127.0.0.1", self._port
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._transport.abort()

    def send(self, fields: Mapping[str, Any]) -> None:
        self._head = b""
        self._left: int | None = None  # bytes of a body with a known length
        loop = asyncio.get_running_loop()
        self.begun, self.ended = loop.create_future(), loop.create_future()
        self._transport.write(request("/v1/completions", self._port, fields))

    def data_received(self, data: bytes) -> None:
        if not self.begun.done():
            self._head += data
            head, found, data = self._head.partition(b"\r\n\r\n")
            if not found:
                return
            self.status = int(head[9:12])
            _, _, length = head.lower().partition(b"content-length: ")
            self._left = int(length.split(b"\r\n")[0]) if length else None
            self.begun.set_result(None)
        if self._left is not None:
            self._left -= len(data)
            over = self._left <= 0
        else:
            now, events = time.perf_counter(), data.split(EVENT)[1:]
            for event in events:
                text = event.partition(TEXT)[2].partition(b'"')[0].decode()
                if (sent := self._sent(text)) is not None:
                    self.delays.append(now - sent)
            over = data.endswith(END_OF_CHUNKS)
        if over and not self.ended.done():
            self.ended.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        for each in (self.begun, self.ended):
            if not each.done():
                each.set_exception(ConnectionResetError("the router closed the connection"))
                each.exception()  # not every one is awaited


class _Connection(asyncio.Protocol):
    """The engine's side of one connection."""

    def __init__(self, engine: StreamingEngine) -> None:
        self._engine = engine
        self._received = b""

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def connection_lost(self, error: Exception | None) -> None:
        self._engine.running.pop(self, None)

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, found, rest = self._received.partition(b"\r\n\r\n")
        if not found:
            return
        length = head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0]
        if len(rest) < int(length or 0):
            return
        self._received = b""
        fields = json.loads(rest) if length else {}
        if not fields.get("stream"):
            self._answer(_completion(self._engine.labels[0], "length") if fields else b"{}")
            return
        self.transport.write(
            b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
        )
        self._engine.running[self] = fields["max_tokens"]

    def _answer(self, content: bytes) -> None:
        head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
        self.transport.write(head % len(content) + content)


def _completion(text: str, finish: str | None) -> bytes:
    choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": finish}
    answer = {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": "tiny", "choices": [choice]}
    return json.dumps(answer, separators=(",", ":")).encode()


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


class StreamingEngine:
    """Answers completions; each stream gets a token per step, in a chunk of its own. Use it as an async context."""

    def __init__(self, labels: list[str]) -> None:
        self.labels = labels
        self.sent: dict[str, float] = {}  # label -> time of the latest step with it
        self.step_seconds = 0.01
        self.running: dict[_Connection, int] = {}  # tokens that are left
        self.port = 0

    async def __aenter__(self) -> StreamingEngine:
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: _Connection(self), "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        self._stepping = asyncio.create_task(self._steps())
        return self

    async def __aexit__(self, *error: object) -> None:
        self._stepping.cancel()
        await asyncio.gather(self._stepping, return_exceptions=True)
        self._server.close()

    async def _steps(self) -> None:
        at = 0
        while True:
            await asyncio.sleep(self.step_seconds)
            label = self.labels[at % len(self.labels)]
            at += 1
            event = _chunk(b"data: %s\n\n" % _completion(label, None))
            self.sent[label] = time.perf_counter()
            for connection, left in list(self.running.items()):
                connection.transport.write(event)
                if left == 1:
                    del self.running[connection]
                    connection.transport.write(_chunk(b"data: [DONE]\n\n") + END_OF_CHUNKS)
                else:
                    self.running[connection] = left - 1
