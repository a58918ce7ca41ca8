"""Host, Origin and CORS over real HTTP."""

from __future__ import annotations

import asyncio
import json

import pytest

from router.auth.gates import KeyGate, OpenGate
from router.auth.keys import KeyRing
from router.auth.origin import Cors, HostRule
from router.auth.quotas import Quotas
from router.http.client import View
from tests.fakes.api_keys import api_key, bearer
from tests.fakes.clock import Clock
from tests.fakes.waiting import PATIENCE
from tests.unit.router.conftest import Rig, Serve
from tests.unit.router.scripted_generator import one_by_one

PAGE = "https://chat.example.com"
CHAT = "/v1/chat/completions"
BODY = {"messages": [{"role": "user", "content": "hi"}]}


def open_gate(allowed: tuple[str, ...] = (), cors: Cors | None = None) -> OpenGate:
    return OpenGate(HostRule(allowed, cors or Cors(())), View.CLUSTER, open_metrics=False)


async def ask(rig: Rig, *headers: str, path: str = "/v1/models", method: str = "GET") -> tuple[int, str]:
    """Send exactly these headers; return the status and the whole answer."""
    reader, writer = await asyncio.open_connection(rig.host, rig.port)
    lines = [f"{method} {path} HTTP/1.1", *headers, "Connection: close", "", ""]
    writer.write("\r\n".join(lines).encode())
    async with asyncio.timeout(PATIENCE):
        answer = (await reader.read()).decode()
    writer.close()
    return int(answer.split()[1]), answer


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1", 200),
        ("127.0.0.1:1", 200),
        ("127.9.9.9", 200),
        ("localhost", 200),
        ("LOCALHOST:8000", 200),
        ("localhost.", 200),
        ("app.localhost", 200),
        ("[::1]:8000", 200),
        ("[::ffff:127.0.0.1]", 200),
        ("box.example", 200),
        ("Box.Example.:80", 200),
        ("10.1.2.3", 200),
        ("evil.example", 403),
        ("localhost.evil.example", 403),
        ("evillocalhost", 403),
        ("127.0.0.1.evil.example", 403),
        ("10.1.2.4", 403),
        ("0.0.0.0", 403),
        ("a@localhost", 200),
        ("localhost@evil.example", 403),
        ("[::1", 403),
        ("", 403),
    ],
)
async def test_hosts(serve: Serve, host: str, status: int) -> None:
    rig = await serve(gate=open_gate(("box.example", "10.1.2.3")))
    found, answer = await ask(rig, f"Host: {host}")
    assert found == status
    if status == 403:
        assert '"code":"permission_denied"' in answer
        assert "router.allowed_hosts" in answer
    assert (await ask(rig, f"Host: {host}", path="/health"))[0] == 200  # probes may use any host name


async def test_several_hosts_or_none_may_be_allowed(serve: Serve) -> None:
    rig = await serve(gate=open_gate())
    assert (await ask(rig, "Host: localhost", "Host: evil.example"))[0] in (400, 403)
    assert (await ask(rig, "Host: evil.example", path="http://localhost/v1/models"))[0] == 403


@pytest.mark.parametrize(
    ("origin", "status"),
    [
        ("http://localhost:8000", 200),
        ("https://LOCALHOST:8000", 200),
        (PAGE, 200),
        ("http://localhost", 403),
        ("http://localhost:8001", 403),
        ("https://evil.example", 403),
        (f"{PAGE}.evil.example", 403),
        ("null", 403),
        ("", 403),
    ],
)
async def test_origins_without_keys(serve: Serve, origin: str, status: int) -> None:
    cors = Cors((PAGE,))
    rig = await serve(gate=open_gate(cors=cors), cors=cors)
    found, answer = await ask(rig, "Host: localhost:8000", f"Origin: {origin}")
    assert found == status
    assert ("access-control-allow-origin" in answer.lower()) == (origin == PAGE)
    if status == 403:
        assert "router.cors_origins" in answer


async def test_with_keys_names_do_not_matter_but_pages_learn_nothing(serve: Serve) -> None:
    gate = KeyGate(KeyRing([api_key("secret", "a")], lambda: 0.0), Quotas(Clock()), None, False, False)
    rig = await serve(gate=gate, cors=Cors((PAGE,)))
    key = "Authorization: Bearer secret"
    for origin, granted in ((PAGE, True), ("https://evil.example", False)):
        status, answer = await ask(rig, "Host: evil.example", f"Origin: {origin}", key)
        assert status == 200
        assert (f"Access-Control-Allow-Origin: {origin}" in answer) == granted
        assert "Vary: Origin" in answer
        assert "allow-credentials" not in answer.lower()
    status, answer = await ask(rig, "Host: x", f"Origin: {PAGE}")
    assert status == 401
    assert f"Access-Control-Allow-Origin: {PAGE}" in answer  # the page can read why
    rig.generator.will(*one_by_one([50]))
    async with rig.session.post(
        rig.url + CHAT, json={**BODY, "stream": True}, headers={"Origin": PAGE, **bearer("secret")}
    ) as response:
        assert response.headers["Access-Control-Allow-Origin"] == PAGE
        exposed = response.headers["Access-Control-Expose-Headers"].split(", ")
        assert {"X-Request-Id", "request-id"} <= set(exposed)


async def test_a_preflight_is_answered_for_listed_origins(serve: Serve) -> None:
    gate = KeyGate(KeyRing([api_key("secret", "a")], lambda: 0.0), Quotas(Clock()), None, False, False)
    rig = await serve(gate=gate, cors=Cors((PAGE,)))
    asked = "Access-Control-Request-Method: POST"
    wanted = "Access-Control-Request-Headers: authorization, content-type, X-Stainless-OS, x-evil, cookie"
    status, answer = await ask(rig, "Host: x", f"Origin: {PAGE}", asked, wanted, path=CHAT, method="OPTIONS")
    assert status == 204
    assert f"Access-Control-Allow-Origin: {PAGE}" in answer
    assert "Access-Control-Allow-Methods: GET, POST" in answer
    assert "Access-Control-Allow-Headers: authorization, content-type, x-stainless-os\r\n" in answer
    assert "Vary: Origin" in answer
    assert "allow-credentials" not in answer.lower()
    for origin in ("https://evil.example", "null", "*"):
        status, answer = await ask(
            rig, "Host: x", f"Origin: {origin}", asked, wanted, path=CHAT, method="OPTIONS"
        )
        assert status == 403
        assert "access-control-allow" not in answer.lower()


async def test_no_cors_by_default(rig: Rig) -> None:
    asked = "Access-Control-Request-Method: POST"
    status, answer = await ask(rig, "Host: localhost", f"Origin: {PAGE}", asked, method="OPTIONS", path=CHAT)
    assert status == 403
    assert json.loads(answer.split("\r\n\r\n")[1])["error"]["code"] == "permission_denied"
    assert "access-control" not in answer.split("\r\n\r\n")[0].lower()


async def test_probes_reveal_no_nodes_to_foreign_web_pages(serve: Serve) -> None:
    """A page can use a name of its own that it has bound to 127.0.0.1."""
    rig = await serve(gate=open_gate())
    rig.missing = [{"name": "decode-1", "role": "decode"}]
    for header in ("Host: evil.example.com", f"Host: 127.0.0.1\r\nOrigin: {PAGE}"):
        status, answer = await ask(rig, header, path="/ready")
        assert (status, "decode-1" in answer) == (200, False)
    assert "decode-1" in (await ask(rig, "Host: 127.0.0.1", path="/ready"))[1]
