"""A cheap HTTP/1.1 client: one connection, one request at a time, from any address of this host."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

from tests.cluster.harness import RunningCluster
from tests.fakes.waiting import PATIENCE

END_OF_CHUNKS = b"\r\n0\r\n\r\n"


class RawClient:
    """The client; use it as an async context. `address` is the client's own: any of 127.0.0.0/8."""

    def __init__(self, port: int, address: str = "127.0.0.1") -> None:
        self._port = port
        self._address = address

    async def __aenter__(self) -> RawClient:
        self._reader, self._writer = await asyncio.open_connection(
            "127.0.0.1", self._port, local_addr=(self._address, 0)
        )
        return self

    async def __aexit__(self, *error: object) -> None:
        self._writer.transport.abort()  # a reset: no connection lingers in TIME_WAIT

    async def get(self, path: str, headers: str = "") -> int:
        return await self._ask(
            f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1:{self._port}\r\n{headers}\r\n".encode()
        )

    async def post(self, path: str, body: dict[str, Any], headers: str = "") -> int:
        data = json.dumps(body).encode()
        head = (
            f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1:{self._port}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(data)}\r\n{headers}\r\n"
        )
        return await self._ask(head.encode() + data)

    async def _ask(self, request: bytes) -> int:
        """Return the status after the whole answer has arrived."""
        self._writer.write(request)
        head = (await self._reader.readuntil(b"\r\n\r\n")).lower()
        status, fields = int(head[9:12]), dict(line.split(b": ", 1) for line in head.split(b"\r\n")[1:-2])
        if b"content-length" in fields:
            await self._reader.readexactly(int(fields[b"content-length"]))
        elif fields.get(b"transfer-encoding") == b"chunked":
            await self._reader.readuntil(END_OF_CHUNKS)
        return status


async def serving(cluster: RunningCluster) -> None:
    """Return once the cluster's router answers."""
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            async with RawClient(cluster.port) as client:
                assert await client.get("/live") == 200
                return
        except OSError:
            assert time.monotonic() < deadline, cluster.log("router")
            await asyncio.sleep(0.2)
