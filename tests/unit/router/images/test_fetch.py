"""Images are fetched only from configured hosts, and only from public addresses."""

from __future__ import annotations

import gzip
import socket
import ssl
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp.connector
import pytest
from aiohttp import web
from aiohttp.abc import AbstractResolver, ResolveResult
from yarl import URL

from common.errors import InvalidRequest
from router.images import fetch as image_fetch
from router.images.fetch import ImageFetcher, PublicResolver, public
from tests.fakes.waiting import PATIENCE

PRIVATE = (
    "127.0.0.1",
    "10.1.2.3",
    "172.16.0.1",
    "192.168.1.1",
    "169.254.169.254",
    "100.64.0.1",
    "0.0.0.0",
    "224.0.0.1",
    "255.255.255.255",
    "::1",
    "::",
    "fe80::1",
    "fe80::1%eth0",
    "fc00::1",
    "ff02::1",
    "::ffff:127.0.0.1",
    "::ffff:10.0.0.1",
    "64:ff9b::a00:1",
    "2002:7f00:1::",
    "2001:0:4136:e378:8000:63bf:80ff:fffe",
)


@pytest.mark.parametrize("address", PRIVATE)
def test_private_addresses_are_known_in_every_wrapping(address: str) -> None:
    assert not public(address)


@pytest.mark.parametrize(
    "address", ["8.8.8.8", "1.1.1.1", "2606:4700:4700::1111", "::ffff:8.8.8.8", "64:ff9b::808:808"]
)
def test_public_addresses_are(address: str) -> None:
    assert public(address)


def looking_up(*addresses: str) -> Any:
    async def lookup(host: str, port: int) -> Sequence[tuple[Any, ...]]:
        family = {True: socket.AF_INET6, False: socket.AF_INET}
        return [(family[":" in each], socket.SOCK_STREAM, 6, "", (each, port)) for each in addresses]

    return lookup


async def test_a_name_with_one_private_address_is_refused_as_a_whole() -> None:
    found = await PublicResolver(looking_up("8.8.8.8", "2606:4700:4700::1111")).resolve("a.example", 443)
    assert [(each["host"], each["port"], each["hostname"]) for each in found] == [
        ("8.8.8.8", 443, "a.example"),
        ("2606:4700:4700::1111", 443, "a.example"),
    ]
    for addresses in (("8.8.8.8", "10.0.0.1"), ("169.254.169.254",), ()):
        with pytest.raises(OSError, match="no public address"):
            await PublicResolver(looking_up(*addresses)).resolve("a.example", 443)


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("https://other.example/a.png", "configured hosts"),
        ("http://images.example/a.png", "by https"),
        ("https://images.example:8443/a.png", "by https"),
        ("https://user@images.example/a.png", "by https"),
        ("https://images.example.evil.example/a.png", "configured hosts"),
        ("file:///etc/passwd", "by https"),
        ("ftp://images.example/a.png", "by https"),
        ("https://[::1", "URL of the image is not valid"),
        ("https://10.0.0.1/a.png", "by host name"),
        ("/a.png", "by https"),
        (f"https://images.example/{'a' * 9_000}", "more than 8192 characters"),
    ],
)
async def test_addresses_that_are_not_allowed_are_not_fetched(address: str, said: str) -> None:
    fetcher = ImageFetcher(["images.example", "10.0.0.1"], 1000, 1.0, PublicResolver(looking_up("8.8.8.8")))
    with pytest.raises(InvalidRequest, match=said):
        await fetcher.fetch(address)


async def test_nothing_is_fetched_by_default() -> None:
    with pytest.raises(InvalidRequest, match="this router does not fetch images; send the image as"):
        await ImageFetcher([], 1000, 1.0).fetch("https://images.example/a.png")


async def test_a_listed_name_that_points_inside_is_not_reached() -> None:
    """DNS rebinding: the connection goes to the checked address, and a private one is refused."""
    fetcher = ImageFetcher(["images.example"], 1000, PATIENCE, PublicResolver(looking_up("127.0.0.1")))
    with pytest.raises(InvalidRequest, match=r"cannot be fetched$"):
        await fetcher.fetch("https://images.example/a.png")


class Here(AbstractResolver):
    """Resolves every name to the test's own server, in place of addresses that passed the check."""

    def __init__(self, port: int) -> None:
        self._port = port

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        return [
            ResolveResult(
                hostname=host, host="127.0.0.1", port=self._port, family=socket.AF_INET, proto=0, flags=0
            )
        ]

    async def close(self) -> None:
        pass


class PlainFetcher(ImageFetcher):
    """A fetcher without TLS, which the test's server lacks; everything else is unchanged."""

    def check(self, address: str) -> URL:
        return URL(address.replace("https://", "http://"))


async def _serve(tls: ssl.SSLContext | None = None) -> tuple[web.AppRunner, int]:
    async def small(request: web.Request) -> web.Response:
        assert request.headers["Accept-Encoding"] == "identity"
        return web.Response(body=b"x" * 900)

    async def packed(request: web.Request) -> web.Response:
        return web.Response(body=gzip.compress(b"x" * 900), headers={"Content-Encoding": "gzip"})

    async def large(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for _ in range(100):
            await response.write(b"y" * 1000)
        return response

    async def moved(request: web.Request) -> web.Response:
        raise web.HTTPFound("http://169.254.169.254/latest")

    app = web.Application()
    app.router.add_get("/small", small)
    app.router.add_get("/packed", packed)
    app.router.add_get("/large", large)
    app.router.add_get("/moved", moved)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=tls)
    await site.start()
    port: int = runner.addresses[0][1]
    return runner, port


async def test_bytes_are_capped_and_redirects_not_followed() -> None:
    runner, port = await _serve()
    try:
        fetcher = PlainFetcher(["images.example"], 1000, PATIENCE, Here(port))
        assert await fetcher.fetch("https://images.example/small") == b"x" * 900
        with pytest.raises(InvalidRequest, match="larger than 1000 bytes"):
            await fetcher.fetch("https://images.example/large")
        with pytest.raises(InvalidRequest, match="answered with a compressed file"):
            await fetcher.fetch("https://images.example/packed")
        with pytest.raises(InvalidRequest, match="its host answered 302"):
            await fetcher.fetch("https://images.example/moved")
        with pytest.raises(InvalidRequest, match="its host answered 404"):
            await fetcher.fetch("https://images.example/none")
    finally:
        await runner.cleanup()


class Rebound(PublicResolver):
    """The real address checks, with an address that the test allows; only the port differs from 443."""

    def __init__(self, port: int) -> None:
        super().__init__(looking_up("127.0.0.1"))
        self._port = port

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        assert port == 443
        found = await super().resolve(host, port, family)
        for each in found:
            each["port"] = self._port
        return found


async def test_the_host_at_a_checked_address_has_to_prove_its_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    certificate = Path(__file__).with_name("images_example.pem")
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(certificate)
    runner, port = await _serve(tls)
    try:
        fetcher = ImageFetcher(["images.example", "other.example"], 1000, PATIENCE, Rebound(port))
        trusting = ssl.create_default_context(cafile=certificate)
        monkeypatch.setattr(aiohttp.connector, "_SSL_CONTEXT_VERIFIED", trusting)
        with pytest.raises(InvalidRequest, match=r"cannot be fetched$"):
            await fetcher.fetch("https://images.example/small")  # the address is private
        monkeypatch.setattr(image_fetch, "public", lambda address: address == "127.0.0.1")
        assert await fetcher.fetch("https://images.example/small") == b"x" * 900
        with pytest.raises(InvalidRequest, match=r"cannot be fetched$") as error:
            await fetcher.fetch("https://other.example/small")
        assert "not valid for 'other.example'" in str(error.value.__cause__)
        monkeypatch.setattr(aiohttp.connector, "_SSL_CONTEXT_VERIFIED", ssl.create_default_context())
        with pytest.raises(InvalidRequest, match=r"cannot be fetched$") as error:
            await fetcher.fetch("https://images.example/small")
        assert "self-signed certificate" in str(error.value.__cause__)
    finally:
        await runner.cleanup()


async def test_time_is_capped() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        fetcher = PlainFetcher(["images.example"], 1000, 0.2, Here(silent.getsockname()[1]))
        with pytest.raises(InvalidRequest, match=r"cannot be fetched$"):
            await fetcher.fetch("https://images.example/small")
