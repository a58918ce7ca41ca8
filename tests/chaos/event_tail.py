"""Reads the event logs while the cluster runs, so that a fault can wait for its moment."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import BinaryIO

from tests.chaos.stations import Station, Stations

LIST_INTERVAL = 0.2  # seconds between searches for new files
WATCH_INTERVAL = 0.002  # seconds between reads while a fault waits


class EventTail:
    """Follows the logs. `stations` is as current as the last `read`."""

    def __init__(self, directory: Path) -> None:
        self.stations = Stations()
        self._directory = directory
        self._files: dict[Path, tuple[BinaryIO, bytes]] = {}  # file -> (handle, bytes of an incomplete line)
        self._listed_at = 0.0

    def read(self) -> None:
        """Process everything that was written since the last call."""
        if time.monotonic() - self._listed_at > LIST_INTERVAL:
            self._listed_at = time.monotonic()
            for path in self._directory.glob("*.jsonl"):
                if path not in self._files:
                    self._files[path] = (path.open("rb"), b"")
        events = []
        for path, (handle, rest) in self._files.items():
            data = handle.read()
            if data:
                *lines, rest = (rest + data).split(b"\n")
                self._files[path] = (handle, rest)
                events += [json.loads(line) for line in lines if line]
        for event in sorted(events, key=lambda event: event["t"]):
            self.stations.follow(event)

    async def wait(self, target: str, station: Station, seconds: float) -> bool:
        """Wait until a request that needs `target` is at the station. Return False if none came in time."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self.read()
            if station in self.stations.at(target):
                return True
            await asyncio.sleep(WATCH_INTERVAL)
        return False

    def close(self) -> None:
        for handle, _ in self._files.values():
            handle.close()
