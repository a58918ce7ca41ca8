"""Stands for the spawn process and the router's other child processes: they answer in the router's own process."""

from __future__ import annotations

import asyncio
import itertools
import signal
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec

from router.images.fetch_process import Fetched, Wanted
from router.images.inspector import ImageVerdict, Inspection, inspect
from router.process.child_process import frame_head, framed
from router.process.spawner import Child
from router.text.jobs import Job, JobResult, WorkerSettings
from router.text.work import TextWork
from tests.fakes.memory_connection import MemoryTransport


class StandIn:
    """One process. It reads and answers in callbacks of their own, and ends when its channel closes."""

    def __init__(self, process: Child) -> None:
        self.alive = True
        self._process = process
        self._loop = asyncio.get_running_loop()
        self._transport: MemoryTransport | None = None
        self._unsent: list[bytes] = []
        self._received = b""

    def connect(self, protocol: asyncio.BaseProtocol) -> MemoryTransport:
        """Give the router's end of the channel to `protocol`."""
        transport = self._transport = MemoryTransport(protocol, self._take, self.close)
        for each in self._unsent:
            self._loop.call_soon(transport.receive, each)
        return transport

    def close(self) -> None:
        """Close the router's end of the channel."""
        self._loop.call_soon(self.end, 0)

    def end(self, code: int) -> None:
        """Let the process end."""
        if self.alive:
            self.alive = False
            self._process.end(code)
            if self._transport is not None:
                self._transport.close()

    def send(self, data: bytes) -> None:
        if self._transport is None:
            self._unsent.append(data)
        else:
            self._loop.call_soon(self._transport.receive, data)

    def read(self, data: bytes) -> int:
        """Handle the first message in `data`; return its size, or 0 if it is not complete."""
        if len(data) < 4 or len(data) < 4 + (size := int.from_bytes(data[:4], "little")):
            return 0
        self.handle(data[4 : 4 + size])
        return 4 + size

    def handle(self, message: bytes) -> None:
        """Answer a message."""

    def _take(self, data: bytes) -> None:
        self._received += data
        self._loop.call_soon(self._read_all)

    def _read_all(self) -> None:
        while self.alive and (size := self.read(self._received)):
            self._received = self._received[size:]


@lru_cache(maxsize=4)
def _work_of(model_path: str) -> TextWork:
    return TextWork.load(Path(model_path), lambda seconds: None, None)


class TextStandIn(StandIn):
    """A text worker."""

    _work: TextWork | None = None  # once the settings have arrived

    def read(self, data: bytes) -> int:
        if len(data) < 8:
            return 0
        head = 8 + int.from_bytes(data[:4], "little")
        size = head + int.from_bytes(data[4:8], "little")
        if len(data) < size:
            return 0
        if self._work is None:
            self._work = _work_of(msgspec.msgpack.decode(data[8:head], type=WorkerSettings).model_path)
            self.send(frame_head(JobResult(), 0))
        else:
            answer, result = self._work.do(msgspec.msgpack.decode(data[8:head], type=Job), data[head:size])
            self.send(frame_head(answer, len(result)) + bytes(result))
        return size


class InspectorStandIn(StandIn):
    """The process that decodes images."""

    def __init__(self, process: Child) -> None:
        super().__init__(process)
        self.send(framed(ImageVerdict("")))

    def handle(self, message: bytes) -> None:
        self.send(framed(inspect(msgspec.msgpack.decode(message, type=Inspection))))


class FetchStandIn(StandIn):
    """The process that fetches images: every address has the same one."""

    file = b""
    _ready = False

    def handle(self, message: bytes) -> None:
        number = msgspec.msgpack.decode(message, type=Wanted).number if self._ready else 0
        self.send(framed(Fetched(number, self.file if self._ready else b"")))
        self._ready = True


_KINDS: Mapping[str, type[StandIn]] = {
    "router.text.process": TextStandIn,
    "router.images.inspector": InspectorStandIn,
    "router.images.fetch_process": FetchStandIn,
}


class StandInSpawner:
    """Stands for a Spawner."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._all: dict[int, StandIn] = {}

    @property
    def children(self) -> list[StandIn]:
        """The processes that have not ended."""
        return [each for each in self._all.values() if each.alive]

    async def start(
        self,
        arguments: Sequence[str],
        environment: Mapping[str, str] | None = None,
        answers: bool = False,
        discard_output: bool = False,
    ) -> tuple[Child, Any]:
        await asyncio.sleep(0)
        number = next(self._numbers)
        process = Child(self, number)  # type: ignore[arg-type]
        process.started.set_result(1)
        child = self._all[number] = _KINDS[arguments[1]](process)
        return process, child

    def send(self, kill: Any) -> None:
        asyncio.get_running_loop().call_soon(self._all[kill.number].end, -signal.SIGKILL)

    async def close(self) -> None:
        await asyncio.sleep(0)
