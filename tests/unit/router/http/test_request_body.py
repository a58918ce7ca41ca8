"""Bodies that are being received are bounded together, and none stays counted."""

from __future__ import annotations

import asyncio
import codecs
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, nullcontext

import pytest
from aiohttp import web

from common.observability.logs import Log
from router.http import body_memory, request_body
from router.http.body_memory import SMALL_BODY, BodyMemory, Reservation
from router.http.error_log import ErrorLog
from router.http.errors import error_middleware
from router.http.request_body import PIECES_PER_TURN, Received, memory_key, received
from router.server import http_server
from router.server.http_server import PARSED_AT_ONCE, READ_BUFFER, http_runner
from tests.fakes.turn_count import counting_turns
from tests.fakes.waiting import PATIENCE, eventually

HEAD = b"POST / HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
HEAD += b"Content-Length: %d\r\n\r\n"
Handler = Callable[[web.Request], Awaitable[web.Response]]


async def size_of_body(request: web.Request) -> web.Response:
    async with received(request) as memory:
        return web.json_response({"bytes": len(memory.take())})


@asynccontextmanager
async def serving(handler: Handler, most: int) -> AsyncIterator[tuple[web.Application, tuple[str, int]]]:
    """Serve an application that takes bodies of up to `most` bytes; yield its address."""
    app = web.Application(
        client_max_size=most, middlewares=[error_middleware(Log("test"), ErrorLog(Log("test")))]
    )
    app.router.add_post("/", handler)
    runner = http_runner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield app, runner.addresses[0][:2]
    finally:
        await runner.cleanup()


async def ask(address: tuple[str, int], request: bytes) -> tuple[int, dict[str, object], bytes]:
    """Return status, body and head of the answer. The server may wait for the rest of an unfinished request."""
    reader, writer = await asyncio.open_connection(*address)
    writer.write(request)
    async with asyncio.timeout(PATIENCE):
        head = await reader.readuntil(b"\r\n\r\n")
        [length] = re.findall(rb"(?i)\r\ncontent-length: (\d+)", head)
        body = await reader.readexactly(int(length))
    writer.close()
    return int(head.split()[1]), json.loads(body), head


def post(size: int) -> bytes:
    return HEAD % size + b"x" * size


async def test_a_byte_order_mark_before_a_body_is_dropped() -> None:
    """As Python's json does with bytes, and so vLLM: editors of Windows and PowerShell write one."""

    async def handler(request: web.Request) -> web.Response:
        async with received(request) as memory:
            return web.Response(body=bytes(memory.take()), content_type="application/json")

    async with serving(handler, 2 * SMALL_BODY) as (_, address):
        for sent in (b'{"a": 1}', b'{"a": "\xef\xbb\xbf%b"}' % (b"x" * SMALL_BODY)):
            body = codecs.BOM_UTF8 + sent
            assert (await ask(address, HEAD % len(body) + body))[:2] == (200, json.loads(sent))


async def test_small_bodies_on_their_way_are_bounded_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slow clients never finish; a client that disconnects returns its share."""
    monkeypatch.setattr(body_memory, "MAX_SMALL", 2500)
    async with serving(size_of_body, 2000) as (app, address):
        memory = app[memory_key]
        _, slow = await asyncio.open_connection(*address)
        slow.write(HEAD % 1900 + b"x" * 1800)
        await eventually(lambda: memory.small == 1800)
        status, answer, head = await ask(address, post(1000))
        assert (status, answer["error"]["code"]) == (503, "overloaded")  # type: ignore[index]
        assert b"Retry-After: 1" in head
        assert (await ask(address, post(600)))[:2] == (200, {"bytes": 600})
        slow.close()
        await eventually(lambda: memory.small == 0)
        assert (await ask(address, post(2000)))[:2] == (200, {"bytes": 2000})
        assert (await ask(address, post(2001)))[0] == 413
        assert memory.small == 0


async def test_large_bodies_wait_until_there_is_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """No large body is refused, and together they never reserve more than there is, declared or in chunks."""
    size, most = SMALL_BODY + 1000, SMALL_BODY + 2000
    monkeypatch.setattr(body_memory, "MAX_RESERVED", 2 * most)
    held: list[int] = []

    async def handler(request: web.Request) -> web.Response:
        async with received(request) as body:
            held.append(request.app[memory_key].reserved)
            await asyncio.sleep(0.01)
            return web.json_response({"bytes": len(body.take())})

    chunked = CHUNKED + b"%x\r\n%b\r\n0\r\n\r\n" % (size, b"x" * size)
    async with serving(handler, most) as (app, address):
        answers = await asyncio.gather(*(ask(address, each) for each in [post(size), chunked] * 6))
        assert all(answer[:2] == (200, {"bytes": size}) for answer in answers)
        assert max(held) <= 2 * most
        assert app[memory_key].reserved == app[memory_key].small == 0


async def test_a_large_body_without_memory_is_answered_with_retry_after(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(request_body, "READ_TIMEOUT", 0.05)
    async with serving(size_of_body, 1 << 20) as (app, address):
        await app[memory_key].reserve("another", body_memory.MAX_RESERVED, lambda: None)
        status, answer, head = await ask(address, post(SMALL_BODY + 1))
        assert (status, answer["error"]["code"]) == (503, "overloaded")  # type: ignore[index]
        assert b"Retry-After: 1" in head
        monkeypatch.setattr(request_body, "READ_TIMEOUT", PATIENCE)
        assert (await ask(address, post(10)))[0] == 200


async def test_a_body_of_chunks_that_arrived_with_its_head_waits_for_memory_with_a_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(request_body, "READ_TIMEOUT", 0.05)
    monkeypatch.setattr(request_body, "SMALL_BODY", 10)
    async with serving(size_of_body, 1 << 20) as (app, address):
        other = await app[memory_key].reserve("another", body_memory.MAX_RESERVED, lambda: None)
        chunked = CHUNKED + b"b\r\n%b\r\n0\r\n\r\n" % (b"x" * 11)
        status, answer, _ = await ask(address, chunked)
        assert (status, answer["error"]["code"]) == (503, "overloaded")  # type: ignore[index]
        app[memory_key].release(other)
        monkeypatch.setattr(request_body, "READ_TIMEOUT", PATIENCE)
        assert (await ask(address, chunked))[:2] == (200, {"bytes": 11})


async def test_a_slow_upload_gives_way_to_another_client(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is asked to come again; the body of the other one is read."""
    monkeypatch.setattr(body_memory, "MAX_RESERVED", 2 * SMALL_BODY)
    monkeypatch.setattr(body_memory, "SLOW_SECONDS", 0.0)
    monkeypatch.setattr(body_memory, "LOOK_SECONDS", 0.01)
    async with serving(size_of_body, 2 * SMALL_BODY) as (app, address):
        memory = app[memory_key]
        slow = asyncio.create_task(ask(address, HEAD % (2 * SMALL_BODY) + b"x"))
        await eventually(lambda: memory.reserved)
        other = await memory.reserve("another", SMALL_BODY, lambda: None)
        status, answer, _ = await slow
        assert (status, answer["error"]["code"]) == (503, "overloaded")  # type: ignore[index]
        memory.release(other)
        assert memory.reserved == 0


async def test_tiny_chunks_are_read_over_many_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    size = 200_000
    chunks = b"".join([b"1\r\nx\r\n"] * size) + b"0\r\n\r\n"
    async with serving(size_of_body, 1 << 20) as (_, address), counting_turns() as count:
        add = Received.add

        async def noted(self: Received, piece: bytes) -> None:
            count.note(len(piece))
            await add(self, piece)

        monkeypatch.setattr(Received, "add", noted)
        assert (await ask(address, CHUNKED + chunks))[:2] == (200, {"bytes": size})
    assert count.total == size
    assert count.most <= PIECES_PER_TURN * READ_BUFFER


async def test_a_body_that_is_refused_is_parsed_in_small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """aiohttp reads on after the answer, without a pause for as long as something has arrived."""
    chunks = b"".join([b"1\r\nx\r\n"] * 100_000) + b"0\r\n\r\n"
    fed: list[int] = []
    parse = web.RequestHandler.data_received

    def noted(self: web.RequestHandler, data: bytes) -> None:
        fed.append(len(data))
        parse(self, data)

    monkeypatch.setattr(web.RequestHandler, "data_received", noted)
    async with serving(size_of_body, 1 << 20) as (_, address):
        request = CHUNKED.replace(b"application/json", b"multipart/form-data; boundary=b") + chunks
        assert (await ask(address, request))[0] == 415
    assert sum(fed) == len(request)
    assert max(fed) <= PARSED_AT_ONCE


async def test_pipelined_bodies_wait_in_the_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the end of each body aiohttp reads on, although no limit counts what is received before it is parsed."""
    monkeypatch.setattr(http_server, "EVENT_SECONDS", 0.0)
    received_bytes, parsed_bytes, unparsed = 0, 0, [0]
    kinds: list[type[web.RequestHandler]] = []
    parse = web.RequestHandler.data_received

    async def handler(request: web.Request) -> web.Response:
        kinds.append(type(request.protocol))
        return await size_of_body(request)

    async with serving(handler, 1 << 20) as (_, address):
        await ask(address, post(10))
        receive = kinds[0].data_received

        def noted(self: web.RequestHandler, data: bytes) -> None:
            nonlocal received_bytes
            if data:
                unparsed.append(received_bytes - parsed_bytes)
            received_bytes += len(data)
            receive(self, data)

        def noted_parse(self: web.RequestHandler, data: bytes) -> None:
            nonlocal parsed_bytes
            parsed_bytes += len(data)
            parse(self, data)

        monkeypatch.setattr(kinds[0], "data_received", noted)
        monkeypatch.setattr(web.RequestHandler, "data_received", noted_parse)
        reader, writer = await asyncio.open_connection(*address)
        writer.write(post(20_000).replace(b"Connection: close\r\n", b"") * 100 + post(10))
        answers = await asyncio.wait_for(reader.read(), PATIENCE)
        writer.close()
    assert answers.count(b'{"bytes": 20000}') == 100
    assert answers.endswith(b'{"bytes": 10}')
    # the transport is not paused for a single piece
    assert max(unparsed) <= PARSED_AT_ONCE


@pytest.mark.parametrize("cut", [False, True])
async def test_a_pause_at_the_last_chunk_that_has_arrived_delays_nothing(cut: bool) -> None:
    """aiohttp's parser stays paused then, at the start of the next chunk or of the body of the next request."""
    chunks = b"1\r\nx\r\n" * (READ_BUFFER // 16 + 1)
    rest = b"1\r\ny\r\n" if cut else b""
    async with serving(size_of_body, 1 << 20) as (app, address):
        reader, writer = await asyncio.open_connection(*address)
        writer.write(CHUNKED.replace(b"Connection: close\r\n", b"") + chunks)
        if cut:
            await eventually(lambda: app[memory_key].small == len(chunks) // 6)
        writer.write(rest + b"0\r\n\r\n" + post(10))
        answers = await asyncio.wait_for(reader.read(), PATIENCE)
        writer.close()
    assert answers.count(b"HTTP/1.1 200 OK") == 2
    assert answers.endswith(b'{"bytes": 10}')


async def test_a_body_that_breaks_off_in_a_malformed_chunk_is_refused_at_once() -> None:
    """It is not taken for a shorter one, and nothing that follows is answered."""
    async with serving(size_of_body, 1 << 20) as (app, address):
        reader, writer = await asyncio.open_connection(*address)
        writer.write(CHUNKED.replace(b"Connection: close\r\n", b"") + b"1\r\nx\r\n")
        await eventually(lambda: app[memory_key].small == 1)
        writer.write(b"zz\r\n" + post(10))
        head, body = (await asyncio.wait_for(reader.read(), PATIENCE)).split(b"\r\n\r\n")
        writer.close()
    assert head.startswith(b"HTTP/1.1 400")
    assert b"\r\nConnection: close" in head
    assert "malformed chunk" in json.loads(body)["error"]["message"]
    assert app[memory_key].small == 0


async def test_a_malformed_chunk_after_the_answer_ends_the_connection_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """aiohttp reads the rest of a body for ten seconds after the answer; here without a limit."""

    async def refuse(request: web.Request) -> web.Response:
        return web.json_response({"error": "refused"}, status=413)

    async with serving(refuse, 1 << 20) as (_, address):
        with monkeypatch.context() as patched:
            patched.setattr("aiohttp.web_protocol.ceil_timeout", lambda seconds: nullcontext())
            reader, writer = await asyncio.open_connection(*address)
            writer.write(CHUNKED.replace(b"Connection: close\r\n", b"") + b"1\r\nx\r\n")
            await reader.readuntil(b"refused")
            writer.write(b"1\r\ny\r\nzz\r\n" + post(10))
            async with asyncio.timeout(PATIENCE):
                assert await reader.read() == b'"}', "nothing that follows is answered"
            writer.close()


async def test_a_malformed_chunk_refuses_only_its_own_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """The handler of that request has not begun: it never does. The request before it is answered."""
    proceed = asyncio.Event()
    begun: list[int] = []
    parsed: list[bytes] = []
    parse = web.RequestHandler.data_received

    def noted(self: web.RequestHandler, data: bytes) -> None:
        parse(self, data)
        parsed.append(data)

    monkeypatch.setattr(web.RequestHandler, "data_received", noted)

    async def handler(request: web.Request) -> web.Response:
        async with received(request) as memory:
            begun.append(len(memory.take()))
            await proceed.wait()
            return web.json_response({"bytes": begun[-1]})

    async with serving(handler, 1 << 20) as (_, address):
        reader, writer = await asyncio.open_connection(*address)
        writer.write((post(3) + CHUNKED).replace(b"Connection: close\r\n", b"") + b"1\r\nx\r\n")
        await eventually(lambda: begun)
        writer.write(b"zz\r\n")
        await eventually(lambda: b"zz\r\n" in parsed)
        proceed.set()
        answers = await asyncio.wait_for(reader.read(), PATIENCE)
        writer.close()
    assert begun == [3]
    assert re.findall(rb"HTTP/1.. (\d+)", answers) == [b"200", b"400"]


async def test_an_upload_may_be_revoked_at_the_moment_at_which_its_time_is_over() -> None:
    """The timer of the upload fires first, then others need its memory, and only then the upload continues."""
    loop, now = asyncio.get_running_loop(), [0.0]
    memory = BodyMemory(clock=lambda: now[0])
    slow = Received(memory, "slow", body_memory.MAX_RESERVED)
    failures: list[dict[str, object]] = []
    loop.set_exception_handler(lambda _, context: failures.append(context))
    waiting: list[asyncio.Task[Reservation]] = []

    async def upload() -> None:
        async with slow.limit:
            await slow.expect(body_memory.MAX_RESERVED)
            waiting.append(asyncio.create_task(memory.reserve("other", SMALL_BODY + 1, lambda: None)))
            await asyncio.sleep(0)
            now[0] = body_memory.SLOW_SECONDS
            # both callbacks are due in the next turn of the loop, in this order
            slow.limit.reschedule(loop.time())
            loop.call_soon(memory.revoke_slowest)
            await asyncio.Event().wait()

    with pytest.raises(TimeoutError):
        await upload()
    slow.release()
    await asyncio.wait_for(waiting[0], PATIENCE)
    assert slow.revoked
    assert not failures
