"""One of several router processes listens for operators; another takes over when it ends."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
from pathlib import Path
from typing import Any

import pytest

from common.errors import ConfigError
from common.observability.logs import Log
from router.server import admin_socket
from router.server.admin_socket import AdminSocket
from router.server.sockets import owner_socket
from tests.fakes.descriptors import open_descriptors
from tests.fakes.waiting import eventually


class Served:
    def __init__(self) -> None:
        self.sockets: list[socket.socket] = []

    async def __call__(self, listener: socket.socket) -> None:
        listener.listen()
        self.sockets.append(listener)

    def close(self) -> None:
        for each in self.sockets:
            each.close()


async def test_the_next_process_takes_over(tmp_path: Path) -> None:
    path = tmp_path / "router.admin.sock"
    first, second = (AdminSocket(path, True, Log("test")) for _ in range(2))
    served, taken = Served(), Served()
    await first.start(served)
    await second.start(taken)
    assert (len(served.sockets), len(taken.sockets)) == (1, 0)
    served.close()
    first.remove()
    await eventually(lambda: len(taken.sockets) == 1)
    assert path.stat().st_mode & 0o777 == 0o600
    taken.close()
    second.remove()
    assert not path.exists()


async def test_the_socket_of_a_killed_process_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "router.admin.sock"
    with socket.socket(socket.AF_UNIX) as killed:
        killed.bind(str(path))
    admin, served = AdminSocket(path, True, Log("test")), Served()
    await admin.start(served)
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))
    served.close()
    admin.remove()


async def test_a_process_that_waits_survives_a_moment_without_descriptors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of its two steps fails once: opening the lock, and binding the socket once it has the lock."""
    monkeypatch.setattr(admin_socket, "LOOK_SECONDS", 0.01)
    path = tmp_path / "router.admin.sock"
    first, second = (AdminSocket(path, True, Log("test")) for _ in range(2))
    served, taken, failures = Served(), Served(), ["open", "bind"]
    await first.start(served)
    await second.start(taken)
    opened = os.open

    def fail(step: str) -> None:
        if failures[:1] == [step]:
            failures.pop(0)
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    def open_once_more(*args: Any) -> int:
        fail("open")
        return opened(*args)

    def bind_once_more(*args: Any) -> socket.socket:
        fail("bind")
        return owner_socket(*args)

    monkeypatch.setattr(os, "open", open_once_more)
    monkeypatch.setattr(admin_socket, "owner_socket", bind_once_more)
    await eventually(lambda: failures == ["bind"])
    served.close()
    first.remove()
    await eventually(lambda: len(taken.sockets) == 1)
    assert failures == []
    taken.close()
    second.remove()


async def test_a_process_that_waits_can_end(tmp_path: Path) -> None:
    path = tmp_path / "router.admin.sock"
    first, second = (AdminSocket(path, True, Log("test")) for _ in range(2))
    served = Served()
    await first.start(served)
    await second.start(Served())
    second.stop_waiting()
    second.remove()
    assert path.exists(), "it belongs to the other process"
    served.close()
    first.remove()


async def test_a_path_that_cannot_be_used_is_named_and_costs_no_descriptor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on file systems without locks, where a process may try again for as long as it runs."""
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"router\.admin: cannot listen at .*/file/sock: Not a directory"):
        owner_socket(tmp_path / "file" / "sock")

    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    before = open_descriptors()
    with pytest.raises(ConfigError, match=r"router\.admin: cannot lock .*: No locks available"):
        await AdminSocket(tmp_path / "router.admin.sock", True, Log("test")).start(Served())
    assert open_descriptors() <= before
