"""Fetches images by URL: only from configured hosts and never from a private network (SSRF protection).

Only https on port 443, no redirects, no proxies. The name is resolved here, every address is checked, and the
connection goes to a checked address.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from yarl import URL

from common.errors import InvalidRequest

Lookup = Callable[[str, int], Awaitable[Sequence[tuple[Any, ...]]]]  # as loop.getaddrinfo returns it
UNREACHABLE = "the image cannot be fetched"
MAX_ADDRESS = 8192  # characters
AS_IT_IS = {"Accept-Encoding": "identity"}  # no compression: a few bytes could expand to many


def public(address: str) -> bool:
    """Return whether an address belongs to the public internet, even if it embeds an IPv4 address."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        teredo = ip.teredo
        inner = ip.ipv4_mapped or ip.sixtofour or (teredo[1] if teredo else None)
        if inner is None and ip in _NAT64:
            inner = ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)
        if inner is not None:
            return public(str(inner))
    return ip.is_global and not ip.is_multicast and not ip.is_reserved


_NAT64 = ipaddress.ip_network("64:ff9b::/96")


class PublicResolver(AbstractResolver):
    """Resolves names to public addresses. A name that has any other address is refused."""

    def __init__(self, lookup: Lookup | None = None) -> None:
        self._lookup = lookup or _getaddrinfo

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        found = await self._lookup(host, port)
        addresses = [(entry[0], str(entry[4][0])) for entry in found]
        if not addresses or not all(public(address) for _, address in addresses):
            raise OSError(f"{host} has no public address, or has a private one as well")
        return [
            ResolveResult(
                hostname=host,
                host=address,
                port=port,
                family=found_family,
                proto=0,
                flags=socket.AI_NUMERICHOST | socket.AI_NUMERICSERV,
            )
            for found_family, address in addresses
        ]

    async def close(self) -> None:
        """Do nothing: the resolver holds no resources."""


class ImageFetcher:
    """Fetches one image per request from the allowed hosts, under size and time limits.

    Without hosts it refuses all.
    """

    def __init__(
        self, hosts: Sequence[str], max_bytes: int, timeout: float, resolver: AbstractResolver | None = None
    ) -> None:
        self._hosts = frozenset(host.lower() for host in hosts)
        self._max_bytes = max_bytes
        self._timeout = timeout
        self._resolver = resolver or PublicResolver()

    async def fetch(self, address: str) -> bytes:
        """Return the image at `address`. Raises InvalidRequest, whose text reveals nothing about the target."""
        url = self.check(address)
        timeout = aiohttp.ClientTimeout(total=self._timeout)
        connector = aiohttp.TCPConnector(resolver=self._resolver, use_dns_cache=False, limit=1)
        try:
            async with (
                aiohttp.ClientSession(timeout=timeout, connector=connector, auto_decompress=False) as session,
                session.get(url, headers=AS_IT_IS, allow_redirects=False) as response,
            ):
                if response.status != 200:
                    raise InvalidRequest(f"{UNREACHABLE}: its host answered {response.status}")
                if response.headers.get("Content-Encoding", "identity").lower() != "identity":
                    raise InvalidRequest(f"{UNREACHABLE}: its host answered with a compressed file")
                data = bytearray()
                async for part in response.content.iter_chunked(1 << 16):
                    data += part
                    if len(data) > self._max_bytes:
                        raise InvalidRequest(f"the image is larger than {self._max_bytes} bytes")
                return bytes(data)
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            raise InvalidRequest(UNREACHABLE) from error

    def check(self, address: str) -> URL:
        """Check what needs no network access and return the URL. Raises InvalidRequest."""
        if not self._hosts:
            raise InvalidRequest("this router does not fetch images; send the image as a data: URL")
        if len(address) > MAX_ADDRESS:
            raise InvalidRequest(f"the URL of the image has more than {MAX_ADDRESS} characters")
        try:
            url = URL(address)
        except ValueError as error:
            raise InvalidRequest("the URL of the image is not valid") from error
        host = (url.host or "").lower()
        if url.scheme != "https" or url.port != 443 or url.user is not None or host not in self._hosts:
            raise InvalidRequest(
                "images are fetched only by https and from configured hosts; send a data: URL"
            )
        try:
            ipaddress.ip_address(host)  # a literal address would bypass the resolver
        except ValueError:
            return url
        raise InvalidRequest("images are fetched by host name, not by IP address; send a data: URL")


async def _getaddrinfo(host: str, port: int) -> Sequence[tuple[Any, ...]]:
    return await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
