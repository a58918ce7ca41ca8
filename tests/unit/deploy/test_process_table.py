"""The state file of a running cluster, and how it distinguishes a process from a later one with its pid."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

from common.process_entry import Entry, entry, start_time
from deploy.process_table import (
    ProcessRecord,
    Table,
    read_any_table,
    read_table,
    table_path,
    write_table,
)
from tests.fakes.disks import FullDisk, full_disk

__all__ = ["full_disk"]


def table(supervisor: Entry) -> Table:
    return Table(
        supervisor=supervisor,
        cluster="/c.yaml",
        url="http://127.0.0.1:1",
        state="ready",
        processes={
            "router": ProcessRecord(
                pid=7,
                started=8,
                state="backing off",
                restarts=3,
                restart_at=5.5,
                last_end="ended with exit code 1",
            )
        },
        problems=["the disk is full"],
    )


def test_what_is_written_is_read(tmp_path: Path) -> None:
    written = table(entry(os.getpid()))
    write_table(tmp_path, written)
    assert read_table(tmp_path) == written
    assert [path.name for path in tmp_path.iterdir()] == ["cluster.json"]
    write_table(tmp_path, written)  # replaces an existing one


def test_a_missing_table_reads_as_none(tmp_path: Path) -> None:
    assert read_table(tmp_path) is None
    assert read_table(tmp_path / "missing") is None


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"{}", b'{"supervisor": 7}', b"\x00\xff", b'{"url": "\xc3"}']
)
def test_a_file_that_is_no_table_is_ignored(tmp_path: Path, content: bytes) -> None:
    table_path(tmp_path).write_bytes(content)
    assert read_table(tmp_path) is None


def test_the_table_of_a_killed_supervisor_is_recognised(tmp_path: Path) -> None:
    me = entry(os.getpid())
    # its pid now belongs to another process
    write_table(tmp_path, table(Entry(pid=me.pid, started=me.started - 1)))
    assert read_table(tmp_path) is None
    left = read_any_table(tmp_path)
    assert left is not None
    assert left.processes["router"].pid == 7


def test_a_full_disk_keeps_the_table_current(full_disk: FullDisk) -> None:
    """Its blocks already exist: changes are written into them, and no partial file takes up space."""
    me = entry(os.getpid())
    write_table(full_disk.path, table(me))
    full_disk.fill()
    for restarts in range(100):
        record = ProcessRecord(pid=1, started=1, restarts=restarts, last_end="x" * 500)
        changed = msgspec.structs.replace(table(me), processes={"router": record})
        write_table(full_disk.path, changed)
        assert read_table(full_disk.path) == changed
    assert sorted(path.name for path in full_disk.path.iterdir()) == ["cluster.json", "filler"]
    with pytest.raises(OSError, match="No space left"):
        write_table(full_disk.path, msgspec.structs.replace(changed, url="x" * 20_000))
    assert read_table(full_disk.path) == changed
    full_disk.free()
    write_table(full_disk.path, table(me))
    assert read_table(full_disk.path) == table(me)


def test_a_table_that_is_being_overwritten_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = table(entry(os.getpid()))
    write_table(tmp_path, whole)
    text = table_path(tmp_path).read_bytes()
    table_path(tmp_path).write_bytes(text[:50])
    waits: list[float] = []

    def finish(seconds: float) -> None:
        waits.append(seconds)
        table_path(tmp_path).write_bytes(text)

    monkeypatch.setattr(time, "sleep", finish)
    assert read_table(tmp_path) == whole
    assert len(waits) == 1


def test_a_process_is_alive_until_it_ends() -> None:
    assert entry(os.getpid()).alive
    assert not Entry(pid=os.getpid(), started=1).alive
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        record = entry(child.pid)
        assert record.alive
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert start_time(child.pid) is None  # it is a zombie
        assert not record.alive
    assert not record.alive
    assert entry(child.pid) == Entry(pid=child.pid, started=0)
    assert not entry(child.pid).alive


@pytest.mark.parametrize("name", [b"a) R 1 2 3", b"(((", b"\xff\xfe x", b")"])
def test_a_process_may_have_any_name(name: bytes) -> None:
    code = f"import ctypes, sys; ctypes.CDLL(None).prctl(15, {name!r}); print('named', flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        child.stdout.readline()
        started = start_time(child.pid)
        assert started is not None
        mine = start_time(os.getpid())
        assert mine is not None
        assert started >= mine  # confirms the field: ticks since boot
        child.kill()
