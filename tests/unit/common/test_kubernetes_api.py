"""The API server has to have a certificate of the authority in the pod's ca.crt."""

from __future__ import annotations

import shutil
import ssl
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from common.errors import ConfigError
from common.kubernetes_api import ApiServer
from tests.fakes.tls_files import AUTHORITY, PLACE, copy_certificates


@pytest.mark.parametrize(("authority", "trusted"), [(AUTHORITY, True), (PLACE / "client.pem", False)])
async def test_only_the_authority_of_the_pod_is_trusted(
    tmp_path: Path, authority: Path, trusted: bool
) -> None:
    own = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    own.load_cert_chain(*copy_certificates(tmp_path))
    app = web.Application()

    async def answer(request: web.Request) -> web.Response:
        return web.Response(text=request.headers["Authorization"])

    app.router.add_get("/", answer)
    shutil.copyfile(authority, tmp_path / "ca.crt")
    (tmp_path / "token").write_text("first\n")
    server = TestServer(app, scheme="https")
    await server.start_server(ssl=own)
    try:
        api = ApiServer(str(server.make_url("/")), tmp_path)
        async with aiohttp.ClientSession(headers=api.headers()) as session:
            if trusted:
                async with session.get(api.url, ssl=api.tls()) as response:
                    assert await response.text() == "Bearer first"
            else:
                with pytest.raises(aiohttp.ClientConnectorCertificateError):
                    await session.get(api.url, ssl=api.tls())
    finally:
        await server.close()


def test_credentials_that_are_no_text_are_named(tmp_path: Path) -> None:
    (tmp_path / "namespace").write_bytes(b"\xff")
    with pytest.raises(ConfigError, match=r"kubernetes\.credentials: cannot read .*namespace: .*0xff"):
        ApiServer("https://127.0.0.1:1", tmp_path).read("namespace")


def test_a_missing_authority_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"kubernetes\.credentials: cannot read ca\.crt"):
        ApiServer("https://127.0.0.1:1", tmp_path).tls()
