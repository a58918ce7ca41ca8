"""Attacks on a cluster that serves pictures over TCP with keys: by a stolen key, images and templates."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from common.ipc import Dealer
from common.ipc.bad_frames import LIMIT
from common.ipc.curve import Curve
from tests.cluster.harness import MODEL, RunningCluster
from tests.fakes import hostile_images
from tests.fakes.held_context import Context
from tests.fakes.hostile_templates import ENDLESS
from tests.fakes.proc_files import proc_text, with_children
from tests.fakes.waiting import PATIENCE

VISION = MODEL.parent / "tiny-vision"
STOLEN = "decode-1"  # the node whose key the attackers hold; it does not run
FRAMES_OF_A_PROCESS = LIMIT // 2  # so that nobody is disconnected before that is intended
CONNECTIONS_AT_ONCE = 16
SECONDS_OF_A_CONNECTION = 0.3
TEMPLATES = ENDLESS[::5]


def image_urls() -> dict[str, str]:
    """Return the addresses of images by what is wrong with them. Making them takes a second."""
    return {
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


def config(directory: Path, bulk_port: int) -> dict[str, Any]:
    """Sections of the cluster file: one prefill node, `decode-0` with its bulk port, and the node that is STOLEN."""
    return {
        "model": {"path": str(VISION), "chat_template": str(_hostile_template(directory))},
        "transfer": {"transport": "tcp"},
        "decode": {"nodes": [{"name": "decode-0", "bulk_port": bulk_port}, {"name": STOLEN}]},
    }


def _hostile_template(folder: Path) -> Path:
    """The model's own template, except that the Nth of TEMPLATES renders messages `attack N`."""
    own = (VISION / "chat_template.jinja").read_text()
    cases = "".join(
        f"{{% elif messages[0]['content'] == 'attack {number}' %}}{source}"
        for number, source in enumerate(TEMPLATES)
    )
    file = folder / "hostile.jinja"
    file.write_text(f"{{% if not messages %}}{cases}{{% else %}}{own}{{% endif %}}")
    return file


def _mib(processes: Iterable[Path], field: str) -> dict[Path, float]:
    """Return a field of each process's status in MiB. A process that has ended has none."""
    lines = {process: proc_text(process / "status").splitlines() for process in processes}
    return {
        process: int(line.split()[1]) / 1024
        for process, status in lines.items()
        for line in status
        if line.startswith(field)
    }


class Memory:
    """How much each process of the cluster, with its children, has grown since this object was created."""

    def __init__(self, cluster: RunningCluster) -> None:
        self._cluster = cluster
        self._before: dict[str, dict[Path, float]] = {}
        for name in cluster.processes:
            self._before[name] = _mib(self._processes(name), "VmRSS")
            for each in self._before[name]:
                with contextlib.suppress(OSError):  # it has ended
                    (each / "clear_refs").write_text("5")  # resets VmHWM

    def growth(self) -> dict[str, float]:
        """The largest growth per node in MiB. A child started later is compared with the smallest earlier one."""
        found = {}
        for name, before in self._before.items():
            least = min(before.values())
            peaks = _mib(self._processes(name), "VmHWM")
            found[name] = max(peak - before.get(each, least) for each, peak in peaks.items())
        return found

    def _processes(self, name: str) -> list[Path]:
        return list(with_children(Path(f"/proc/{self._cluster.processes[name].pid}")))


async def send_bytes(ports: Sequence[int], streams: Iterable[bytes]) -> None:
    """Send each of the streams on a connection of its own to each of the ports."""
    gate = asyncio.Semaphore(CONNECTIONS_AT_ONCE)
    await asyncio.gather(*(_connect(port, data, gate) for data in streams for port in ports))


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


class Attacked(Protocol):
    """What an attacker knows: the directory with the keys, and the port of each listener."""

    @property
    def run_dir(self) -> Path: ...
    @property
    def addresses(self) -> Mapping[str, int]: ...


class Thief:
    """Processes that hold the key of STOLEN, and send what it would not."""

    def __init__(self, cluster: Attacked, server: str) -> None:
        self._context = Context()
        self._server = server
        self._address = f"tcp://127.0.0.1:{cluster.addresses[server]}"
        self._keys = Curve(self._context, cluster.run_dir / "keys", STOLEN, ())
        self._dealers: list[Dealer] = []

    def __enter__(self) -> Thief:
        return self

    def __exit__(self, *error: object) -> None:
        self._keys.close()
        self._context.destroy(linger=0)

    def send(self, items: Sequence[Any], say: Callable[[Dealer, Any], object], of_each: int) -> None:
        """`of_each` items by each process. ZMQ sends them once it is connected."""
        for start in range(0, len(items), of_each):
            identity = f"{STOLEN}/{secrets.token_hex(16)}".encode()
            dealer = Dealer(self._context, self._address, identity, self._server, self._keys)
            self._dealers.append(dealer)
            for each in items[start : start + of_each]:
                assert say(dealer, each) is not False

    async def stay_until(self, condition: Callable[[], Awaitable[bool]]) -> None:
        """Keep the connections, and what was not acknowledged, until `condition` holds."""
        async with asyncio.timeout(PATIENCE):
            while not await condition():
                self.drain()
                await asyncio.sleep(0.05)

    def drain(self) -> None:
        """Read what the server has sent."""
        for dealer in self._dealers:
            dealer.drain()


def raw(dealer: Dealer, parts: list[bytes]) -> None:
    """Send message parts that are not a frame of a session."""
    dealer.socket.send_multipart(parts)
