"""TLS, the admin socket and connection limits, over real sockets."""

from __future__ import annotations

import asyncio
import socket
import ssl
import stat
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from common.config import Resolved, load_cluster
from common.config.router_processes import RouterProcess
from common.errors import ConfigError
from common.observability import bounded_log
from common.observability.logs import Log
from router.app import RouterApp
from router.build import build
from router.from_config import http_plan
from router.http.client import client_address
from router.process.stack_samples import write_profile
from router.server.accepting import ACCEPTED_PER_TURN
from router.server.connection_log import ConnectionLog
from router.server.connections import ConnectionLimit
from router.server.listeners import HttpListeners
from router.server.sockets import TlsFiles, owner_socket
from tests.fakes.api_keys import api_key, bearer
from tests.fakes.tls_files import AUTHORITY, copy_certificates
from tests.fakes.turn_count import counting_turns
from tests.fakes.waiting import PATIENCE, eventually
from tests.unit.router.conftest import TINY, Serve

pytestmark = pytest.mark.usefixtures("text_forks")


def trusting(client: Path | None = None) -> ssl.SSLContext:
    """Make a client that trusts the authority; `client`: a directory with its own certificate."""
    context = ssl.create_default_context(cafile=AUTHORITY)
    if client is not None:
        context.load_cert_chain(*copy_certificates(client, "client"))
    return context


def config(directory: Path, *overrides: str) -> Resolved:
    file = directory / "cluster.yaml"
    file.write_text(
        f"""
model: {{path: "{TINY}"}}
router: {{port: 0, control_address: "ipc://{directory}/c"}}
health: {{drain_timeout: 1.0}}
process: {{run_dir: "{directory}/r"}}
"""
    )
    return load_cluster(file, overrides, environ={})


def router(directory: Path, *overrides: str) -> RouterApp:
    return build(config(directory, *overrides), RouterProcess(0, ()), Log("test"))


def write_keys(directory: Path, text: str | None = None) -> str:
    file = directory / "keys.yaml"
    rows = [
        f"- {{id: {name}, sha256: '{api_key(name, name).sha256}', scopes: [{scope}]}}"
        for name, scope in (("user", "inference"), ("ops", "admin"))
    ]
    file.write_text("\n".join(rows) if text is None else text)
    file.chmod(0o600)
    return f"security.api_keys={file}"


def port_of(listeners: HttpListeners) -> int:
    return int(listeners.public.addresses[0][1])


async def status(
    url: str, path: str = "/live", tls: ssl.SSLContext | None = None, key: str | None = None
) -> int:
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=tls or True)) as session:
        async with session.get(url + path, headers=bearer(key) if key else {}) as response:
            return response.status


async def test_tls(tmp_path: Path) -> None:
    cert, key = copy_certificates(tmp_path)
    app = router(tmp_path, f"router.tls.cert={cert}", f"router.tls.key={key}")
    await app.start()
    url = f"https://127.0.0.1:{port_of(app.http)}"
    assert await status(url, tls=trusting()) == 200
    with pytest.raises(aiohttp.ClientError):
        await status(url.replace("https", "http"))
    old = trusting()
    old.minimum_version, old.maximum_version = ssl.TLSVersion.MINIMUM_SUPPORTED, ssl.TLSVersion.TLSv1_2
    assert await status(url, tls=old) == 200
    with pytest.deprecated_call():
        old.maximum_version = ssl.TLSVersion.TLSv1_1
    with pytest.raises(aiohttp.ClientError):
        await status(url, tls=old)
    await app.drain()


async def test_mutual_tls_needs_a_client_certificate(tmp_path: Path) -> None:
    cert, key = copy_certificates(tmp_path)
    tls = [f"router.tls.cert={cert}", f"router.tls.key={key}", f"router.tls.client_ca={AUTHORITY}"]
    app = router(tmp_path, *tls)
    await app.start()
    url = f"https://127.0.0.1:{port_of(app.http)}"
    assert await status(url, tls=trusting(tmp_path)) == 200
    with pytest.raises(aiohttp.ClientError):
        await status(url, tls=trusting())
    await app.drain()


async def test_renewed_certificates_are_taken_up_and_broken_ones_are_not(tmp_path: Path) -> None:
    files = TlsFiles(*copy_certificates(tmp_path), None)
    (tmp_path / "server.pem").write_text("broken")
    with pytest.raises(ConfigError, match=r"router\.tls\.cert: .* not a PEM certificate"):
        files.load()
    copy_certificates(tmp_path)
    files.load()


async def test_a_half_renewed_certificate_changes_nothing(tmp_path: Path) -> None:
    """With a new certificate whose key is missing, clients are served with the previous pair."""
    cert, key = copy_certificates(tmp_path)
    app = router(tmp_path, f"router.tls.cert={cert}", f"router.tls.key={key}")
    await app.start()
    other, _ = copy_certificates(tmp_path, "client")
    cert.write_bytes(other.read_bytes())
    app.http.reload()
    assert await status(f"https://127.0.0.1:{port_of(app.http)}", tls=trusting()) == 200
    await app.drain()


async def test_an_authority_that_was_replaced_is_not_trusted_any_more(tmp_path: Path) -> None:
    cert, key = copy_certificates(tmp_path)
    authority = tmp_path / "authority.pem"
    authority.write_bytes(AUTHORITY.read_bytes())
    tls = [f"router.tls.cert={cert}", f"router.tls.key={key}", f"router.tls.client_ca={authority}"]
    app = router(tmp_path, *tls)
    await app.start()
    url = f"https://127.0.0.1:{port_of(app.http)}"
    assert await status(url, tls=trusting(tmp_path)) == 200
    authority.write_bytes(cert.read_bytes())  # a certificate that did not sign the client's
    app.http.reload()
    with pytest.raises(aiohttp.ClientError):
        await status(url, tls=trusting(tmp_path))
    await app.drain()


def test_certificates_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    cert, key = copy_certificates(tmp_path)
    _, other = copy_certificates(tmp_path, "client")
    with pytest.raises(ConfigError, match=r"router\.tls\.cert: cannot read"):
        TlsFiles(tmp_path / "none", key, None)
    with pytest.raises(ConfigError, match=r"router\.tls\.cert: .*key"):
        TlsFiles(cert, other, None)
    with pytest.raises(ConfigError, match=r"router\.tls\.client_ca"):
        TlsFiles(cert, key, key)
    key.chmod(0o644)
    with pytest.raises(ConfigError, match=r"router\.tls\.key: .*chmod 600"):
        TlsFiles(cert, key, None)


async def test_the_admin_socket_has_everything_and_the_api_does_not(tmp_path: Path) -> None:
    app = router(tmp_path, write_keys(tmp_path))
    await app.start()
    url, path = f"http://127.0.0.1:{port_of(app.http)}", tmp_path / "r" / "router.admin.sock"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    async with aiohttp.ClientSession(
        "http://localhost", connector=aiohttp.UnixConnector(str(path))
    ) as session:
        async with session.get("/server_info") as response:
            assert (await response.json())["incarnation"] == app.link.incarnation
        async with session.get("/metrics") as response:
            assert response.status == 200
        async with session.post("/drain") as response:
            assert await response.json() == {"status": "draining", "active_requests": 0}
        assert app.availability.not_ready() == "draining"
        async with session.post("/v1/completions", json={"prompt": "x"}) as response:
            assert response.status == 503
            assert "resumes" in (await response.json())["error"]["message"]
        async with session.post("/resume") as response:
            assert (await response.json())["status"] == "serving"
    assert app.availability.not_ready() != "draining"
    assert await status(url, "/server_info", key="user") == 200
    for key in ("user", "ops"):
        async with aiohttp.ClientSession() as session:
            async with session.get(url + "/server_info", headers=bearer(key)) as response:
                said = await response.text()
                assert app.link.incarnation not in said
                assert (str(TINY) in said) == (key == "ops")
            for route in ("/drain", "/resume"):
                async with session.post(url + route, headers=bearer(key)) as response:
                    assert response.status in (403, 404)
    assert app.availability.not_ready() != "draining"
    await app.drain()
    assert not path.exists()


async def test_an_operator_profiles_the_router(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, may_end = threading.Event(), threading.Event()

    def held(*arguments: Any) -> tuple[Path, int]:
        begun.set()
        made = write_profile(*arguments)
        may_end.wait(PATIENCE)
        return made

    monkeypatch.setattr("router.routes.profile.write_profile", held)
    app = router(tmp_path)
    await app.start()
    admin = aiohttp.UnixConnector(str(tmp_path / "r" / "router.admin.sock"))
    async with aiohttp.ClientSession("http://localhost", connector=admin) as session:
        own = "/workers/router/profile"

        async def asked(path: str, body: Mapping[str, object]) -> tuple[int, dict[str, Any]]:
            async with session.post(path, json=body) as response:
                return response.status, await response.json()

        first = asyncio.create_task(asked(own, {"seconds": 0.2}))
        await eventually(begun.is_set)
        assert (await asked(own, {"seconds": 0.2}))[0] == 409
        may_end.set()
        status, answer = await first
        assert (status, answer["name"]) == (200, "router")
        assert answer["samples"] > 0
        files = tmp_path / "r" / "profiles"
        assert Path(answer["path"]).parent == files
        begun.clear()
        gone = asyncio.create_task(asked(own, {"seconds": 60}))
        await eventually(begun.is_set)
        gone.cancel()
        # Well before its time: nobody waits for it any longer, and the end of the process would wait for its thread.
        await eventually(lambda: len([*files.glob("*.gz")]) == 2, seconds=30.0)
        for path, body, refused in (
            (own, {"seconds": 61}, 400),
            (own, {"num_steps": 3}, 400),
            (own, {"step": 3}, 400),
            ("/workers/decode-0/profile", {}, 404),
        ):
            assert (await asked(path, body))[0] == refused
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"http://127.0.0.1:{port_of(app.http)}{own}") as response,
    ):
        assert response.status == 404
    await app.drain()


async def test_an_admin_port_wants_keys_of_that_scope(tmp_path: Path) -> None:
    with socket.socket() as held:
        # Held until the router listens: another test may look for a free port now.
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
        app = router(tmp_path, write_keys(tmp_path), f"router.admin=http://127.0.0.1:{port}")
        await app.start()
    url = f"http://127.0.0.1:{port}"
    assert [await status(url, "/metrics", key=key) for key in (None, "x", "user", "ops")] == [
        401,
        401,
        403,
        200,
    ]
    async with aiohttp.ClientSession() as session:
        async with session.get(url + "/server_info", headers=bearer("ops")) as response:
            assert (await response.json())["incarnation"] == app.link.incarnation
        async with session.post(url + "/drain", headers=bearer("user")) as response:
            assert response.status == 403
    assert (tmp_path / "r" / "router.admin.sock").exists()
    await app.drain()


def test_keys_that_cannot_be_read_are_refused_at_start_up(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="security.api_keys: .*must contain a list"):
        http_plan(
            config(tmp_path, write_keys(tmp_path, "x")),
            RouterProcess(0, ()),
            1 << 20,
            lambda: 0.0,
            Log("test"),
        )


def test_a_low_limit_of_open_files_lowers_that_of_connections(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Otherwise idle clients could take all descriptors, and no probe would be answered any more."""
    monkeypatch.setattr("resource.getrlimit", lambda limit: (1024, 1024))
    plan = http_plan(config(tmp_path), RouterProcess(0, ()), 1 << 20, lambda: 0.0, Log("test"))
    assert plan.limit.total == 888
    [line] = [vars(each)["fields"] for each in caplog.records if "ulimit -n" in each.getMessage()]
    assert line == {"connections": 888, "max_connections": 4352, "open_files": 1024}


def test_descriptors_are_kept_for_every_node_that_may_join(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("resource.getrlimit", lambda limit: (1024, 1024))
    resolved = config(tmp_path, "decode.nodes=[{name: decode-*, count: 99}]")
    plan = http_plan(resolved, RouterProcess(0, ()), 1 << 20, lambda: 0.0, Log("test"))
    assert plan.limit.total == 1024 - 128 - 4 * 100


async def test_without_keys_the_api_hides_processes_on_loopback(tmp_path: Path) -> None:
    app = router(tmp_path)
    await app.start()
    async with aiohttp.ClientSession(f"http://127.0.0.1:{port_of(app.http)}") as session:
        async with session.get("/server_info") as response:
            info = await response.json()
        assert info["model_path"] == str(TINY)
        assert "incarnation" not in info
        async with session.get("/server_info", headers={"Host": "evil.example"}) as response:
            assert response.status == 403
    await app.drain()


def test_the_admin_socket_takes_nothing_that_is_another(tmp_path: Path) -> None:
    path = tmp_path / "a.sock"
    path.write_text("a file")
    with pytest.raises(ConfigError, match=r"router\.admin: .* is not a socket"):
        owner_socket(path)
    path.unlink()
    left = owner_socket(path)
    left.close()  # as a killed router leaves it
    with owner_socket(path) as listening:
        listening.listen()
        with pytest.raises(ConfigError, match="another router listens at"):
            owner_socket(path)
    with pytest.raises(ConfigError, match="cannot listen at"):
        owner_socket(tmp_path / "none" / "a.sock")


async def test_one_address_has_so_many_connections(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    limit = ConnectionLimit(3, 100, ConnectionLog(Log("router")).note)
    rig = await serve(limit=limit)
    kept = [await asyncio.open_connection(rig.host, rig.port) for _ in range(3)]
    await eventually(lambda: len(limit) == 3)
    for _ in range(5):
        reader, writer = await asyncio.open_connection(rig.host, rig.port)
        async with asyncio.timeout(PATIENCE):
            assert await reader.read() == b""
        writer.close()
    closed = [each for each in caplog.records if each.getMessage() == "closed a new connection"]
    assert [each.fields["peer"] for each in closed] == ["127.0.0.1"] * 5  # type: ignore[attr-defined]
    assert closed[0].fields["reason"].startswith("it has 3 connections")  # type: ignore[attr-defined]
    for _, writer in kept:
        writer.close()
    await eventually(lambda: len(limit) == 0)
    async with rig.session.get(rig.url + "/live") as response:
        assert response.status == 200


async def test_a_router_that_ends_logs_the_connections_that_it_has_only_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounded_log, "WINDOW", 600.0)  # not over before the router ends
    app = router(tmp_path, "router.max_connections_per_client=1")
    await app.start()
    _, kept = await asyncio.open_connection("127.0.0.1", port_of(app.http))
    for _ in range(bounded_log.FIRST + 3):
        reader, writer = await asyncio.open_connection("127.0.0.1", port_of(app.http))
        async with asyncio.timeout(PATIENCE):
            assert await reader.read() == b""
        writer.close()
    kept.close()
    await app.drain()
    closed = [
        vars(each)["fields"] for each in caplog.records if "closed a new connection" in each.getMessage()
    ]
    assert len(closed) == bounded_log.FIRST + 1
    assert closed[-1]["count"] == 3


@pytest.mark.parametrize(
    ("address", "name"),
    [
        ("10.0.0.1", "10.0.0.1"),
        ("::ffff:10.0.0.1", "10.0.0.1"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("::1", "::1"),
        ("", ""),
    ],
)
def test_addresses_of_one_client_are_one(address: str, name: str) -> None:
    assert client_address(address) == name


async def test_every_listener_accepts_a_few_connections_per_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = router(tmp_path)
    await app.start()
    crowd = 10 * ACCEPTED_PER_TURN
    made = web.RequestHandler.connection_made
    for runner in (app.http.public, app.http.owner):
        [address] = runner.addresses
        async with counting_turns() as count:

            def noted(self: web.RequestHandler, transport: asyncio.BaseTransport) -> None:
                count.note()
                made(self, transport)

            monkeypatch.setattr(web.RequestHandler, "connection_made", noted)
            family = socket.AF_UNIX if isinstance(address, str) else socket.AF_INET
            connections = [socket.socket(family) for _ in range(crowd)]
            for connection in connections:
                connection.connect(address)
            await eventually(lambda: count.total == crowd)
            assert count.most <= 2 * ACCEPTED_PER_TURN
            for connection in connections:
                connection.close()
    await app.drain()
