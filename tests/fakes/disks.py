"""Full or read-only disks: a tiny tmpfs if this user may mount one; otherwise the tests are skipped."""

from __future__ import annotations

import contextlib
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

SIZE = "256k"


@dataclass(frozen=True)
class FullDisk:
    """A tmpfs, by default of 256 KiB. Its path is short enough for sockets."""

    path: Path

    def fill(self) -> None:
        """Write until not a single byte more fits."""
        with (self.path / "filler").open("ab", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(4096))

    def free(self) -> None:
        (self.path / "filler").unlink()

    def make_read_only(self) -> None:
        subprocess.run(["mount", "-o", "remount,ro", str(self.path)], check=True, capture_output=True)


@pytest.fixture
def small_disk() -> Iterator[FullDisk]:
    with mounted(SIZE) as disk:
        yield disk


@contextlib.contextmanager
def mounted(size: str) -> Iterator[FullDisk]:
    """Give a tmpfs of this size; skip the test if that is not allowed."""
    with tempfile.TemporaryDirectory(prefix="td") as directory:
        mount = ["mount", "-t", "tmpfs", "-o", f"size={size},mode=700", "tmpfs", directory]
        try:
            subprocess.run(mount, check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError):
            pytest.skip("this user may not mount a tmpfs")
        try:
            yield FullDisk(Path(directory))
        finally:
            subprocess.run(["umount", "-l", directory], check=True, capture_output=True)


full_disk = small_disk
