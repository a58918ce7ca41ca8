"""Streams from fake nodes to a real client: tokens that skip the request's task are neither lost nor repeated."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from common.messages.decode_inbox import Reserve
from common.messages.generation import OutputToken, TokenLogprob
from common.messages.node_inbox import Abort
from common.messages.router_inbox import FirstToken, Goodbye, TokenRun, Tokens
from router.dispatch.generation import GenerationRequest, TakeNow, TokenDelta, take_nothing
from router.http.sse import UNWATCHED, SseWriter
from tests.fakes.fake_node import FakeNode
from tests.fakes.router_rig import RouterRig, legs, router_rig
from tests.fakes.waiting import PATIENCE, eventually
from tests.unit.router.conftest import Rig, Serve
from tests.unit.router.routes.test_openai_disconnect import connect, leave, request_bytes

TOKENS = 200
MANY = 3000
MAX_EVENT = 1000  # bytes of one event with one token and its log-probabilities


class Watched:
    """The dispatcher of a rig; counts what the task of a request reads."""

    def __init__(self, rig: RouterRig) -> None:
        self._rig = rig
        self.deltas = 0

    async def generate(
        self, request: GenerationRequest, take_now: TakeNow = take_nothing
    ) -> AsyncGenerator[TokenDelta, None]:
        deltas = self._rig.dispatcher.generate(request, take_now)
        try:
            async for delta in deltas:
                self.deltas += 1
                yield delta
        finally:
            await deltas.aclose()


def asked(tokens: int, **fields: Any) -> dict[str, Any]:
    return {"prompt": [300, 301], "max_tokens": tokens, "stream": True, "temperature": 0, **fields}


def ids(count: int) -> list[int]:
    """Tokens that are words of the tiny vocabulary, each different from its neighbours."""
    return [300 + each % 97 for each in range(count)]


def first(prefill: FakeNode, room: int, token: int) -> None:
    prefill.say(FirstToken(room=room, token=OutputToken(token), finish_reason=None, cached_tokens=0))


async def read_chunks(reader: asyncio.StreamReader) -> list[bytes]:
    """Return the chunks of a response."""
    found = []
    async with asyncio.timeout(PATIENCE):
        await reader.readuntil(b"\r\n\r\n")
        while size := int(await reader.readline(), 16):
            found.append(await reader.readexactly(size))
            await reader.readexactly(2)
    return found


async def read_to_the_end(reader: asyncio.StreamReader) -> bytes:
    """Return the events of a chunked response."""
    return b"".join(await read_chunks(reader))


def chunks(body: bytes) -> list[Any]:
    *events, done, empty = body.decode().split("\n\n")
    assert (done, empty) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: ")) for event in events]


def text_of(body: bytes, index: int = 0) -> str:
    choices = [choice for chunk in chunks(body) for choice in chunk["choices"]]
    return "".join(choice["text"] for choice in choices if choice["index"] == index)


async def test_the_task_of_a_stream_sleeps_while_tokens_pass(serve: Serve) -> None:
    async with router_rig() as cluster:
        prefill, decode = await cluster.pair()
        watched = Watched(cluster)
        rig = await serve(source=watched)
        reader, writer = await connect(rig, "/v1/completions", asked(TOKENS))
        reserve, _ = await legs(prefill, decode)
        said = ids(TOKENS)
        first(prefill, reserve.room, said[0])
        await eventually(lambda: watched.deltas == 1)
        for offset in range(1, TOKENS - 1):
            decode.tokens(reserve.room, offset, [said[offset]])
        decode.tokens(reserve.room, TOKENS - 1, said[-1:], "length")
        body = await read_to_the_end(reader)
        assert text_of(body) == rig.tokenizer.decode(said, True)
        # Runs that arrive before the task waits again go through it.
        assert watched.deltas < TOKENS // 2
        await leave(writer)
        report = cluster.dispatcher.timelines.get(reserve.request_id)
        assert report is not None
        assert report["outcome"] == "length"


async def test_a_stream_continues_on_another_node_without_a_gap(serve: Serve) -> None:
    async with router_rig() as cluster:
        prefill, decode = await cluster.pair(0)
        rig = await serve(source=cluster.dispatcher)
        reader, writer = await connect(rig, "/v1/completions", asked(TOKENS))
        reserve, _ = await legs(prefill, decode)
        said = ids(TOKENS)
        first(prefill, reserve.room, said[0])
        for offset in range(1, 100):
            decode.tokens(reserve.room, offset, [said[offset]])
        _, other = await cluster.pair(1)
        decode.say(Goodbye(incarnation=decode.ref.incarnation))
        again, prompt = await other.expect(type(reserve)), None
        for node in cluster.nodes:
            if node.ref == again.prefill:
                prompt = node
        assert prompt is not None
        assert again.token_ids == [300, 301, *said[: again.emitted]]
        first(prompt, again.room, said[again.emitted])
        rest = said[again.emitted + 1 :]
        for offset, token in enumerate(rest, start=1):
            other.tokens(again.room, offset, [token], "length" if offset == len(rest) else None)
        body = await read_to_the_end(reader)
        assert text_of(body) == rig.tokenizer.decode(said, True)
        await leave(writer)


async def test_choices_keep_their_texts_apart_and_share_writes(serve: Serve) -> None:
    async with router_rig() as cluster:
        prefill, decode = await cluster.pair()
        rig = await serve(source=cluster.dispatcher)
        reader, writer = await connect(rig, "/v1/completions", asked(40, prompt=[[300], [301, 302]]))
        rooms = {}
        for _ in range(2):
            reserve, _ = await legs(prefill, decode)
            rooms[len(reserve.token_ids) - 1] = reserve.room
        said = {0: ids(40), 1: ids(60)[20:]}
        for index, room in rooms.items():
            first(prefill, room, said[index][0])
        attempts = [cluster.dispatcher.attempt(room) for room in rooms.values()]
        # Both tasks have passed on the first tokens, and wait.
        await eventually(lambda: all(each is not None and each.direct is not None for each in attempts))
        for offset in range(1, 40):
            end = "length" if offset == 39 else None
            runs = [
                TokenRun(room, offset, [OutputToken(said[index][offset])], end)
                for index, room in rooms.items()
            ]
            decode.say(Tokens(runs=runs))
        sent = await read_chunks(reader)
        assert max(each.count(b"data: ") for each in sent) > 1, "the runs of one step are written together"
        body = b"".join(sent)
        for index in rooms:
            assert text_of(body, index) == rig.tokenizer.decode(said[index], True)
        await leave(writer)


@asynccontextmanager
async def slow_reader(
    serve: Serve, cluster: RouterRig, write_timeout: float = 600.0
) -> AsyncGenerator[tuple[Rig, socket.socket, Reserve, list[int]], None]:
    """A stream of tokens with log-probabilities whose client reads nothing.

    Yields (rig, the socket of the client, the decode leg, the tokens).
    """
    prefill, decode = await cluster.pair()
    rig = await serve(source=cluster.dispatcher, send_buffer=1 << 14, write_timeout=write_timeout)
    with socket.socket() as asleep:
        asleep.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        asleep.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(asleep, (rig.host, rig.port))
        await loop.sock_sendall(asleep, request_bytes("/v1/completions", asked(MANY, logprobs=5)))
        reserve, _ = await legs(prefill, decode)
        said = ids(MANY)
        first(prefill, reserve.room, said[0])
        for offset in range(1, MANY):
            end = "length" if offset == MANY - 1 else None
            token = OutputToken(said[offset], TokenLogprob(-0.5, tuple(range(300, 305)), (-1.0,) * 5))
            decode.say(Tokens(runs=[TokenRun(reserve.room, offset, [token], end)]))
        yield rig, asleep, reserve, said


def record_buffers(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that grows by the size of the write buffer after each write that skips the task."""
    sizes: list[int] = []
    write_now = SseWriter.write_now

    def recorded(self: SseWriter, events: bytes) -> None:
        write_now(self, events)
        sizes.append(self.buffered)

    monkeypatch.setattr(SseWriter, "write_now", recorded)
    return sizes


async def test_the_buffer_of_a_slow_reader_is_bounded_and_nothing_is_lost(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = record_buffers(monkeypatch)
    async with router_rig() as cluster, slow_reader(serve, cluster) as (rig, asleep, leg, said):
        attempt = cluster.dispatcher.attempt(leg.room)
        assert attempt is not None
        await eventually(lambda: attempt.finish_reason is not None)
        assert len(attempt.pending) > MANY // 2, "what the client does not read waits in the router as tokens"
        reader, writer = await asyncio.open_connection(sock=asleep.dup())
        body = await read_to_the_end(reader)
        assert text_of(body) == rig.tokenizer.decode(said, True)
        assert sizes
        assert max(sizes) < UNWATCHED + MAX_EVENT
        await leave(writer)


async def test_a_reader_that_never_reads_is_disconnected(serve: Serve) -> None:
    async with router_rig() as cluster, slow_reader(serve, cluster, write_timeout=0.2) as (_, _, leg, _):
        await eventually(lambda: not cluster.dispatcher.active)
        report = cluster.dispatcher.timelines.get(leg.request_id)
        assert report is not None
        assert report["outcome"] == "client gone"


async def test_a_client_that_leaves_frees_both_nodes(serve: Serve) -> None:
    async with router_rig() as cluster:
        prefill, decode = await cluster.pair()
        rig = await serve(source=cluster.dispatcher)
        reader, writer = await connect(rig, "/v1/completions", asked(TOKENS))
        reserve, _ = await legs(prefill, decode)
        first(prefill, reserve.room, 300)
        decode.tokens(reserve.room, 1, [301])
        decode.tokens(reserve.room, 2, [302])
        await asyncio.wait_for(reader.readuntil(b"data: {"), PATIENCE)
        await leave(writer)
        assert (await decode.expect(Abort)).room == reserve.room
        await eventually(lambda: not cluster.dispatcher.active)
