"""Finds routers by the EndpointSlices of a Service of Kubernetes: a list of them, and a watch that tells of changes."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import AsyncGenerator
from contextlib import aclosing

import aiohttp
import msgspec

from common.discovery.endpoints import EndpointSlice, SliceList, WatchEvent, WatchStatus, addresses_of
from common.discovery.slots import RouterSlot, SlotTable
from common.errors import ConfigError, NoAnswer
from common.ipc.host_lookup import MAX_ADDRESSES
from common.kubernetes_api import ApiServer, read_body
from common.node_names import SLICES
from common.observability.logs import Log
from common.tcp_address import tcp_address

LIST_SECONDS = 10.0
WATCH_SECONDS = 60  # the server ends a watch then
OVERDUE_SECONDS = 15.0  # a watch that has not ended this much later is a dead connection
SOONEST = 1.0  # seconds between two requests, at least
LATEST = 30.0  # the same after failures, at most
MAX_BYTES = 4 << 20  # of a list, and of one event
MAX_SLICES = 64
CLOSING_SECONDS = 0.01
GONE = 410  # the resource version is too old: list again
FAILURES = (
    OSError,
    TimeoutError,
    aiohttp.ClientError,
    ConfigError,
    NoAnswer,
    msgspec.MsgspecError,
    UnicodeError,
    RuntimeError,  # no thread can be started to look a name up
)


class _Gone(Exception):
    """The server no longer has the changes since the list."""


class SliceRouters:
    """Follows the slices in a thread of its own. While the API server cannot be asked, earlier addresses stay."""

    def __init__(self, address: str, slots: int, api: ApiServer, log: Log) -> None:
        """`address` is endpointslices://SERVICE:PORT in the namespace of the pod; `slots` is the number of links.

        Raises ConfigError if this is not a pod with a service account token.
        """
        service, _, self._port = address.removeprefix(SLICES).rpartition(":")
        namespace = api.read("namespace")
        api.headers()
        self._url = f"{api.url}/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices"
        self._selector = {"labelSelector": f"kubernetes.io/service-name={service}"}
        self._api = api
        self._log = log
        self._table = SlotTable(slots)
        self._slices: dict[str, EndpointSlice] = {}
        self._version = ""  # of the newest state that is known; empty: list
        self.slots = [RouterSlot(self._table, index, address, _no_need) for index in range(slots)]
        self._loop = asyncio.new_event_loop()
        self._task = self._loop.create_task(self._follow())
        # A daemon, since a process must not wait for the API server when it ends.
        threading.Thread(target=self._run, name="router-slices", daemon=True).start()

    def close(self) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._task.cancel)

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._task)
        except asyncio.CancelledError:
            pass
        finally:
            # Transports close in the turns after the one that ends the task.
            self._loop.run_until_complete(asyncio.sleep(CLOSING_SECONDS))
            self._loop.close()

    async def _follow(self) -> None:
        pause = SOONEST
        while True:
            try:
                if not self._version:
                    await self._list()
                await self._watch()
                pause = SOONEST
            except _Gone:
                self._version = ""
            except FAILURES as error:
                self._version = ""
                self._log.warning(
                    "cannot read the routers from the API server", error=str(error) or repr(error)
                )
                pause = min(2 * pause, LATEST)
            # Not all nodes of a cluster at the same time.
            await asyncio.sleep(pause * random.uniform(1.0, 1.5))

    async def _list(self) -> None:
        async with asyncio.timeout(LIST_SECONDS), self._session() as session:
            async with session.get(self._url, params=self._selector, allow_redirects=False) as response:
                await self._check(response)
                found = msgspec.json.decode(await read_body(response, MAX_BYTES), type=SliceList)
        self._slices = {each.metadata.name: each for each in (found.items or ())[:MAX_SLICES]}
        self._version = found.metadata.resource_version
        self._replace()

    async def _watch(self) -> None:
        """Apply changes until the server ends the watch. Raises TimeoutError if it does not end in time."""
        query = {
            **self._selector,
            "watch": "true",
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(WATCH_SECONDS),
            "resourceVersion": self._version,
        }
        async with asyncio.timeout(WATCH_SECONDS + OVERDUE_SECONDS), self._session() as session:
            async with session.get(self._url, params=query, allow_redirects=False) as response:
                await self._check(response)
                async with aclosing(_lines(response)) as lines:
                    async for line in lines:
                        self._apply(msgspec.json.decode(line, type=WatchEvent))

    def _session(self) -> aiohttp.ClientSession:
        connector = aiohttp.TCPConnector(ssl=self._api.tls(), force_close=True)
        headers = {**self._api.headers(), "Accept-Encoding": "identity"}
        # Whole requests have deadlines of their own.
        return aiohttp.ClientSession(
            connector=connector, headers=headers, timeout=aiohttp.ClientTimeout(sock_connect=LIST_SECONDS)
        )

    async def _check(self, response: aiohttp.ClientResponse) -> None:
        if response.status == GONE:
            raise _Gone
        if response.status in (401, 403):
            raise NoAnswer(
                f"{self._url} was answered {response.status}: the service account needs the verbs get, list and watch "
                "for endpointslices of discovery.k8s.io"
            )
        if response.status != 200:
            raise NoAnswer(f"{self._url} was answered {response.status}")

    def _apply(self, event: WatchEvent) -> None:
        if event.type == "ERROR":
            status = msgspec.json.decode(event.object, type=WatchStatus)
            if status.code == GONE:
                raise _Gone
            raise NoAnswer(f"the watch ended with {status.code}: {status.message[:200]}")
        changed = msgspec.json.decode(event.object, type=EndpointSlice)
        self._version = changed.metadata.resource_version or self._version
        if event.type == "BOOKMARK":
            return
        name = changed.metadata.name
        if event.type == "DELETED":
            self._slices.pop(name, None)
        elif name in self._slices or len(self._slices) < MAX_SLICES:
            self._slices[name] = changed
        self._replace()

    def _replace(self) -> None:
        found = addresses_of(self._slices.values(), MAX_ADDRESSES)
        self._table.replace([tcp_address(each, self._port) for each in found])


def _no_need() -> None:
    """Links without a connection have no need to ask: the watch tells of a new router at once."""


async def _lines(response: aiohttp.ClientResponse) -> AsyncGenerator[bytes, None]:
    """Yield the lines of a stream. Raises OSError if one is too long."""
    rest = bytearray()
    async for piece in response.content.iter_any():
        *lines, tail = piece.split(b"\n")
        for line in lines:
            rest += line
            if rest.strip():
                yield bytes(rest)
            rest.clear()
        rest += tail
        if len(rest) > MAX_BYTES:
            raise OSError(f"an event of {response.url} has more than {MAX_BYTES} bytes")
