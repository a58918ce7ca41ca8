"""API keys over real HTTP: which routes they open, what errors say, what each scope can see."""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime

import pytest
from aiohttp import web
from aiohttp.test_utils import make_mocked_request

from common.errors import Unauthorized
from common.observability.logs import Log
from router.auth.gates import LOG_SECONDS, Entrance, KeyGate, OpenGate, OwnerGate
from router.auth.keys import KeyRing
from router.auth.origin import Cors, HostRule
from router.auth.quotas import Quotas
from router.http.client import View, cache_salt
from router.http.errors import request_id_key
from tests.fakes.api_keys import api_key, bearer
from tests.fakes.clock import Clock
from tests.unit.router.conftest import Rig, Serve
from tests.unit.router.scripted_generator import delta, one_by_one

CHAT = "/v1/chat/completions"
BODY = {"messages": [{"role": "user", "content": "hi"}]}
NOW = datetime(2027, 1, 1, tzinfo=UTC).timestamp()
KEYS = (
    api_key("secret-a", "team-a"),
    api_key("secret-b", "team-b", expires=datetime(2026, 1, 1, tzinfo=UTC)),
    api_key("secret-c", "team-c", expires=datetime(2028, 1, 1, tzinfo=UTC), weight=3),
    api_key("secret-ops", "ops", scopes=("admin",)),
    api_key("secret-both", "both", scopes=("inference", "admin")),
)
OPEN = ("/live", "/liveness", "/ping", "/health", "/health_generate", "/ready", "/readiness")
CLOSED = (
    "/v1/models",
    "/v1/models/tiny-target",
    "/server_info",
    "/get_server_info",
    "/model_info",
    "/version",
    "/requests/known",
    "/metrics",
    "/nothing",
    "//live",
    "/live/",
)


def key_gate(scope: str | None = None, shared: bool = False, open_metrics: bool = False) -> KeyGate:
    clock = Clock()
    return KeyGate(KeyRing(KEYS, lambda: NOW), Quotas(clock), scope, shared, open_metrics)  # type: ignore[arg-type]


@pytest.fixture
async def keyed(serve: Serve) -> Rig:
    return await serve(gate=key_gate())


async def get(
    rig: Rig, path: str, headers: dict[str, str] | None = None, method: str = "GET"
) -> tuple[int, str]:
    async with rig.session.request(method, rig.url + path, headers=headers or {}) as response:
        return response.status, await response.text()


async def test_every_route_but_the_probes_needs_a_key(keyed: Rig) -> None:
    for path in OPEN:
        assert (await get(keyed, path))[0] == 200, path
        assert (await get(keyed, path, method="HEAD"))[0] == 200, path
    for path in CLOSED:
        for method in ("GET", "POST", "DELETE", "OPTIONS"):
            assert (await get(keyed, path, method=method))[0] == 401, (method, path)
    for path in (CHAT, "/v1/completions", "/tokenize", "/detokenize"):
        assert (await keyed.post(path, {}))[0] == 401, path
    assert not keyed.generator.requests


async def test_refusals_have_openais_shape(keyed: Rig) -> None:
    status, answer, headers = await keyed.post(CHAT, BODY)
    assert (status, headers["www-authenticate"]) == (401, "Bearer")
    assert answer["error"]["code"] == "invalid_api_key"
    assert answer["error"]["type"] == "invalid_request_error"
    assert "no API key was given" in answer["error"]["message"]
    status, answer, _ = await keyed.post(CHAT, BODY, bearer("wrong"))
    assert (status, answer["error"]["code"]) == (401, "invalid_api_key")
    assert "wrong" not in json.dumps(answer)
    status, answer, _ = await keyed.post(CHAT, BODY, bearer("secret-ops"))
    assert (status, answer["error"]["code"]) == (403, "permission_denied")
    assert "API key ops lacks the scope inference" in answer["error"]["message"]


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        (bearer("secret-a"), 200),
        ({"Authorization": "bearer   secret-a "}, 200),
        ({"x-api-key": "secret-a"}, 200),
        ({"Authorization": "Basic eDp5", "x-api-key": "secret-a"}, 200),
        (bearer("secret-both"), 200),
        (bearer("secret-c"), 200),
        (bearer("secret-b"), 401),
        (bearer("secret-"), 401),
        (bearer("secret-aa"), 401),
        (bearer(KEYS[0].sha256), 401),
        (bearer("team-a"), 401),
        (bearer("\u00e9\u0660"), 401),
        ({"Authorization": "Bearer"}, 401),
        ({"Authorization": ""}, 401),
        ({"Authorization": "secret-a"}, 401),
        ({"x-api-key": ""}, 401),
        ({"Cookie": "key=secret-a"}, 401),
    ],
)
async def test_what_counts_as_a_key(keyed: Rig, headers: dict[str, str], status: int) -> None:
    keyed.generator.will(*one_by_one([50]))
    assert (await keyed.post(CHAT, BODY, headers))[0] == status
    assert len(keyed.generator.requests) == (1 if status == 200 else 0)


async def test_requests_carry_the_key_id_its_weight_and_its_salt(serve: Serve) -> None:
    keyed, shared = await serve(gate=key_gate()), await serve(gate=key_gate(shared=True))
    for rig in (keyed, shared):
        rig.generator.will(*one_by_one([50]))
    salts = []
    for rig, secret, fields in (
        (keyed, "secret-a", {}),
        (keyed, "secret-a", {}),
        (keyed, "secret-c", {}),
        (keyed, "secret-a", {"cache_salt": "x"}),
        (keyed, "secret-c", {"cache_salt": "x"}),
        (shared, "secret-a", {}),
        (shared, "secret-c", {}),
        (shared, "secret-a", {"cache_salt": "x"}),
        (shared, "secret-c", {"cache_salt": "x"}),
    ):
        for path, body in ((CHAT, BODY), ("/v1/completions", {"prompt": "hi"})):
            assert (await rig.post(path, {**body, **fields}, bearer(secret)))[0] == 200
        *_, one, two = rig.generator.requests
        assert one.client == two.client == {"secret-a": "team-a", "secret-c": "team-c"}[secret]
        assert one.weight == two.weight == {"secret-a": 1, "secret-c": 3}[secret]
        assert one.salt == two.salt
        salts.append(one.salt)
    a, again, c, a_x, c_x, shared_a, shared_c, shared_a_x, shared_c_x = salts
    assert a == again
    assert shared_a == shared_c == b""
    assert shared_a_x == shared_c_x
    assert len({a, c, a_x, c_x, shared_a, shared_a_x}) == 6
    # Nodes may publish hashes that begin with the salt: whoever knows the id of a key cannot guess it.
    assert not {a, a_x} & {cache_salt("team-a", None), cache_salt("team-a", "x")}


def test_salts_are_short_and_unambiguous() -> None:
    given = [("a", None), ("a", "b"), ("ab", None), ("", "ab"), ("", "a"), ("a", "")]
    salts = {cache_salt(tenant, asked) for tenant, asked in given}
    assert len(salts) == len(given)
    assert {len(salt) for salt in salts} == {16}
    assert cache_salt("", None) == b""


async def test_without_keys_the_client_is_its_address(rig: Rig) -> None:
    rig.generator.will(delta([50], "stop"))
    assert (await rig.post(CHAT, BODY))[0] == 200
    (asked,) = rig.generator.requests
    assert (asked.client, asked.salt) == ("127.0.0.1", b"")


async def test_what_each_scope_is_shown(serve: Serve) -> None:
    public, admin = await serve(gate=key_gate()), await serve(gate=key_gate(scope="admin"))
    owner = await serve(gate=OwnerGate())

    async def view(rig: Rig, secret: str) -> str:
        status, text = await get(rig, "/server_info", bearer(secret))
        return json.loads(text)["view"] if status == 200 else str(status)

    assert await view(public, "secret-a") == "SERVICE"
    assert await view(public, "secret-ops") == await view(public, "secret-both") == "CLUSTER"
    assert await view(admin, "secret-ops") == await view(owner, "none") == "OPERATOR"
    assert await view(admin, "secret-a") == "403"
    assert await view(admin, "none") == "401"
    assert (await get(public, "/metrics", bearer("secret-a")))[0] == 403
    assert (await get(public, "/metrics", bearer("secret-ops")))[0] == 200
    # Clients that only use the service see no file paths.
    for path in ("/v1/models", "/v1/models/tiny-target", "/model_info"):
        assert "deploy/tiny_models" not in (await get(public, path, bearer("secret-a")))[1]
        assert "deploy/tiny_models" in (await get(public, path, bearer("secret-both")))[1]


async def test_probes_without_a_key_learn_no_names(serve: Serve) -> None:
    keyed, owner = await serve(gate=key_gate()), await serve(gate=OwnerGate())
    for rig in (keyed, owner):
        rig.missing = [{"name": "decode-1", "role": "decode"}]
    assert json.loads((await get(keyed, "/ready"))[1]) == {"status": "degraded"}
    assert "decode-1" in (await get(owner, "/ready"))[1]
    keyed.ready = "no decode node is up; expected back: decode-1"
    assert await get(keyed, "/ready") == (503, '{"status":"not ready"}')


async def test_a_timeline_is_shown_to_its_own_client(keyed: Rig) -> None:
    for secret, status in (("secret-a", 200), ("secret-c", 404), ("secret-ops", 200)):
        assert (await get(keyed, "/requests/known", bearer(secret)))[0] == status


async def test_open_metrics(serve: Serve) -> None:
    keyed = await serve(gate=key_gate(open_metrics=True))
    assert (await get(keyed, "/metrics"))[0] == 200
    assert (await get(keyed, "/server_info"))[0] == 401
    everywhere = HostRule(("127.0.0.1",), Cors(()))
    for allowed, status in ((True, 200), (False, 403)):
        rig = await serve(gate=OpenGate(everywhere, View.SERVICE, open_metrics=allowed))
        assert (await get(rig, "/metrics"))[0] == status


async def test_refused_clients_are_logged_once_a_second_without_their_keys(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    rig = await serve(gate=key_gate())
    for _ in range(50):
        assert (await rig.post(CHAT, BODY, bearer("wrong-secret")))[0] == 401
    found = [record for record in caplog.records if record.getMessage() == "refused a client"]
    assert 1 <= len(found) < 50
    assert "127.0.0.1" in str(found[0].__dict__)
    assert "wrong-secret" not in "".join(str(record.__dict__) for record in found)


async def test_every_refused_client_is_counted_in_one_line(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    entrance = Entrance(key_gate(), Cors(()), Log("test"), clock)

    async def handler(request: web.Request) -> web.StreamResponse:
        raise AssertionError("no key was given")

    async def refused() -> None:
        request = make_mocked_request("POST", CHAT)
        request[request_id_key] = "r"
        with pytest.raises(Unauthorized):
            await entrance.middleware(request, handler)

    for count in (1, 3, 2):
        for _ in range(count):
            await refused()
        clock.now += LOG_SECONDS
    await entrance.close(web.Application())
    fields = [vars(record)["fields"] for record in caplog.records]
    assert [each.get("refused") for each in fields] == [1, 1, 3, None]
    assert fields[-1] == {"count": 1}


def test_all_keys_are_compared_whichever_matches(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time of a look-up must not tell which keys exist."""
    compared: list[bytes] = []

    def compare(expected: bytes, given: bytes) -> bool:
        compared.append(expected)
        return expected == given

    monkeypatch.setattr("router.auth.keys.hmac.compare_digest", compare)
    ring = KeyRing(KEYS, lambda: NOW)
    for secret, found in (
        ("secret-a", KEYS[0]),
        ("secret-both", KEYS[-1]),
        ("wrong", None),
        ("secret-b", None),
    ):
        compared.clear()
        assert ring.find(secret) is found
        assert len(compared) == len(KEYS)
