"""A small file system for the run directory and the logs of a cluster, which a fault can fill."""

from __future__ import annotations

import secrets
import shutil
import subprocess
from pathlib import Path

MIB = 64  # holds the logs of a long run and the files of a test
CHUNK = bytes(1 << 16)


class Disk:
    """A tmpfs if one can be mounted, otherwise a plain directory that is never filled."""

    def __init__(self, wanted: bool) -> None:
        # short, because sockets are created in it
        self.path = Path(f"/tmp/tandem-chaos-{secrets.token_hex(4)}")
        self.run_dir = self.path / "run"
        self.logs = self.path / "logs"
        self.can_be_filled = False
        self._wanted = wanted
        self._filler = self.path / "filler"

    def mount(self) -> None:
        self.path.mkdir(mode=0o700)
        if self._wanted:
            options = f"size={MIB}m,mode=0700"
            command = ["mount", "-t", "tmpfs", "-o", options, "tandem-chaos", str(self.path)]
            self.can_be_filled = subprocess.run(command, check=False, capture_output=True).returncode == 0
        self.logs.mkdir()

    def fill(self) -> None:
        """Write until not a single byte more fits into any file."""
        with self._filler.open("ab", buffering=0) as file:
            for size in (len(CHUNK), 1):
                try:
                    while file.write(CHUNK[:size]) == size:
                        pass
                except OSError:
                    continue

    def free(self) -> None:
        self._filler.unlink(missing_ok=True)

    def remove(self, keep: Path) -> None:
        """Unmount it and move the logs to `keep`."""
        if self.logs.is_dir():
            shutil.copytree(self.logs, keep, dirs_exist_ok=True)
        if self.can_be_filled:
            subprocess.run(["umount", "-l", str(self.path)], check=False, capture_output=True)
        shutil.rmtree(self.path, ignore_errors=True)
