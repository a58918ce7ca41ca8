"""How many connections may be open, and which one is dropped when there are too many."""

from __future__ import annotations

import asyncio

import pytest

from router.server.connections import ConnectionLimit, affordable_connections
from tests.fakes.waiting import PATIENCE, eventually
from tests.unit.router.conftest import Serve

HEAD = b"GET /live HTTP/1.1\r\nHost: x\r\n"


class Open:
    """A connection that notes that it was dropped."""

    dropped = False

    def drop(self) -> None:
        self.dropped = True


def test_the_connection_without_a_request_for_longest_is_dropped() -> None:
    limit = ConnectionLimit(per_client=10, total=3)
    first, second, third, fourth, fifth = (Open() for _ in range(5))
    for number, each in enumerate((first, second, third)):
        assert limit.opened(f"client {number}", each)
    limit.busy(first)
    limit.busy(second)
    limit.idle(second)
    assert limit.opened("another", fourth)
    assert [each.dropped for each in (first, second, third, fourth)] == [False, False, True, False]
    assert limit.opened("another", fifth)
    assert second.dropped
    # Their ends are announced later, and once more.
    for each in (second, third):
        limit.closed(each)
        limit.idle(each)
    assert len(limit) == 3


def test_a_new_connection_is_refused_while_all_others_have_requests() -> None:
    said: list[tuple[str, str]] = []
    limit = ConnectionLimit(10, 2, lambda client, reason: said.append((client, reason)))
    busy = [Open(), Open()]
    for each in busy:
        assert limit.opened("a", each)
        limit.busy(each)
    refused = Open()
    assert not limit.opened("b", refused)
    assert said == [("b", "2 connections have a request, and there may be no more")]
    limit.closed(refused)
    assert len(limit) == 2
    limit.closed(busy[0])
    assert limit.opened("b", Open())
    assert len(said) == 1
    assert not any(each.dropped for each in busy)


def test_a_client_over_its_limit_drops_no_other() -> None:
    limit = ConnectionLimit(per_client=1, total=2)
    other, own = Open(), Open()
    assert limit.opened("b", other)
    assert limit.opened("a", own)
    assert not limit.opened("a", Open())
    assert not limit.has_room("a", 0)
    assert limit.has_room("c", 0)
    assert not limit.has_room("c", 1)
    assert not other.dropped
    limit.closed(own)
    assert limit.has_room("a", 0)


async def test_silent_clients_and_incomplete_heads_make_room_for_others(serve: Serve) -> None:
    """A connection with a request in progress stays, and so does one that has just been used."""
    limit = ConnectionLimit(per_client=100, total=4)
    rig = await serve(limit=limit)
    used = await asyncio.open_connection(rig.host, rig.port)
    silent = await asyncio.open_connection(rig.host, rig.port)
    await eventually(lambda: len(limit) == 2)
    partial = await asyncio.open_connection(rig.host, rig.port)
    partial[1].write(HEAD + b"X-Long: ")
    working = await asyncio.open_connection(rig.host, rig.port)
    working[1].write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n")
    await eventually(lambda: len(limit) == 4)
    working[1].write(b"Content-Length: 100\r\n\r\n{")
    await eventually(lambda: limit.idle_connections == 3)
    used[1].write(HEAD + b"\r\n")
    async with asyncio.timeout(PATIENCE):
        assert (await used[0].readline()).startswith(b"HTTP/1.1 200")
    await eventually(lambda: limit.idle_connections == 3)
    others = []
    for reader, _ in (silent, partial):
        others.append(await asyncio.open_connection(rig.host, rig.port))
        async with asyncio.timeout(PATIENCE):
            assert await reader.read() == b""
    used[1].write(HEAD + b"Connection: close\r\n\r\n")
    async with asyncio.timeout(PATIENCE):
        assert b"HTTP/1.1 200" in await used[0].read()
    assert len(limit) <= 4
    assert not working[0].at_eof()
    for _, writer in (used, silent, partial, working, *others):
        writer.close()
    await eventually(lambda: len(limit) == 0)


@pytest.mark.parametrize(
    ("asked", "descriptors", "nodes", "found"),
    [
        (4352, 65_536, 2, 4352),
        (4352, 4096, 2, 3960),
        (4352, 1024, 128, 384),
        (4352, 64, 2, 16),
        (8, 64, 2, 8),
    ],
)
def test_connections_leave_descriptors_for_the_rest(
    asked: int, descriptors: int, nodes: int, found: int
) -> None:
    assert affordable_connections(asked, descriptors, nodes) == found
