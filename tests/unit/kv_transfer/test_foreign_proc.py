"""Containers that mount the /proc of another pid namespace, such as the host's."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from common.errors import ConfigError
from kv_transfer.transport.one_host import process
from kv_transfer.transport.one_host import segment as shm_segment
from kv_transfer.transport.one_host.segment import sweep_orphans
from kv_transfer.transport.shm.receiver import ShmReceiver


@pytest.fixture
def foreign_proc(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Give this process a pid of its own namespace, under which /proc shows nobody; yields that pid."""
    monkeypatch.setattr(os, "getpid", lambda: (1 << 30) + 1)
    process.current.cache_clear()
    yield os.getpid()
    process.current.cache_clear()


def test_a_process_knows_its_identity_where_proc_is_that_of_another_namespace(foreign_proc: int) -> None:
    stat = Path("/proc/self/stat").read_text()
    assert process.current().pid == foreign_proc
    assert process.current().started == int(stat.rpartition(") ")[2].split()[19])


def test_no_owner_is_judged_by_the_proc_of_another_namespace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, foreign_proc: int
) -> None:
    """Each owner of a segment would count as dead, and so would each peer whose pid somebody else has there."""
    monkeypatch.setattr(shm_segment, "SHM_DIR", tmp_path)
    segment = tmp_path / f"tandem.{os.getuid()}.{process.pid_namespace()}.2.1.{'cd' * 16}.kv"
    segment.touch()
    for judge in (sweep_orphans, lambda: ShmReceiver("ab" * 16)):
        with pytest.raises(ConfigError, match="mount the container's own /proc, or choose another"):
            judge()
    assert segment.exists()


def test_a_process_that_proc_does_not_show_is_refused_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch, foreign_proc: int
) -> None:
    read = Path.read_bytes

    def hidden(path: Path) -> bytes:
        if path == Path("/proc/self/stat"):
            raise FileNotFoundError(2, "No such file or directory", str(path))
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", hidden)
    with pytest.raises(ConfigError, match="/proc/self/stat does not exist.*mount the container's own /proc"):
        process.current()
