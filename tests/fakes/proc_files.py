"""Reads what /proc says of processes that may end meanwhile."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path


def proc_text(file: Path) -> str:
    """Return the text of a file in /proc, and "" if its process or thread has ended."""
    with contextlib.suppress(OSError):
        return file.read_text()
    return ""


def with_children(process: Path) -> Iterator[Path]:
    """Yield a process's directory in /proc, and those of its descendants. Each of them may end meanwhile.

    The fork that a `fork_client` waits for counts as its child.
    """
    yield process
    name, _, fork = proc_text(process / "comm").partition(" ")
    children = [fork.strip()] if name == "fork" else []
    with contextlib.suppress(OSError):
        for each in process.glob("task/*/children"):
            children += proc_text(each).split()
    for child in children:
        yield from with_children(process.with_name(child))


def listening_sockets(process: Path) -> set[tuple[str, int]]:
    """Return (address, port) of every listening TCP socket of a process, given its directory, and its descendants."""
    inodes = set()
    for each in with_children(process):
        # A socket that a process closes meanwhile, perhaps because it ends, is not one that it listens on.
        with contextlib.suppress(OSError):
            for descriptor in (each / "fd").iterdir():
                with contextlib.suppress(OSError):
                    inodes.add(os.readlink(descriptor))
    found = set()
    for family, table in ((socket.AF_INET, "tcp"), (socket.AF_INET6, "tcp6")):
        for line in (process / "net" / table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] != "0A" or f"socket:[{fields[9]}]" not in inodes:  # 0A: LISTEN
                continue
            address, port = fields[1].split(":")
            words = [int(address[at : at + 8], 16) for at in range(0, len(address), 8)]
            packed = b"".join(word.to_bytes(4, sys.byteorder) for word in words)
            found.add((socket.inet_ntop(family, packed), int(port, 16)))
    return found
