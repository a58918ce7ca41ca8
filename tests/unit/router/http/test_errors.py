"""Errors, request ids, media types, and raw HTTP that no client library would send."""

from __future__ import annotations

import asyncio
import gc
import gzip
import json
import logging

import aiohttp.http_parser
import pytest
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from common.errors import (
    DeadlineExceeded,
    Forbidden,
    InternalError,
    Overloaded,
    RateLimited,
    RequestError,
    TransferFailed,
    Unauthorized,
    Unavailable,
)
from router.server.http_server import http_runner
from tests.fakes.waiting import PATIENCE
from tests.unit.router.conftest import MAX_BODY, Rig
from tests.unit.router.scripted_generator import one_by_one

CHAT = "/v1/chat/completions"
BODY = {"messages": [{"role": "user", "content": "hi"}]}
RAW = json.dumps(BODY).encode()


async def exchange(rig: Rig, raw: bytes) -> bytes:
    """Return what the server answers to exactly these bytes, until it closes."""
    reader, writer = await asyncio.open_connection(rig.host, rig.port)
    writer.write(raw)
    answer = b""
    try:
        async with asyncio.timeout(PATIENCE):
            while part := await reader.read(65536):
                answer += part
    except ConnectionError:
        pass
    writer.transport.abort()
    return answer


def test_the_c_parser_is_used() -> None:
    assert aiohttp.http_parser.HttpRequestParser.__module__ == "aiohttp._http_parser"


@pytest.mark.parametrize("error", [Overloaded("x"), Unavailable("x"), TransferFailed("x")])
@pytest.mark.parametrize("stream", [False, True])
async def test_503_says_when_to_retry(rig: Rig, error: RequestError, stream: bool) -> None:
    rig.generator.will(error)
    status, answer, headers = await rig.post(CHAT, {**BODY, "stream": stream})
    assert status == 503
    assert headers["retry-after"] == "1"
    assert headers["x-should-retry"] == "true"
    assert headers["content-type"].startswith("application/json")
    assert answer["error"]["code"] == type(error).code
    assert headers["x-request-id"]


async def test_429_says_when_the_limit_allows_it(rig: Rig) -> None:
    rig.generator.will(RateLimited("x", retry_after=2.1))
    status, answer, headers = await rig.post(CHAT, BODY)
    assert (status, headers["retry-after"], headers["x-should-retry"]) == (429, "3", "true")
    assert answer["error"]["code"] == "rate_limit_exceeded"


async def test_401_and_403_have_openai_codes(rig: Rig) -> None:
    rig.generator.will(Unauthorized("x"))
    status, answer, headers = await rig.post(CHAT, BODY)
    assert (status, answer["error"]["code"], headers["www-authenticate"]) == (
        401,
        "invalid_api_key",
        "Bearer",
    )
    rig.generator.scripts = [[Forbidden("x")]]
    status, answer, _ = await rig.post(CHAT, BODY)
    assert (status, answer["error"]["code"]) == (403, "permission_denied")


async def test_other_statuses_do_not(rig: Rig) -> None:
    """OpenAI's clients repeat every 408 and 5xx unless told not to."""
    for error, status in ((DeadlineExceeded("x"), 408), (InternalError("x"), 500)):
        rig.generator.scripts = [[error]]
        found, _, headers = await rig.post(CHAT, BODY)
        assert found == status
        assert "retry-after" not in headers
        assert headers["x-should-retry"] == "false"
    for path, status in (("/nothing", 404), ("/v1/models", 405), (CHAT, 400)):
        found, _, headers = await rig.post(path, {})
        assert (found, headers["x-should-retry"]) == (status, "false")


async def test_nothing_new_while_draining(rig: Rig) -> None:
    rig.refusal = Unavailable("shutting down")
    for path, body in ((CHAT, BODY), ("/v1/completions", {"prompt": "x"})):
        status, _, headers = await rig.post(path, body)
        assert (status, headers["retry-after"]) == (503, "1")
    assert not rig.generator.requests


@pytest.mark.parametrize(
    ("given", "used"),
    [
        ("abc-123_x.y:z/=+", "abc-123_x.y:z/=+"),
        ("a b\tc", "abc"),
        ("evil\"<script>'", "evilscript"),
        ("é€x", "x"),
        ("x" * 500, "x" * 128),
        ("!" * 500 + "x", "x"),
        ("", None),
        ("!!!", None),
    ],
)
async def test_a_request_id_is_echoed_or_made(rig: Rig, given: str, used: str | None) -> None:
    rig.generator.will(*one_by_one([10]))
    for body, status in ((BODY, 200), ({}, 400)):
        raw = (
            f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json\r\n"
            f"X-Request-Id: {given}\r\nContent-Length: {len(json.dumps(body))}\r\n\r\n{json.dumps(body)}"
        ).encode()
        head = (await exchange(rig, raw)).decode().split("\r\n\r\n")[0]
        assert f" {status} " in head
        [found] = [line[14:] for line in head.split("\r\n") if line.startswith("X-Request-Id: ")]
        assert found == used if used else len(found) == 24


async def test_fresh_ids_differ(rig: Rig) -> None:
    found = [(await rig.post(CHAT, {}))[2]["x-request-id"] for _ in range(5)]
    assert len(set(found)) == 5


async def test_unknown_routes_and_methods(rig: Rig) -> None:
    for method, path, status in (
        ("GET", "/nothing", 404),
        ("POST", "/v1/nothing", 404),
        ("POST", "/generation", 404),
        ("GET", "/workers", 404),
        ("GET", "/%ff%00", 404),
        ("GET", "/../../etc/passwd", 404),
        ("GET", CHAT, 405),
        ("DELETE", CHAT, 405),
        ("POST", "/v1/models", 405),
        ("POST", "/metrics", 405),
        ("OPTIONS", CHAT, 405),
    ):
        async with rig.session.request(method, rig.url + path) as response:
            answer = await response.json()
            assert (response.status, answer["error"]["code"]) == (status, status), path
            assert set(answer["error"]) == {"message", "type", "param", "code"}
            assert response.headers["X-Request-Id"]
            assert ("Allow" in response.headers) == (status == 405)
    async with rig.session.head(rig.url + CHAT) as response:
        assert response.status == 405


@pytest.mark.parametrize(
    "kind",
    [
        None,
        "text/plain",
        "application/x-www-form-urlencoded",
        "multipart/form-data; boundary=x",
        "text/json",
        "x",
    ],
)
async def test_other_media_types_are_refused(rig: Rig, kind: str | None) -> None:
    """A web page can send these to another site without a CORS preflight, but not JSON."""
    line = f"Content-Type: {kind}\r\n" if kind else ""
    for path in (CHAT, "/v1/completions", "/tokenize", "/detokenize"):
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n{line}Content-Length: {len(RAW)}\r\n\r\n"
        answer = await exchange(rig, head.encode() + RAW)
        assert b" 415 " in answer.split(b"\r\n")[0]
        assert b"Content-Type: application/json" in answer
    assert not rig.generator.requests


async def test_json_with_a_charset(rig: Rig) -> None:
    rig.generator.will(*one_by_one([10]))
    for kind in ("application/json; charset=utf-8", "Application/JSON"):
        assert (await rig.post(CHAT, RAW, {"Content-Type": kind}))[0] == 200


async def test_compressed_bodies_are_not_taken_and_not_unpacked(rig: Rig) -> None:
    bomb = gzip.compress(b" " * 50_000_000)
    assert len(bomb) < 100_000
    for raw in (gzip.compress(RAW), bomb):
        status, answer, _ = await rig.post(CHAT, raw, {"Content-Encoding": "gzip"})
        assert (status, answer["error"]["type"]) == (415, "invalid_request_error")


HEAD = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
LENGTH = f"Content-Length: {len(RAW)}\r\n"


@pytest.mark.parametrize(
    ("status", "head"),
    [
        (400, f"{HEAD}{LENGTH}Transfer-Encoding: chunked\r\n\r\n"),
        (400, f"{HEAD}{LENGTH}Content-Length: 5\r\n\r\n"),
        (400, f"{HEAD}Content-Length: -1\r\n\r\n"),
        (400, f"{HEAD}Content-Length: +5\r\n\r\n"),
        (400, f"{HEAD}Transfer-Encoding: chunked, gzip\r\n\r\n"),
        (431, f"{HEAD}{LENGTH}A: {'x' * 20_000}\r\n\r\n"),
        (431, f"{HEAD}{LENGTH}" + "".join(f"A{i}: x\r\n" for i in range(150)) + "\r\n"),
        (400, f"{HEAD}{LENGTH}A b: x\r\n\r\n"),
        (400, f"{HEAD}{LENGTH}A: x\0y\r\n\r\n"),
        (431, f"POST /{'x' * 20_000} HTTP/1.1\r\nHost: x\r\n{LENGTH}\r\n"),
        (400, f"POST {CHAT} HTTP/9.9\r\n{LENGTH}\r\n"),
        (400, "\x16\x03\x01\x02\0\x01\0\x01\xfc\x03\x03"),
    ],
)
async def test_broken_http_is_refused(
    rig: Rig, status: int, head: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody can fill the log with such requests."""
    rig.generator.will(*one_by_one([10]))
    answer = await exchange(rig, head.encode("latin-1") + RAW)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    lines, _, body = answer.partition(b"\r\n\r\n")
    assert f" {status} ".encode() in lines.split(b"\r\n")[0], answer[:200]
    for line in (
        b"Content-Type: application/json",
        b"X-Request-Id: ",
        b"x-should-retry: false",
        b"Connection: close",
    ):
        assert line in lines
    told = json.loads(body)["error"]
    assert (told["type"], told["code"], told["param"]) == ("invalid_request_error", status, None)
    assert not rig.generator.requests
    assert (await rig.post(CHAT, BODY))[0] == 200  # other clients are served


CHUNKS = f"{len(RAW):x}\r\n{RAW.decode()}\r\n0\r\n\r\n"
GET = "GET /live HTTP/1.1\r\nHost: x\r\n"
LARGE = MAX_BODY + 1
# What aiohttp or llhttp refuses, or would accept although it should not: (status, bytes).
REFUSED_BY_THE_SERVER: list[tuple[int, str]] = [
    (501, f"{HEAD}Transfer-Encoding: gzip, chunked\r\n\r\n{CHUNKS}"),
    (501, f"{HEAD}Transfer-Encoding: deflate , Chunked\r\n\r\n{CHUNKS}"),
    (501, f"POST /nothing HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: gzip, chunked\r\n\r\n{CHUNKS}"),
    (400, f"{HEAD}Transfer-Encoding: gzip\r\n\r\n{CHUNKS}"),
    (400, f"{HEAD}Transfer-Encoding: identity\r\n\r\n{CHUNKS}"),
    (400, f"{HEAD}Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n{CHUNKS}"),
    (400, f"{HEAD}Transfer-Encoding: gzip\r\nTransfer-Encoding: chunked\r\n\r\n{CHUNKS}"),
    (400, f"{HEAD}Transfer-Encoding: xchunked\r\n\r\n{CHUNKS}"),
    (400, f"{HEAD}Transfer-Encoding:\r\n\r\n{CHUNKS}"),
    (400, f"{HEAD}Transfer-Encoding: chunked\r\n{LENGTH}\r\n{CHUNKS}"),
    (400, f"{HEAD}Transfer-Encoding: chunked\r\n\r\nzz\r\n"),
    (431, f"{HEAD}Transfer-Encoding: chunked\r\n\r\n0\r\n" + "A: b\r\n" * 3000 + "\r\n"),
    (400, f"{HEAD}Content-Length: 99999999999999999999999\r\n\r\n"),
    (413, f"{HEAD}Connection: close\r\nContent-Length: {LARGE}\r\n\r\n" + "x" * LARGE),
    (
        413,
        f"{HEAD}Connection: close\r\nTransfer-Encoding: chunked\r\n\r\n{LARGE:x}\r\n{'x' * LARGE}\r\n0\r\n\r\n",
    ),
    (417, f"{HEAD}{LENGTH}Expect: 200-ok\r\n\r\n{RAW.decode()}"),
    (417, f"{GET}Expect: nonsense\r\n\r\n"),
    (417, "GET /nothing HTTP/1.1\r\nHost: x\r\nExpect: nonsense\r\n\r\n"),
    (505, "GET /live\r\n\r\n"),
    (400, "GET /live HTTP/1.2\r\nHost: x\r\n\r\n"),
    (400, "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"),
    (400, "BREW /live HTTP/1.1\r\nHost: x\r\n\r\n"),
    (400, "get /live HTTP/1.1\r\nHost: x\r\n\r\n"),
    (400, "GET /live HTTP/1.1\r\n\r\n"),
    (400, f"{GET}Host: y\r\n\r\n"),
    (400, f"{GET}A : b\r\n\r\n"),
    (400, f"{GET} folded\r\n\r\n"),
    (400, "GET /live HTTP/1.1\nHost: x\n\n"),
    (400, "GET /live\x01 HTTP/1.1\r\nHost: x\r\n\r\n"),
    (400, "GET http://[::1/live HTTP/1.1\r\nHost: x\r\n\r\n"),
    (431, f"{GET}A: {'x' * 20_000}\r\n\r\n"),
    (431, GET + "A: b\r\n" * 200 + "\r\n"),
    (431, f"GET /{'x' * 20_000} HTTP/1.1\r\nHost: x\r\n\r\n"),
    (404, "GET /nothing HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"),
    (404, "OPTIONS * HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"),
    (404, "CONNECT x:80 HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"),
    (405, "PROPFIND /live HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"),
    (
        415,
        f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: ;;\r\n{LENGTH}\r\n{RAW.decode()}",
    ),
]


@pytest.mark.parametrize("case", range(len(REFUSED_BY_THE_SERVER)))
async def test_every_error_of_the_http_library_has_openais_shape(rig: Rig, case: int) -> None:
    status, sent = REFUSED_BY_THE_SERVER[case]
    answer = await exchange(rig, sent.encode("latin-1"))
    head, _, body = answer.partition(b"\r\n\r\n")
    lines = head.split(b"\r\n")
    assert lines[0].split(b" ")[1] == str(status).encode(), (sent[:200], answer[:300])
    assert b"Content-Type: application/json" in lines
    assert b"x-should-retry: false" in lines
    # Nothing tells which library serves, let alone its version.
    assert [line for line in lines if line.startswith(b"Server: ")] == [b"Server: tandem"]
    assert [line for line in lines if line.startswith(b"X-Request-Id: ")]
    told = json.loads(body)["error"]  # nothing follows it: smuggled bytes get no second answer
    assert set(told) == {"message", "type", "param", "code"}
    assert (told["type"], told["code"]) == ("invalid_request_error", status)
    assert not rig.generator.requests


async def test_a_head_that_is_too_large_is_told_its_limits(rig: Rig) -> None:
    """A long token or many cookies are no broken HTTP: the client has to learn what to shorten."""
    for sent, limit in (
        (f"{GET}Authorization: Bearer {'x' * 20_000}\r\n\r\n", "longer than 16384 bytes"),
        (f"GET /{'x' * 20_000} HTTP/1.1\r\nHost: x\r\n\r\n", "longer than 16384 bytes"),
        (GET + "A: b\r\n" * 200 + "\r\n", "more than 100 headers"),
    ):
        _, _, body = (await exchange(rig, sent.encode())).partition(b"\r\n\r\n")
        assert limit in json.loads(body)["error"]["message"]


async def test_a_stream_over_http_1_0_ends_with_its_connection(rig: Rig) -> None:
    """Such a client knows no chunks: if it asked to keep the connection, it would wait for more until it times out."""
    rig.generator.will(*one_by_one([10]))
    body = json.dumps({**BODY, "stream": True}).encode()
    head = f"POST {CHAT} HTTP/1.0\r\nConnection: keep-alive\r\nContent-Type: application/json\r\n"
    answer = await exchange(rig, f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    assert answer.endswith(b"data: [DONE]\n\n")


async def test_chunked_bodies_and_expectations_are_taken(rig: Rig) -> None:
    rig.generator.will(*one_by_one([10]))
    close = "Connection: close\r\n"
    for head, body in (
        ("Transfer-Encoding: chunked\r\n", CHUNKS),
        ("transfer-encoding: Chunked \r\n", CHUNKS),
        (f"Expect: 100-Continue\r\n{LENGTH}", RAW.decode()),
    ):
        answer = await exchange(rig, f"{HEAD}{close}{head}\r\n{body}".encode())
        assert b"HTTP/1.1 200 OK" in answer, (head, answer)


@pytest.mark.parametrize("sent", [b"", HEAD.encode(), b"GET / HTTP/1.1\r\nHost: x\r\n\r\nGET / HT"])
async def test_a_connection_without_a_request_is_closed(sent: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """The connection sends no bytes, or a head that never ends; either also after a request that was answered."""
    monkeypatch.setattr("router.server.http_server.IDLE_SECONDS", 0.05)
    runner = http_runner(web.Application())
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        reader, writer = await asyncio.open_connection(*runner.addresses[0][:2])
        writer.write(sent)
        answer = await asyncio.wait_for(reader.read(), PATIENCE)
        assert answer.startswith(b"HTTP/1.1 404") if b"\r\n\r\n" in sent else not answer
        writer.close()
    finally:
        await runner.cleanup()


async def test_long_messages_are_cut(rig: Rig) -> None:
    rig.generator.will(InternalError("x" * 100_000))
    _, answer, _ = await rig.post(CHAT, BODY)
    assert len(answer["error"]["message"]) < 1100


async def test_http_1_0_and_keep_alive(rig: Rig) -> None:
    rig.generator.will(*one_by_one([10]))
    raw = f"POST {CHAT} HTTP/1.0\r\nContent-Type: application/json\r\n{LENGTH}\r\n".encode() + RAW
    assert b" 200 " in (await exchange(rig, raw)).split(b"\r\n")[0]
    raw, last = (f"{HEAD}{LENGTH}{line}\r\n".encode() + RAW for line in ("", "Connection: close\r\n"))
    assert (await exchange(rig, raw + last)).count(b"HTTP/1.1 200 OK") == 2  # pipelined


async def test_broken_requests_leave_nothing_for_the_garbage_collector(rig: Rig) -> None:
    """Errors of broken requests quote what was sent, so they must not wait for the garbage collector."""
    gc.collect()
    gc.disable()
    try:
        for _ in range(5):
            reader, writer = await asyncio.open_connection(rig.host, rig.port)
            writer.write(b"\x00\xff" * 50_000)
            assert b" 400 " in await reader.read()
            writer.close()
        assert not [each for each in gc.get_objects() if issubclass(type(each), HttpProcessingError)]
    finally:
        gc.enable()
