"""The file RUN_DIR/NAME.ready exists while a node takes requests, for probes: nodes have no HTTP to ask."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path


def ready_path(run_dir: Path, name: str) -> Path:
    return run_dir / f"{name}.ready"


class ReadyFile:
    """The file of one process. One that cannot be written is left out: a node serves on a full disk, too."""

    def __init__(self, run_dir: Path | None, name: str) -> None:
        """Remove the file that an earlier process of the name may have left. There is none without a directory."""
        self._path = None if run_dir is None else ready_path(run_dir, name)
        self.clear()

    def set(self) -> None:
        """Note that the node is loaded and its main loop begins."""
        if self._path is not None:
            with contextlib.suppress(OSError):
                self._path.touch(mode=0o600)

    def clear(self) -> None:
        """Note that the node drains or has ended. Usable in a signal handler."""
        if self._path is not None:
            with contextlib.suppress(OSError):
                self._path.unlink()


@contextlib.contextmanager
def ready_file(run_dir: Path | None, name: str) -> Iterator[ReadyFile]:
    """Give the file of this process, which is gone at the end."""
    file = ReadyFile(run_dir, name)
    try:
        yield file
    finally:
        file.clear()
