"""Speaks to the routers: reads their measurements, and orders a movable node to change its role."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
from yarl import URL

from common.errors import ConfigError, NoAnswer
from common.kubernetes_api import read_body
from common.messages.identity import Role
from deploy.cluster_sample import ClusterSample, read_sample
from deploy.found_cluster import find_cluster
from deploy.openai_client import api_base, authorization
from deploy.other_cluster import require_own_cluster
from deploy.prepare import cluster_file_of

ANSWER_SECONDS = 5.0
MAX_BYTES = 64 << 20
# Its own limit of five minutes is shorter than a change of roles may be; `_ask` has one for each request.
NO_LIMIT = aiohttp.ClientTimeout(total=None)
NO_ANSWER = (OSError, TimeoutError, aiohttp.ClientError)


class Routers:
    """The routers of a cluster, over the admin socket of this host or at the addresses of a URL."""

    def __init__(self, target: str, api_key: str | None) -> None:
        """`target`: a cluster file, model directory or URL. Raises ConfigError."""
        self.notice = ""  # what the user has to know about the file or the run directory
        self._socket: Path | None = None
        # Raises OSError if another cluster answers at the socket.
        self._check: Callable[[], None] | None = None
        self._headers = authorization(api_key)
        if "://" not in target:
            found = find_cluster(cluster_file_of(target), ())
            self.notice = found.notice
            self._socket = found.admin_socket
            self._check = partial(require_own_cluster, found.run_dir, found.file, ())
            self._base = URL("http://localhost")
            return
        self._base = URL(api_base(target).removesuffix("/v1"))
        if self._base.scheme not in ("http", "https") or not self._base.host:
            raise ConfigError(target, "is not an http or https URL")

    async def read(self) -> dict[str, ClusterSample]:
        """Return a reading of each router that answers, by address.

        Raises one of NO_ANSWER if none does, ConfigError if the key is refused, ValueError for answers of something
        else than a router.
        """
        addresses = await self._addresses()
        answers = await asyncio.gather(*(self._sample(each) for each in addresses), return_exceptions=True)
        samples = {
            str(address): answer
            for address, answer in zip(addresses, answers, strict=True)
            if isinstance(answer, ClusterSample)
        }
        failures = [answer for answer in answers if isinstance(answer, BaseException)]
        if failures and (not samples or not isinstance(failures[0], NO_ANSWER)):
            raise failures[0]
        return samples

    async def change_role(self, name: str, role: Role, seconds: float) -> str:
        """Return once the node serves in its new role: what the router said.

        Raises one of NO_ANSWER, or tandem's NoAnswer with the router's sentence if it has not changed.
        """
        body = {"role": role, "timeout": seconds}
        path = f"/workers/{name}/role"
        status, answer = await self._ask("POST", self._base, path, body, seconds + 2 * ANSWER_SECONDS)
        if status != 200:
            raise NoAnswer(f"{path} was answered {status}: {_sentence(answer)}")
        return answer.decode(errors="replace")

    async def _addresses(self) -> Sequence[URL]:
        """Return the base URL of each router; with https only the one that the certificate is for."""
        base = self._base
        if self._socket is not None or base.scheme == "https" or base.host is None:
            return [base]
        found = await asyncio.get_running_loop().getaddrinfo(base.host, base.port, type=socket.SOCK_STREAM)
        return sorted({base.with_host(str(address[0])) for *_, address in found}, key=str)

    async def _sample(self, base: URL) -> ClusterSample:
        at, bodies = time.monotonic(), dict[str, bytes]()
        for path in ("/server_info", "/metrics"):
            status, bodies[path] = await self._ask("GET", base, path, None, ANSWER_SECONDS)
            if status in (401, 403):
                raise ConfigError("--api-key", f"{path} was answered {status}: it needs the scope admin")
            if status != 200:
                raise OSError(f"{path} was answered {status}")
        return await asyncio.to_thread(read_sample, bodies.__getitem__, at)

    async def _ask(self, method: str, base: URL, path: str, body: Any, seconds: float) -> tuple[int, bytes]:
        if self._check is not None:
            await asyncio.to_thread(self._check)
        connector = None if self._socket is None else aiohttp.UnixConnector(str(self._socket))
        headers = {**self._headers, "Host": self._base.authority}
        async with (
            asyncio.timeout(seconds),
            aiohttp.ClientSession(connector=connector, headers=headers, timeout=NO_LIMIT) as session,
            session.request(method, base.with_path(path), json=body) as response,
        ):
            return response.status, await read_body(response, MAX_BYTES)


def _sentence(answer: bytes) -> str:
    """Return the message of an error, or the beginning of another answer."""
    try:
        error = msgspec.json.decode(answer)["error"]
        return str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, KeyError, TypeError):
        return answer[:200].decode(errors="replace")
