"""Tests /abort_request, /flush_cache and /load over HTTP: what each client may do."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from router.auth.gates import KeyGate, OpenGate
from router.auth.keys import KeyRing
from router.auth.origin import Cors, HostRule
from router.auth.quotas import Quotas
from router.exchange.host_peers import HostPeers
from router.http.client import View
from router.http.errors import MAX_REQUEST_ID
from tests.fakes.api_keys import api_key, bearer
from tests.fakes.clock import Clock
from tests.unit.router.auth.test_gates import NOW, key_gate
from tests.unit.router.conftest import Rig, Serve
from tests.unit.router.dispatch.test_running_requests import flight

RESET = "/reset_prefix_cache"


async def send(
    rig: Rig, path: str, body: Any = None, headers: dict[str, str] | None = None
) -> tuple[int, str]:
    async with rig.session.post(rig.url + path, json=body, headers=headers) as response:
        return response.status, await response.text()


async def load(rig: Rig, headers: dict[str, str] | None = None) -> int:
    async with rig.session.get(rig.url + "/load", headers=headers) as response:
        assert response.status == 200
        return int((await response.json())["server_load"])


async def test_a_key_reaches_its_own_requests_only(serve: Serve) -> None:
    rig = await serve(gate=key_gate())
    mine, other = flight("r1", "team-a"), flight("r1", "team-c")
    for each in (mine, other, flight("r2", "team-c")):
        rig.running.add(each)
    rig.active = 3
    assert (await load(rig, bearer("secret-a")), await load(rig, bearer("secret-ops"))) == (1, 3)
    # an unknown id is no error: the request may just have ended
    assert await send(rig, "/abort_request", {"rid": "r2"}, bearer("secret-a")) == (200, "")
    assert await send(rig, "/abort_request", {"rid": "chatcmpl-r1"}, bearer("secret-a")) == (200, "")
    assert (mine.aborted, other.aborted) == (True, False)
    for path, body in (("/abort_request", {"abort_all": True}), ("/flush_cache", None), (RESET, None)):
        status, text = await send(rig, path, body, bearer("secret-a"))
        assert status == 403
        assert "scope admin" in text
    assert not other.aborted
    assert await send(rig, "/abort_request", {"abort_all": True}, bearer("secret-ops")) == (200, "")
    assert other.aborted
    rig.active = 0
    assert (await send(rig, "/flush_cache", None, bearer("secret-ops")))[0] == 200
    assert (await send(rig, RESET, None, bearer("secret-ops")))[0] == 200


async def test_vllms_names_do_the_same(serve: Serve) -> None:
    rig = await serve(gate=key_gate())
    longest = "x" * MAX_REQUEST_ID
    flights = [flight(name, "team-a") for name in ("r1", "r2", "r3", longest)]
    other = flight("r1", "team-c")
    for each in (*flights, other):
        rig.running.add(each)
    body = {"request_ids": ["generate-tokens-r1", "r3", "unknown", f"cmpl-{longest}"]}
    assert await send(rig, "/abort_requests", body, bearer("secret-a")) == (200, "")
    assert [each.aborted for each in (*flights, other)] == [True, False, True, True, False]
    status, text = await send(rig, f"{RESET}?reset_running_requests=true", None, bearer("secret-ops"))
    assert (status, rig.flushes) == (400, 0)
    assert "reset_running_requests is not supported" in text
    query = f"{RESET}?reset_running_requests=false&reset_external=true"
    assert (await send(rig, query, None, bearer("secret-ops")))[0] == 200
    assert rig.flushes == 1


@pytest.mark.parametrize("ids", [None, [], "r1", ["x"] * 129])
async def test_an_abort_of_several_lists_them(rig: Rig, ids: Any) -> None:
    status, answer, _ = await rig.post("/abort_requests", {"request_ids": ids})
    assert (status, answer["error"]["param"]) == (400, "request_ids")


async def test_a_client_at_its_limit_can_abort(serve: Serve) -> None:
    key = api_key("secret-a", "team-a", concurrency=1)
    quotas = Quotas(Clock())
    quotas.of(key).occupy(1)
    rig = await serve(gate=KeyGate(KeyRing([key], lambda: NOW), quotas, None, False, False))
    headers = bearer("secret-a")
    assert (await send(rig, "/tokenize", {"prompt": "x"}, headers))[0] == 429
    assert await send(rig, "/abort_request", {"rid": "r1"}, headers) == (200, "")


async def test_open_clusters_on_public_addresses_share_no_rights(serve: Serve) -> None:
    rig = await serve(gate=OpenGate(HostRule(("x",), Cors(())), View.SERVICE, open_metrics=False))
    rig.active = 2
    assert await load(rig) == 0
    assert (await send(rig, "/flush_cache"))[0] == 403
    assert not rig.flushes


@pytest.mark.parametrize("body", [{}, {"rid": None}, {"rid": ""}, {"rid": 5}, {"rid": "x" * 257}])
async def test_an_abort_names_a_request(rig: Rig, body: Any) -> None:
    status, answer, _ = await rig.post("/abort_request", body)
    assert (status, answer["error"]["param"]) == (400, "rid")


async def test_a_flush_needs_an_idle_cluster(rig: Rig) -> None:
    rig.active = 1
    status, text = await send(rig, "/flush_cache")
    assert (status, rig.flushes) == (400, 0)
    assert "requests are in flight" in text
    waiting = asyncio.create_task(send(rig, "/flush_cache?timeout=60"))
    await asyncio.sleep(0.1)
    rig.active = 0
    assert (await waiting)[0] == 200
    rig.unreached = ["decode-0"]
    status, text = await send(rig, "/flush_cache")
    assert (status, rig.flushes) == (503, 2)
    assert "decode-0" in text


async def test_a_flush_concerns_all_processes_of_the_host(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each knows for itself which prefixes nodes hold, and may reach other nodes."""

    async def flush(peers: HostPeers) -> set[str]:
        return {"prefill-1", "decode-0"}

    monkeypatch.setattr(HostPeers, "flush", flush)
    rig.unreached = ["decode-0"]
    status, text = await send(rig, "/flush_cache")
    assert (status, rig.flushes) == (503, 1)
    assert text.endswith(": decode-0, prefill-1\n")


@pytest.mark.parametrize("timeout", ["-1", "nan", "inf", "61", "x", ""])
async def test_a_timeout_is_bounded(rig: Rig, timeout: str) -> None:
    status, text = await send(rig, f"/flush_cache?timeout={timeout}")
    assert status == 400
    assert "timeout must be a number from 0 to 60" in text
