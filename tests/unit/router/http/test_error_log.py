"""Whoever is called at night can see which requests were answered with an error, and why."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from common.errors import ClientGone, Forbidden, InvalidRequest, RequestError, Unavailable
from common.observability import bounded_log
from common.observability.logs import Log
from router.auth.gates import OpenGate
from router.auth.origin import Cors, HostRule
from router.http.client import Client, View, client_key
from router.http.error_log import ErrorLog
from router.http.errors import error_middleware
from router.server.listeners import application
from tests.fakes.waiting import eventually

ERRORS: dict[str, RequestError] = {
    "wrong": InvalidRequest("n must be from 1 to 8" + "x" * 1000, param="n"),
    "busy": Unavailable("no decode node is up"),
    "gone": ClientGone("the client left"),
}
Asking = TestClient[web.Request, web.Application]


@pytest.fixture
async def client(caplog: pytest.LogCaptureFixture) -> AsyncIterator[Asking]:
    async def refuse(request: web.Request) -> web.Response:
        if request.match_info["what"] == "strange":
            raise Forbidden("the gate has refused it, and has logged that")
        request[client_key] = Client("somebody", View.SERVICE)
        raise ERRORS[request.match_info["what"]]

    app = web.Application(middlewares=[error_middleware(Log("test"), ErrorLog(Log("test")))])
    app.router.add_get("/ask/{what}", refuse)
    with caplog.at_level(logging.INFO):
        async with TestClient(TestServer(app)) as asking:
            yield asking


def lines(caplog: pytest.LogCaptureFixture) -> list[tuple[str, str, dict[str, Any]]]:
    return [
        (record.levelname, record.getMessage(), vars(record)["fields"])
        for record in caplog.records
        if "fields" in vars(record)
    ]


async def test_a_line_says_who_got_which_error(client: Asking, caplog: pytest.LogCaptureFixture) -> None:
    for what in ("wrong", "busy", "gone", "strange"):
        await client.get(f"/ask/{what}", headers={"X-Request-Id": f"id-{what}"})
    refused, failed = lines(caplog)
    about = {"peer": "somebody", "route": "/ask/{what}"}
    reason = str(ERRORS["wrong"])[:300]
    same: dict[str, Any] = {"request_id": "id-wrong", "status": 400, "param": "n", "reason": reason}
    assert refused == ("INFO", "refused a request", about | same)
    same = {"request_id": "id-busy", "status": 503, "reason": "no decode node is up"}
    assert failed == ("WARNING", "failed a request", about | same)


async def test_a_client_that_errs_often_hides_no_failure(
    client: Asking, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.http.flushed_logs.WINDOW", 0.2)
    monkeypatch.setattr(bounded_log, "WINDOW", 600.0)  # not over before the twenty are written
    for _ in range(20):
        await client.get("/ask/wrong")
    await client.get("/ask/busy")
    written = [event for _, event, _ in lines(caplog)]
    assert written.count("failed a request") == 1
    assert written.count("refused a request") == bounded_log.FIRST
    monkeypatch.setattr(bounded_log, "WINDOW", 0.2)
    await client.get("/ask/busy")
    # The rest is counted, although nobody asks any more.
    await eventually(lambda: sum(count(fields) for _, _, fields in lines(caplog)) == 22)


@pytest.mark.parametrize("host", ["localhost", "foreign.example"])
async def test_a_router_that_ends_logs_what_it_has_only_counted(
    host: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unknown paths are refused by the application, and foreign hosts by its gate."""
    monkeypatch.setattr(bounded_log, "WINDOW", 600.0)  # not over before the router ends
    caplog.set_level(logging.INFO)
    gate = OpenGate(HostRule(("127.0.0.1",), Cors(())), View.SERVICE, open_metrics=False)
    app = application(gate, Cors(()), 1024, Log("test"), ())
    async with TestClient(TestServer(app)) as asking:
        for _ in range(20):
            await asking.get("/nowhere", headers={"Host": host})
        assert 1 <= sum(count(fields) for _, _, fields in lines(caplog)) < 20
    assert sum(count(fields) for _, _, fields in lines(caplog)) == 20


def count(fields: dict[str, Any]) -> int:
    found = fields.get("count", fields.get("refused", 1))
    assert isinstance(found, int)
    return found
