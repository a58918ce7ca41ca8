"""Attacks on every port of a serving cluster, for `cluster_hostile`, in a process of their own.

    python -m tests.bench.cluster_attackers PLACE NAME

PLACE is the JSON of a `Place`. Prints a JSON object: what the attackers saw.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import ssl
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from common.ipc import Dealer
from tests.cluster.attacks import FRAMES_OF_A_PROCESS, TEMPLATES, Thief, image_urls, raw, send_bytes
from tests.fakes import hostile_frames
from tests.fakes.tls_files import AUTHORITY

CROWD = 1000
REPEATS = 4  # for the corpus of bytes and for each image
IMAGES_AT_ONCE = 8
STAY_SECONDS = 3.0
MIB = 1 << 20
BULK_CONNECTIONS, BULK_MIB = 50, 8
CUT = 20  # bytes of a hello that are held back
BULK = "decode-0"  # the decode node listens only for pages


class Place(msgspec.Struct, frozen=True):
    """Where the cluster is."""

    port: int  # the HTTPS listener's
    folder: str  # the run directory
    addresses: dict[str, int]  # node -> port of its listener

    @property
    def run_dir(self) -> Path:
        return Path(self.folder)


Attack = Callable[[Place], Awaitable[dict[str, Any]]]
Streams = list[tuple[asyncio.StreamReader, asyncio.StreamWriter]]


async def bytes_at(node: str, place: Place) -> dict[str, Any]:
    """Send random, truncated and oversized bytes and beginnings of protocols, each on a connection of its own."""
    sent = [data for seed in range(REPEATS) for data in hostile_frames.byte_streams(random.Random(seed))]
    await send_bytes([place.addresses[node]], sent)
    return {"connections": len(sent)}


async def connections_at(node: str, place: Place) -> dict[str, Any]:
    """Open a thousand connections at once that begin a handshake and stay silent."""
    opened = await _crowd(place.addresses[node], [hostile_frames.GREETING] * CROWD)
    await asyncio.sleep(STAY_SECONDS)
    _close(opened)
    return {"connections": len(opened)}


async def floods_at(node: str, place: Place) -> dict[str, Any]:
    """Send megabytes that are no frames over many connections at once."""
    data = os.urandom(MIB)

    async def send() -> None:
        _, writer = await asyncio.open_connection("127.0.0.1", place.addresses[node])
        with contextlib.suppress(ConnectionError):
            for _ in range(BULK_MIB):
                writer.write(data)
                await writer.drain()
        writer.transport.abort()

    await asyncio.gather(*(send() for _ in range(BULK_CONNECTIONS)))
    return {"connections": BULK_CONNECTIONS}


async def frames_at(node: str, place: Place) -> dict[str, Any]:
    """Send frames of no session, sessions that do not exist, and sessions with bad payloads, with a stolen key."""
    rng = random.Random(6)
    payloads = list(hostile_frames.packed(rng) if node == "router" else hostile_frames.peer_messages(rng))
    frames = [*hostile_frames.zmq_messages(rng), *hostile_frames.session_frames(rng)]
    with Thief(place, node) as thief:
        thief.send(frames, raw, FRAMES_OF_A_PROCESS)
        thief.send(payloads, Dealer.send, FRAMES_OF_A_PROCESS)
        await _stay(thief)
    return {"frames": len(frames) + len(payloads)}


async def flood_of_frames_at(node: str, place: Place) -> dict[str, Any]:
    """Send so many bad frames with a stolen key that the peer is cut off."""
    rng = random.Random(7)
    flood = [[b"", rng.randbytes(rng.choice((10, 100, 5_000))), b""] for _ in range(10_000)]
    with Thief(place, node) as thief:
        thief.send(flood, raw, 1_000)
        await _stay(thief)
    return {"frames": len(flood)}


async def images(place: Place) -> dict[str, Any]:
    """Send images that are bombs, truncated, of huge dimensions, or no images."""
    return await _chats(
        place,
        (
            [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What is it?"}]
            for url in [*image_urls().values()] * REPEATS
        ),
    )


async def templates(place: Place) -> dict[str, Any]:
    """Let chat templates run that would compute for years or fill the memory."""
    return await _chats(place, (f"attack {number}" for number in range(len(TEMPLATES))))


async def _chats(place: Place, contents: Iterable[Any]) -> dict[str, Any]:
    gate = asyncio.Semaphore(IMAGES_AT_ONCE)
    url = f"https://127.0.0.1:{place.port}"
    async with aiohttp.ClientSession(url, connector=aiohttp.TCPConnector(ssl=_trusting())) as session:

        async def ask(content: Any) -> int:
            body = {"messages": [{"role": "user", "content": content}], "max_tokens": 2}
            async with gate, session.post("/v1/chat/completions", json=body) as response:
                await response.read()
                return response.status

        return {"statuses": Counter(await asyncio.gather(*(ask(each) for each in contents)))}


async def handshakes(place: Place) -> dict[str, Any]:
    """Complete a thousand TLS handshakes at once."""
    trusting = _trusting()

    async def connect() -> bool:
        try:
            _, writer = await asyncio.open_connection(
                "127.0.0.1", place.port, ssl=trusting, server_hostname="localhost", ssl_handshake_timeout=30.0
            )
        except OSError:
            return False
        writer.transport.abort()
        return True

    return {"completed": sum(await asyncio.gather(*(connect() for _ in range(CROWD))))}


async def half_open_handshakes(place: Place) -> dict[str, Any]:
    """Open a thousand connections at once, begin a TLS handshake on each and never answer."""
    opened = await _crowd(place.port, [_hello() for _ in range(CROWD)])
    await asyncio.sleep(STAY_SECONDS)
    _close(opened)
    return {"connections": len(opened)}


async def handshakes_released_at_once(place: Place) -> dict[str, Any]:
    """Hold back the end of a thousand ClientHellos until all connections are open."""
    hellos = [_hello() for _ in range(CROWD)]
    opened = await _crowd(place.port, [each[:-CUT] for each in hellos])
    await asyncio.sleep(STAY_SECONDS / 3)
    for (_, writer), each in zip(opened, hellos, strict=True):
        writer.write(each[-CUT:])
    await asyncio.sleep(STAY_SECONDS)
    _close(opened)
    return {"connections": len(opened)}


async def _crowd(port: int, sent: list[bytes]) -> Streams:
    """Open a connection for each of the items at once, and send the item."""
    opened = await asyncio.gather(*(asyncio.open_connection("127.0.0.1", port) for _ in sent))
    for (_, writer), data in zip(opened, sent, strict=True):
        writer.write(data)
    return opened


def _close(opened: Streams) -> None:
    for _, writer in opened:
        writer.transport.abort()


async def _stay(thief: Thief) -> None:
    for _ in range(round(STAY_SECONDS / 0.05)):
        thief.drain()
        await asyncio.sleep(0.05)


def _trusting() -> ssl.SSLContext:
    return ssl.create_default_context(cafile=AUTHORITY)


def _hello() -> bytes:
    """Return the first message of a TLS client."""
    sent = ssl.MemoryBIO()
    client = _trusting().wrap_bio(ssl.MemoryBIO(), sent, server_hostname="localhost")
    with contextlib.suppress(ssl.SSLWantReadError):
        client.do_handshake()
    return sent.read()


# The peer whose key is stolen is cut off by the last two.
ATTACKS: dict[str, Attack] = {
    "bytes at the router's control port": partial(bytes_at, "router"),
    "bytes at the prefill node's port": partial(bytes_at, "prefill-0"),
    "bytes at the bulk port": partial(bytes_at, BULK),
    "1,000 connections to the router's control port": partial(connections_at, "router"),
    "1,000 connections to the prefill node's port": partial(connections_at, "prefill-0"),
    "1,000 connections to the bulk port": partial(connections_at, BULK),
    "400 MiB at the router's control port": partial(floods_at, "router"),
    "400 MiB at the prefill node's port": partial(floods_at, "prefill-0"),
    "400 MiB at the bulk port": partial(floods_at, BULK),
    "images": images,
    "templates": templates,
    "1,000 TLS handshakes": handshakes,
    "1,000 half-open TLS handshakes": half_open_handshakes,
    "1,000 TLS handshakes released at once": handshakes_released_at_once,
    "frames at the router": partial(frames_at, "router"),
    "frames at the prefill node": partial(frames_at, "prefill-0"),
    "10,000 bad frames at the prefill node": partial(flood_of_frames_at, "prefill-0"),
    "10,000 bad frames at the router": partial(flood_of_frames_at, "router"),
}


def main() -> None:
    place = msgspec.json.decode(sys.argv[1], type=Place)
    print(json.dumps(asyncio.run(_run(ATTACKS[sys.argv[2]], place))))


async def _run(attack: Attack, place: Place) -> dict[str, Any]:
    return await attack(place)


if __name__ == "__main__":
    main()
