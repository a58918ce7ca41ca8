"""The decode node's side: its pool and its records are mapped files."""

from __future__ import annotations

import mmap
from pathlib import Path

from kv_transfer.transport.base import ReceiverSetup, Region
from kv_transfer.transport.one_host import process
from kv_transfer.transport.one_host.base import MappedReceiver
from tests.fakes.file_transport.kind import FileDescription, FileOptions


class FileReceiver(MappedReceiver):
    def __init__(self, incarnation: str, directory: Path) -> None:
        self._paths = {region: directory / f"{incarnation}.{region}" for region in Region}
        super().__init__()

    def create(self, region: Region, nbytes: int) -> memoryview:
        with self._paths[region].open("w+b") as file:
            file.truncate(nbytes)
            return memoryview(mmap.mmap(file.fileno(), nbytes))

    def describe(self, incarnation: str) -> FileDescription:
        return FileDescription(
            str(self._paths[Region.KV]), str(self._paths[Region.RECORDS]), process.current()
        )

    def close(self) -> None:
        for path in self._paths.values():
            path.unlink(missing_ok=True)
        super().close()


def make_receiver(setup: ReceiverSetup[FileOptions]) -> FileReceiver:
    return FileReceiver(setup.incarnation, Path(setup.options.file_directory))
