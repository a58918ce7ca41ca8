"""Input made to break a process, sent to every port of a serving cluster: no process ends, and streams continue.

Model files are read only at start-up: tests/unit/engine/test_hostile_models.py. Request bodies and stalls of the
router's event loop: tests/bench/router_hostile.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import secrets
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from common.ipc import Dealer
from common.ipc.bad_frames import LIMIT
from common.ipc.curve import Curve
from router.control_plane import PEER_CUT_OFF
from tests.cluster.harness import MODEL, Client, RunningCluster, hold_port, with_children
from tests.fakes import hostile_frames, hostile_images
from tests.fakes.held_context import Context
from tests.fakes.hostile_templates import ENDLESS
from tests.fakes.waiting import PATIENCE

pytestmark = pytest.mark.timeout(900)  # two busy cores

VISION = MODEL.parent / "tiny-vision"
MOST_GROWTH_MIB = 100
FRAMES_OF_A_PROCESS = LIMIT // 2  # so that nobody is disconnected before the test intends it
CONNECTIONS_AT_ONCE = 16
SECONDS_OF_A_CONNECTION = 0.3
TEMPLATES = ENDLESS[::5]
STREAMS: tuple[dict[str, Any], ...] = (
    {"messages": [{"role": "user", "content": "How many apples are 3 and 4 apples?"}], "max_tokens": 300},
    {
        "messages": [{"role": "user", "content": "Name all the colours."}],
        "max_tokens": 60,
        "seed": 7,
        "temperature": 1,
    },
    {
        "messages": [
            {
                "role": "user",
                "content": [
                    {"type": "image_url", "image_url": {"url": hostile_images.url(hostile_images.file())}},
                    {"type": "text", "text": "What do you see?"},
                ],
            }
        ],
        "max_tokens": 20,
    },
)
IMAGES = {
    "900 million pixels": hostile_images.url(hostile_images.huge()),
    "too many pixels": hostile_images.url(hostile_images.file(size=(16_000, 1_001))),
    "a comment of 200 MiB": hostile_images.url(hostile_images.swollen_text()),
    "1,000 scans": hostile_images.url(hostile_images.progressive(1_000), "image/jpeg"),
    "truncated": hostile_images.url(hostile_images.noise()[:1_500]),
    "another type": hostile_images.url(hostile_images.file(), "image/jpeg"),
    "no image": hostile_images.url(b"GIF89a" + bytes(50_000), "image/gif"),
    "a drawing": hostile_images.url(b"<svg/>", "image/svg+xml"),
    "no base64": "data:image/png;base64," + "@" * 100_000,
    "a file": "file:///etc/passwd",
    "an address": "http://169.254.169.254/latest",
}


def hostile_template(folder: Path) -> Path:
    """The model's own template, except that the Nth of TEMPLATES renders messages `attack N`."""
    own = (VISION / "chat_template.jinja").read_text()
    cases = "".join(
        f"{{% elif messages[0]['content'] == 'attack {number}' %}}{source}"
        for number, source in enumerate(TEMPLATES)
    )
    file = folder / "hostile.jinja"
    file.write_text(f"{{% if not messages %}}{cases}{{% else %}}{own}{{% endif %}}")
    return file


@pytest.fixture(scope="module")
def attacked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningCluster]:
    """A model that accepts pictures, over TCP with keys. `decode-1` does not run: its key is stolen."""
    directory = tmp_path_factory.mktemp("attacked")
    with hold_port() as bulk:
        port = int(bulk.getsockname()[1])
        config: dict[str, Any] = {
            "model": {"path": str(VISION), "chat_template": str(hostile_template(directory))},
            "transfer": {"transport": "tcp"},
            "decode": {"nodes": [{"name": "decode-0", "bulk_port": port}, {"name": "decode-1"}]},
        }
        cluster = RunningCluster(directory, 1, 2, config, late=("decode-1",))
        cluster.addresses["decode-0"] = port
        with cluster:
            yield cluster


def _mib(process: Path, field: str) -> float:
    line = next(each for each in (process / "status").read_text().splitlines() if each.startswith(field))
    return int(line.split()[1]) / 1024


class Memory:
    """How much each process of the cluster, with its children, has grown since this object was created."""

    def __init__(self, cluster: RunningCluster) -> None:
        self._cluster = cluster
        self._before: dict[str, dict[Path, float]] = {}
        for name in cluster.processes:
            self._before[name] = {each: _mib(each, "VmRSS") for each in self._processes(name)}
            for each in self._before[name]:
                (each / "clear_refs").write_text("5")  # resets VmHWM

    def growth(self) -> dict[str, float]:
        """Return the largest growth per node in MiB. Later children are compared with the smallest earlier one."""
        found = {}
        for name, before in self._before.items():
            least = min(before.values())
            peaks = {each: _mib(each, "VmHWM") for each in self._processes(name)}
            found[name] = max(peak - before.get(each, least) for each, peak in peaks.items())
        return found

    def _processes(self, name: str) -> list[Path]:
        return list(with_children(Path(f"/proc/{self._cluster.processes[name].pid}")))


async def stream(client: Client, body: dict[str, Any]) -> list[Any]:
    """Return the tokens of a streamed chat, and how it ended."""
    body = {"temperature": 0, "ignore_eos": True, "logprobs": True, **body, "stream": True}
    async with client.session.post("/v1/chat/completions", json=body) as response:
        text = await response.text()
        assert response.status == 200, text
    *events, last = [line.removeprefix("data: ") for line in text.splitlines() if line]
    assert last == "[DONE]", text[-500:]
    choices = [choice for event in events for choice in json.loads(event)["choices"]]
    tokens = [
        token["token"] for choice in choices if choice["logprobs"] for token in choice["logprobs"]["content"]
    ]
    return [*tokens, choices[-1]["finish_reason"]]


async def served_meanwhile(client: Client, attack: Callable[[], Awaitable[None]]) -> None:
    """Expect that every stream during the attack, and one after it, has the same tokens as before."""
    expected = [await stream(client, body) for body in STREAMS]
    over = asyncio.Event()

    async def again(body: dict[str, Any], tokens: list[Any]) -> None:
        last = False
        while not last:
            last = over.is_set()
            assert await stream(client, body) == tokens

    running = [asyncio.create_task(again(*each)) for each in zip(STREAMS, expected, strict=True)]
    try:
        await attack()
    finally:
        over.set()
        await asyncio.wait_for(asyncio.gather(*running), PATIENCE)


def expect_unharmed(cluster: RunningCluster, memory: Memory) -> None:
    for name, process in cluster.processes.items():
        assert process.poll() is None, f"{name} has ended:\n{cluster.log(name)[-3000:]}"
        assert "Traceback" not in cluster.log(name)
    assert '"node lost"' not in cluster.log("router")
    growth = memory.growth()
    assert max(growth.values()) < MOST_GROWTH_MIB, growth


async def _connect(port: int, data: bytes, gate: asyncio.Semaphore) -> None:
    async with gate:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        with contextlib.suppress(ConnectionError, TimeoutError):
            writer.write(data)
            # some servers wait for the rest of a handshake
            async with asyncio.timeout(SECONDS_OF_A_CONNECTION):
                await writer.drain()
                while await reader.read(1 << 16):
                    pass
        writer.transport.abort()


async def test_bytes_at_every_port_of_a_node(attacked: RunningCluster) -> None:
    """Random, truncated and oversized bytes, and beginnings of the protocols, without a key."""
    rng = random.Random(5)
    ports = [attacked.addresses[name] for name in ("router", "prefill-0", "decode-0")]
    gate = asyncio.Semaphore(CONNECTIONS_AT_ONCE)

    async def attack() -> None:
        sent = [_connect(port, data, gate) for data in hostile_frames.byte_streams(rng) for port in ports]
        await asyncio.gather(*sent)

    async with Client(attacked.url) as client:
        memory = Memory(attacked)
        await served_meanwhile(client, attack)
        await client.wait_idle()
    expect_unharmed(attacked, memory)


class Thief:
    """Processes that hold the key of decode-1, and send what it would not."""

    def __init__(self, cluster: RunningCluster, server: str) -> None:
        self._context = Context()
        self._server = server
        self._address = f"tcp://127.0.0.1:{cluster.addresses[server]}"
        self._keys = Curve(self._context, cluster.run_dir / "keys", "decode-1", ())
        self._dealers: list[Dealer] = []

    def __enter__(self) -> Thief:
        return self

    def __exit__(self, *error: object) -> None:
        self._keys.close()
        self._context.destroy(linger=0)

    def send(self, items: Sequence[Any], say: Callable[[Dealer, Any], object], of_each: int) -> None:
        """`of_each` items by each process. ZMQ sends them once it is connected."""
        for start in range(0, len(items), of_each):
            identity = f"decode-1/{secrets.token_hex(16)}".encode()
            dealer = Dealer(self._context, self._address, identity, self._server, self._keys)
            self._dealers.append(dealer)
            for each in items[start : start + of_each]:
                assert say(dealer, each) is not False

    async def stay_until(self, condition: Callable[[], Awaitable[bool]]) -> None:
        """Keep the connections, and what was not acknowledged, until `condition` holds."""
        async with asyncio.timeout(PATIENCE):
            while not await condition():
                for dealer in self._dealers:
                    dealer.drain()
                await asyncio.sleep(0.05)


def _raw(dealer: Dealer, parts: list[bytes]) -> None:
    dealer.socket.send_multipart(parts)


async def refused(client: Client, server: str) -> int:
    """Return how many messages the router or a node has refused."""
    if server == "router":
        counted: int = (await client.info())["refused_messages"]
    else:
        counted = (await client.node(server))["counters"]["refused_messages"]
    return counted


async def test_frames_with_a_stolen_key(attacked: RunningCluster) -> None:
    """Frames that belong to no session, and sessions with bad payloads, are counted by router and prefill node."""
    rng = random.Random(6)
    payloads = {
        "router": list(hostile_frames.packed(rng)),
        "prefill-0": list(hostile_frames.peer_messages(rng)),
    }

    async def attack_one(client: Client, server: str) -> None:
        frames, lies = list(hostile_frames.zmq_messages(rng)), payloads[server]
        before = await refused(client, server)
        with Thief(attacked, server) as thief:
            thief.send(frames, _raw, FRAMES_OF_A_PROCESS)
            thief.send(list(hostile_frames.session_frames(rng)), _raw, FRAMES_OF_A_PROCESS)
            thief.send(lies, Dealer.send, FRAMES_OF_A_PROCESS)

            async def counted() -> bool:
                return await refused(client, server) - before > len(lies) // 2

            await thief.stay_until(counted)

    async with Client(attacked.url) as client:
        memory = Memory(attacked)

        async def attack() -> None:
            for server in payloads:
                await attack_one(client, server)

        await served_meanwhile(client, attack)
        await client.wait_idle()
    expect_unharmed(attacked, memory)
    assert PEER_CUT_OFF not in attacked.log("router"), "the test meant to stay below the limit"


async def test_a_flood_of_frames_with_a_stolen_key_is_cut_off(attacked: RunningCluster) -> None:
    rng = random.Random(7)
    flood = [[b"", rng.randbytes(rng.choice((10, 100, 5_000))), b""] for _ in range(1_000)]

    def cut_off() -> set[str]:
        lines = [json.loads(line) for line in attacked.log("router").splitlines() if PEER_CUT_OFF in line]
        return {line["peer"].partition("/")[0] for line in lines}

    async def in_log() -> bool:
        return "decode-1" in cut_off()

    async def attack() -> None:
        with Thief(attacked, "router") as thief:
            thief.send(flood, _raw, len(flood))
            await thief.stay_until(in_log)

    async with Client(attacked.url) as client:
        memory = Memory(attacked)
        await served_meanwhile(client, attack)
        await client.wait_idle()
    # or a key: what came on its connection once the key was refused
    assert all(culprit.startswith("key ") for culprit in cut_off() - {"decode-1"})
    expect_unharmed(attacked, memory)


async def _ask(session: aiohttp.ClientSession, content: Any) -> tuple[int, str]:
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 2}
    async with session.post("/v1/chat/completions", json=body) as response:
        return response.status, await response.text()


async def test_images_and_templates(attacked: RunningCluster) -> None:
    """Each bad input is refused with 400, or with 503 if it killed its worker; the next one finds a new worker."""

    async def attack() -> None:
        async with aiohttp.ClientSession(attacked.url) as session:
            for name, address in IMAGES.items():
                part = {"type": "image_url", "image_url": {"url": address}}
                status, text = await _ask(session, [part, {"type": "text", "text": "What is it?"}])
                assert status == 400, (name, text)
                assert json.loads(text)["error"]["param"] == "messages[0].content[0].image_url", (name, text)
            for number, source in enumerate(TEMPLATES):
                status, text = await _ask(session, f"attack {number}")
                assert status in (400, 503), (source, text)

    async with Client(attacked.url) as client:
        memory = Memory(attacked)
        await served_meanwhile(client, attack)
        await client.wait_idle()
    expect_unharmed(attacked, memory)
