"""Two processes that change the same files wait for each other, but not for ever."""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from common import file_lock
from common.errors import ConfigError
from common.file_lock import lock
from tests.fakes.waiting import PATIENCE


@pytest.fixture
def held(tmp_path: Path) -> Iterator[int]:
    """Yield a descriptor whose lock is held."""
    descriptor = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@pytest.fixture
def own(tmp_path: Path) -> Iterator[int]:
    descriptor = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@pytest.mark.usefixtures("held")
def test_a_lock_that_is_held_too_long_is_refused(
    tmp_path: Path, own: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_lock, "LOCK_SECONDS", 0.02)
    with pytest.raises(ConfigError, match=rf"has held the lock of {tmp_path} for 0.02 s; end it"):
        lock(own, tmp_path)


def test_a_lock_is_taken_once_it_is_free(
    tmp_path: Path, held: int, own: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_lock, "LOCK_SECONDS", PATIENCE)
    threading.Timer(0.03, fcntl.flock, (held, fcntl.LOCK_UN)).start()
    lock(own, tmp_path)
    with pytest.raises(BlockingIOError):
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
