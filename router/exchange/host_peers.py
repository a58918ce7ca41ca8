"""Asks the other router processes of this host, over the Unix socket that each of them has."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import aiohttp
import msgspec
from yarl import URL

from common.errors import Overloaded, Unavailable
from common.observability.bounded_log import BoundedLog
from common.observability.logs import Log
from router.exchange.orders import AbortOrder, PauseOrder
from router.exchange.series_text import labelled_all, merged

ASK_SECONDS = 1.0  # for the answers of all processes together
MAX_BYTES = 8 << 20  # of one answer
AT_ONCE = 8  # questions of this process to one other, and orders
LATEST = "/host/requests"
TIMELINES = LATEST + "/"
METRICS = "/host/metrics"
LOAD = "/host/load"
ABORT = "/host/abort"
PAUSE = "/host/pause"
FLUSH = "/host/flush"


class HostPeers:
    """The other processes. One that does not answer in time is left out: it may have ended a moment ago."""

    def __init__(self, name: str, sockets: Mapping[str, Path], log: Log) -> None:
        """
        Args:
            name: of this process.
            sockets: of the others, by their names; empty for the only process of its host.
        """
        self._name = name
        self._sockets = dict(sockets)
        # Every client may ask questions; orders (POST) must not wait for them.
        self._gates = {
            (method, name): asyncio.Semaphore(AT_ONCE) for method in ("GET", "POST") for name in sockets
        }
        self._silent = BoundedLog(log, "another router process of this host did not answer")

    async def metrics(self, own: bytes, accept: str) -> bytes:
        """Return `own` with the series of the other processes, all with labels.

        `accept`: the header that asks for their format, which is that of `own`.
        """
        if not self._sockets:
            return own
        labelled = labelled_all(own.decode(), self._name).encode()
        return merged(labelled, await self._ask_all("GET", METRICS, accept=accept))

    async def timeline(self, identity: str) -> dict[str, Any] | None:
        """Return the timeline of a request of another process, by its id."""
        answers = await self._ask_all("GET", TIMELINES + quote(identity, safe=""))
        return msgspec.json.decode(answers[0], type=dict[str, Any]) if answers else None

    async def latest(self, count: int, client: str | None) -> list[dict[str, Any]]:
        """Return the timelines of the last requests of each other process, `count` at most: see Timelines."""
        query = {"limit": str(count)} if client is None else {"limit": str(count), "client": client}
        answers = await self._ask_all("GET", f"{LATEST}?{urlencode(query)}")
        return [each for answer in answers for each in msgspec.json.decode(answer, type=list[dict[str, Any]])]

    async def active(self, client: str | None = None) -> int:
        """Return the number of prompts that the others have in flight, of all clients or of one."""
        path = LOAD if client is None else f"{LOAD}?client={quote(client, safe='')}"
        return _sum(await self._ask_all("GET", path))

    async def abort(self, order: AbortOrder) -> int:
        """Abort requests of the other processes; return the number of prompts."""
        return _sum(await self._ask_all("POST", ABORT, msgspec.json.encode(order)))

    async def pause(self, paused: bool) -> int:
        """Pause or resume the other processes; return the number of requests that they still answer.

        Raises Unavailable if one of them runs and does not answer: it may not have followed.
        """
        return _sum(await self._order_all(PAUSE, msgspec.json.encode(PauseOrder(paused))))

    async def flush(self) -> set[str]:
        """Let the others forget which prefixes nodes hold, and tell the nodes to empty their caches.

        Returns the names of the nodes that one of them cannot reach. Raises Unavailable as `pause` does.
        """
        answers = await self._order_all(FLUSH, b"")
        return {name for each in answers for name in msgspec.json.decode(each, type=list[str])}

    async def _order_all(self, path: str, body: bytes) -> list[bytes]:
        """Return the answers to an order that all must follow. Raises Unavailable if one that runs may not have."""
        asked = (self._ask(each, "POST", path, body, "*/*") for each in self._sockets)
        answers = dict(zip(self._sockets, await asyncio.gather(*asked), strict=True))
        silent = [name for name, answer in answers.items() if answer is None and await self._runs(name)]
        if silent:
            raise Unavailable(f"{', '.join(silent)} did not answer in time; send the request again")
        return [answer for answer in answers.values() if answer is not None]

    async def _ask_all(self, method: str, path: str, body: bytes = b"", accept: str = "*/*") -> list[bytes]:
        """Return the bodies of those who answered 200, in the order of their names."""
        if not self._sockets:
            return []
        asked = (self._ask(name, method, path, body, accept) for name in self._sockets)
        return [answer for answer in await asyncio.gather(*asked) if answer is not None]

    async def _runs(self, name: str) -> bool:
        """Return whether a process listens on its socket, however busy it is."""
        try:
            async with asyncio.timeout(ASK_SECONDS):
                _, writer = await asyncio.open_unix_connection(self._sockets[name])
        except TimeoutError:
            return True
        except OSError:
            return False
        writer.close()
        return True

    async def _ask(self, name: str, method: str, path: str, body: bytes, accept: str) -> bytes | None:
        url = URL(f"http://localhost{path}", encoded=True)
        headers = {"Accept": accept, "Content-Type": "application/json"}
        try:
            async with (
                asyncio.timeout(ASK_SECONDS),
                self._gates[method, name],
                aiohttp.UnixConnector(str(self._sockets[name])) as connector,
                aiohttp.ClientSession(connector=connector, connector_owner=False) as session,
                session.request(method, url, data=body, headers=headers) as response,
            ):
                answer = await _read(response)
                return answer if response.status == 200 else None
        except (OSError, TimeoutError, aiohttp.ClientError, Overloaded) as error:
            self._silent.warning(name, str(error) or type(error).__name__)
            return None


def _sum(answers: Iterable[bytes]) -> int:
    """Return the sum of answers that are numbers."""
    return sum(msgspec.json.decode(each, type=int) for each in answers)


async def _read(response: aiohttp.ClientResponse) -> bytes:
    """Return the body. Raises Overloaded if it is too long."""
    answer = bytearray()
    async for piece in response.content.iter_any():
        answer += piece
        if len(answer) > MAX_BYTES:
            raise Overloaded(f"the answer has more than {MAX_BYTES} bytes")
    return bytes(answer)
