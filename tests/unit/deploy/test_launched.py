"""Processes without a supervisor: their records, and how deploy/down ends them and nobody else."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from common.launch_record import FOLDER, LaunchRecord, launch_record, launched
from common.process_entry import Entry, entry
from deploy.launched import elsewhere, end_launched
from kv_transfer.transport.one_host import segment
from kv_transfer.transport.one_host.process import pid_namespace
from tests.fakes.waiting import PATIENCE

Process = subprocess.Popen[bytes]
# Each child prints a line when it is ready for the signal. One that comes just before a blocking read would be handled
# after it, so DRAINS waits for the signal itself.
DRAINS = (
    "import signal; own = {signal.SIGTERM}; signal.pthread_sigmask(signal.SIG_BLOCK, own);"
    "print(1, flush=True); signal.sigtimedwait(own, 600)"
)
STAYS = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True); input()"


class Processes:
    """Children whose ends are collected at once, as those of a shell are."""

    def __init__(self) -> None:
        self.children: list[Process] = []

    def start(self, code: str) -> Process:
        child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.children.append(child)
        assert child.stdout is not None
        assert child.stdout.readline() == b"1\n"
        return child


@pytest.fixture
def processes() -> Iterator[Processes]:
    made = Processes()
    yield made
    for child in made.children:
        child.kill()
        with child:
            child.wait()


def write(run_dir: Path, name: str, process: Entry) -> Path:
    (run_dir / FOLDER).mkdir(exist_ok=True)
    file = run_dir / FOLDER / f"{name}.{process.pid}.json"
    file.write_bytes(msgspec.json.encode(process))
    return file


def own_record(drain_timeout: float) -> LaunchRecord:
    own = entry(os.getpid())
    return LaunchRecord(pid=own.pid, started=own.started, drain_timeout=drain_timeout)


def test_a_process_has_a_record_while_it_runs(tmp_path: Path) -> None:
    with launch_record(tmp_path, "router", 7.0):
        assert launched(tmp_path) == [("router", own_record(7.0))]
    assert launched(tmp_path) == []
    assert list((tmp_path / FOLDER).iterdir()) == []


def test_a_run_directory_that_cannot_be_written_to_is_no_hindrance(tmp_path: Path) -> None:
    (tmp_path / FOLDER).write_text("a file in its place")
    with launch_record(tmp_path, "router", 7.0):
        assert launched(tmp_path) == []


def test_a_record_appears_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`deploy/down` would not see half of one, and a process of the same name would remove it for good."""
    write_bytes, found = Path.write_bytes, []

    def halfway(path: Path, data: bytes) -> int:
        write_bytes(path, data[: len(data) // 2])
        found.append(list((tmp_path / FOLDER).glob("*.json")))
        return write_bytes(path, data)

    monkeypatch.setattr(Path, "write_bytes", halfway)
    with launch_record(tmp_path, "router", 7.0):
        assert launched(tmp_path) == [("router", own_record(7.0))]
    assert found == [[]]
    assert list((tmp_path / FOLDER).iterdir()) == []


def test_a_full_disk_leaves_no_part_of_a_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, data: bytes) -> int:
        path.touch()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_bytes", full)
    with launch_record(tmp_path, "router", 7.0):
        assert list((tmp_path / FOLDER).iterdir()) == []


def test_what_a_killed_process_left_is_not_found_and_goes_with_the_next_start(tmp_path: Path) -> None:
    old = write(tmp_path, "decode-0", Entry(pid=os.getpid(), started=1))
    other = write(tmp_path, "decode-1", Entry(pid=os.getpid(), started=1))
    assert launched(tmp_path) == []
    old = old.rename(old.with_name("decode-0.7.json"))
    with launch_record(tmp_path, "decode-0", 7.0):
        assert not old.exists()
        assert other.exists()


def test_a_later_process_with_the_same_pid_is_not_ended(processes: Processes) -> None:
    child = processes.start(DRAINS)
    recorded = Entry(pid=child.pid, started=entry(child.pid).started - 1)
    assert end_launched([("decode-0", recorded)], PATIENCE) == []
    assert child.poll() is None


@pytest.mark.parametrize("error", [errno.ENOSYS, errno.EPERM])
def test_a_process_that_the_kernel_gives_no_descriptor_for_is_ended_by_its_pid(
    processes: Processes, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    """Some container runtimes have no such call, or forbid it."""

    def refuse(pid: int) -> int:
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(os, "pidfd_open", refuse)
    child = processes.start(DRAINS)
    earlier = Entry(pid=child.pid, started=entry(child.pid).started - 1)
    assert end_launched([("decode-0", earlier)], PATIENCE) == []
    assert child.poll() is None
    assert end_launched([("decode-0", entry(child.pid))], PATIENCE) == []
    assert child.wait(PATIENCE) == 0


def test_processes_of_others_are_not_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with launch_record(tmp_path, "router", 7.0):
        monkeypatch.setattr("common.launch_record.os.getuid", lambda: 4711)
        assert launched(tmp_path) == []


def test_all_of_them_drain(processes: Processes) -> None:
    children = [processes.start(DRAINS) for _ in range(3)]
    names = ("decode-0", "prefill-0", "router")
    assert end_launched([(n, entry(c.pid)) for n, c in zip(names, children, strict=True)], PATIENCE) == []
    assert [child.wait(PATIENCE) for child in children] == [0, 0, 0]


def test_memory_of_one_that_was_still_loading_is_removed(
    processes: Processes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends at once at SIGTERM, without a handler."""
    monkeypatch.setattr(segment, "SHM_DIR", tmp_path)
    child = processes.start("print(1, flush=True); input()")
    loading = entry(child.pid)
    owner = f"tandem.{os.getuid()}.{pid_namespace()}.{loading.pid}.{loading.started}"
    left = tmp_path / f"{owner}.{'ab' * 16}.kv"
    left.touch()
    assert end_launched([("decode-0", loading)], PATIENCE) == []
    assert not left.exists()


def test_one_that_does_not_end_is_named(processes: Processes) -> None:
    child = processes.start(STAYS)
    assert end_launched([("prefill-0", entry(child.pid))], 0.2) == [f"prefill-0 (pid {child.pid})"]


def test_nodes_that_run_elsewhere() -> None:
    here = os.uname().nodename
    nodes = [
        {"name": "prefill-0", "pid": 7, "host": here},
        {"name": "decode-0", "pid": 7, "host": "other"},
        {"name": "decode-1", "pid": 9, "host": here},
    ]
    known = [("prefill-0", Entry(pid=7, started=1)), ("decode-0", Entry(pid=7, started=1))]
    assert elsewhere({"nodes": nodes}, known) == [
        "decode-0 (pid 7 on other)",
        f"decode-1 (pid 9 on {here})",
    ]
    assert elsewhere(None, known) == []


@pytest.mark.parametrize("role", ["router", "prefill_node", "decode_node"])
def test_errors_of_the_launch_scripts_speak_of_the_script(role: str) -> None:
    said = subprocess.run(
        [sys.executable, "-m", role, "--bogus"], capture_output=True, text=True, check=False, timeout=PATIENCE
    )
    assert said.returncode == 2
    assert f"Usage: deploy/launch_{role.removesuffix('_node')} " in said.stderr
