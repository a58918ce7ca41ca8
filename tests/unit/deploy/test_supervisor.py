"""The supervisor with small scripts as processes: restarts, a full disk, leftovers of a killed supervisor."""

from __future__ import annotations

import errno
import io
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType

import pytest
from rich.console import Console

from common.config import load_cluster
from common.errors import ConfigError
from common.process_entry import entry
from deploy import cli
from deploy.children import Child
from deploy.disk import disk_problem
from deploy.leftovers import end_leftovers, find_leftovers
from deploy.own_model import lock_path
from deploy.process_table import ProcessRecord, Table, read_table, table_path, write_table
from deploy.supervisor import StartError, Supervisor
from deploy.watcher import StartBounds
from tests.fakes.clock import Clock
from tests.fakes.disks import FullDisk, small_disk
from tests.fakes.locks import is_locked
from tests.fakes.waiting import PATIENCE, until

__all__ = ["small_disk"]

PROGRAM = """
import os, signal, sys, time
script, status = sys.argv[1], int(sys.argv[-1])
def ready():
    os.write(status, b'{"phase":"ready"}\\n')
exec(script)
"""
STAY = "signal.signal(15, lambda n, f: sys.exit(0)); ready()\nwhile True: time.sleep(0.01)"
STEPS = 6
CRASH = "print('no memory', file=sys.stderr); sys.exit(1)"


@dataclass
class Watching:
    """A supervisor that watches in a thread; it ends its processes on exit."""

    supervisor: Supervisor
    said: list[str]
    file: Path
    thread: threading.Thread | None = None

    def __enter__(self) -> Watching:
        for child in self.supervisor.children:
            child.start()
        self.thread = thread = threading.Thread(target=self.supervisor.watch, args=(self.said.append,))
        self.thread.start()
        until(lambda: not thread.is_alive() or read_table(self.supervisor.run_dir) is not None)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self.thread is not None
        alive = self.thread.is_alive()
        self.supervisor.request_stop()
        self.thread.join(PATIENCE)
        self.supervisor.stop()
        assert alive, "watch ended"

    def child(self, name: str) -> Child:
        return next(child for child in self.supervisor.children if child.name == name)

    def record(self, name: str) -> ProcessRecord:
        table = read_table(self.supervisor.run_dir)
        assert table is not None
        return table.processes[name]

    def heard(self, text: str) -> bool:
        return any(text in line for line in self.said)


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Watching]]:
    """Make a cluster of scripts, by name."""
    for name in list(os.environ):
        if name.startswith("TANDEM_"):
            monkeypatch.delenv(name)
    with tempfile.TemporaryDirectory(prefix="td") as directory:
        (Path(directory) / "scripted.py").write_text(PROGRAM)
        (Path(directory) / "m").mkdir()
        monkeypatch.setenv("PYTHONPATH", directory)
        file = Path(directory) / "c.yaml"

        def cluster(run_dir: Path | None = None, **scripts: str) -> Watching:
            where = run_dir or Path(directory) / "run"
            file.write_text(
                f"model: {{path: m}}\nprocess: {{run_dir: {where}}}\nhealth: {{drain_timeout: 5.0, "
                "start_hang_timeout: 1.0}\n"
            )
            supervisor = Supervisor(load_cluster(file), [])
            children = [
                Child(name, ["scripted", script], supervisor.run_dir / "logs" / f"{name}.log")
                for name, script in scripts.items()
            ]
            supervisor.supervise(children)
            return Watching(supervisor, [], file)

        yield cluster


def test_one_process_in_a_crash_loop_leaves_the_others_alone(make: Callable[..., Watching]) -> None:
    with make(router=STAY, loop=CRASH, other=STAY) as cluster:
        until(lambda: cluster.record("loop").restarts >= 4)
        loop = cluster.record("loop")
        assert loop.last_end == "ended with exit code 1 (no memory)"
        assert cluster.heard("loop ended with exit code 1 (no memory); restarting in 1.6 s")
        assert [cluster.record(name).restarts for name in ("router", "other")] == [0, 0]
        until(lambda: [cluster.record(name).state for name in ("router", "other")] == ["up", "up"])
        assert cluster.record("other").alive
        cluster.child("other").signal(signal.SIGKILL)
        until(lambda: cluster.record("other").restarts == 1 and cluster.record("other").state == "up")
        assert cluster.heard("other ended with signal SIGKILL")


def test_a_full_disk_and_a_dead_process(make: Callable[..., Watching], small_disk: FullDisk) -> None:
    """The table records it in its existing blocks, the report mentions it, and the process is restarted."""
    with make(small_disk.path, router=STAY, node=STAY) as cluster:
        run_dir = cluster.supervisor.run_dir
        until(lambda: cluster.record("node").state == "up")
        small_disk.fill()
        until(lambda: cluster.heard("is full (under 1 MiB free)"))
        cluster.child("node").signal(signal.SIGKILL)
        until(lambda: cluster.record("node").restarts == 1 and cluster.record("node").alive)
        assert cluster.record("node").last_end.startswith("ended with signal SIGKILL")
        table = read_table(run_dir)
        assert table is not None
        assert f"the disk of {run_dir} is full" in table.problems[0]
        (run_dir / "logs" / "node.log").unlink()
        (run_dir / "logs").rename(run_dir / "gone")  # no log can be opened any more
        cluster.child("node").signal(signal.SIGKILL)
        until(lambda: cluster.record("node").restarts == 2)
        until(lambda: cluster.heard("node.log cannot be opened"))
        assert cluster.record("node").alive


def test_a_run_directory_that_becomes_read_only(make: Callable[..., Watching], small_disk: FullDisk) -> None:
    with make(small_disk.path, router=STAY, node=STAY) as cluster:
        until(lambda: cluster.record("node").state == "up")
        before = cluster.child("node").pid
        logs = [child.log_path for child in cluster.supervisor.children]
        for log in logs:
            log.unlink()
        subprocess.run(["mount", "--bind", str(small_disk.path), str(small_disk.path)], check=True)
        subprocess.run(["mount", "-o", "remount,bind,ro", str(small_disk.path)], check=True)
        try:
            until(lambda: cluster.heard("read-only file system"))
            cluster.child("node").signal(signal.SIGKILL)
            until(lambda: cluster.heard("node was restarted"))
            assert cluster.child("node").pid != before
            until(lambda: cluster.heard("cluster.json cannot be written"))
        finally:
            subprocess.run(["umount", "-l", str(small_disk.path)], check=True)
        until(lambda: cluster.record("node").restarts == 1)
        until(lambda: cluster.heard("resolved: "))


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_a_table_that_cannot_be_written(
    make: Callable[..., Watching], monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Whatever the disk does, processes are watched, and the table is written as soon as that is possible."""
    broken = threading.Event()

    def write(run_dir: Path, table: Table) -> None:
        if broken.is_set():
            raise OSError(number, os.strerror(number))
        write_table(run_dir, table)

    monkeypatch.setattr("deploy.supervisor.write_table", write)
    with make(router=STAY, node=STAY) as cluster:
        until(lambda: cluster.record("node").state == "up")
        broken.set()
        cluster.child("node").signal(signal.SIGKILL)
        until(lambda: cluster.heard("node is up again"))
        until(lambda: cluster.heard(f"cluster.json cannot be written: {os.strerror(number)}"))
        assert cluster.record("node").restarts == 0
        broken.clear()
        until(lambda: cluster.record("node").restarts == 1)
        until(lambda: cluster.heard("resolved: "))


def test_a_table_that_was_tidied_away_is_written_again(make: Callable[..., Watching]) -> None:
    """Some systems clean directories under /tmp, but deploy/status and deploy/down need the table."""
    with make(router=STAY) as cluster:
        until(lambda: cluster.record("router").state == "up")
        table_path(cluster.supervisor.run_dir).unlink()
        until(lambda: read_table(cluster.supervisor.run_dir))


def test_a_report_that_cannot_be_written_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """supervisor.log is on the same disk, and the terminal may be closed."""

    class Full(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(sys, "stderr", Full())
    cli.say("decode-0 ended", "yellow")
    monkeypatch.setattr(cli, "console", Console(file=Full(), force_terminal=True))
    cli.say("decode-0 ended", "yellow")
    monkeypatch.undo()


def test_a_disk_with_space_is_no_problem(tmp_path: Path, small_disk: FullDisk) -> None:
    assert disk_problem(tmp_path) is None
    assert "is full" in (disk_problem(small_disk.path) or "")
    assert "cannot be read" in (disk_problem(tmp_path / "none") or "")


def test_a_refusal_at_the_first_start_ends_it(make: Callable[..., Watching]) -> None:
    refuse = 'os.write(status, b\'{"phase":"failed","message":"no such model"}\\n\'); sys.exit(2)'
    cluster = make(router=STAY, node=refuse)
    with pytest.raises(StartError, match="node ended with exit code 2: no such model"):
        cluster.supervisor.start(lambda children: None, cluster.said.append)
    assert sorted(path.name for path in cluster.supervisor.run_dir.iterdir()) == ["logs"]
    again = make(router=STAY)  # the lock is free
    again.supervisor.stop()


def test_a_start_that_cannot_fork_leaves_nothing(
    make: Callable[..., Watching], monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(self: Child) -> None:
        raise BlockingIOError("Resource temporarily unavailable")

    monkeypatch.setattr(Child, "start", start)
    cluster = make(router=STAY)
    with pytest.raises(StartError, match="cannot start a process: Resource temporarily unavailable"):
        cluster.supervisor.start(lambda children: None, cluster.said.append)
    assert sorted(path.name for path in cluster.supervisor.run_dir.iterdir()) == ["logs"]


# -- leftovers of a killed supervisor ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("script", "code"), [("", -signal.SIGTERM), ("signal.signal(15, signal.SIG_IGN)", -signal.SIGKILL)]
)
def test_processes_of_a_killed_supervisor_are_ended(tmp_path: Path, script: str, code: int) -> None:
    """Two generations with the same names would replace each other at the router."""
    program = f"import signal, time\n{script}\nprint('ready', flush=True)\nwhile True: time.sleep(0.01)"
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as left:
        assert left.stdout is not None
        left.stdout.readline()
        process = entry(left.pid)
        me = entry(os.getpid())
        stranger = ProcessRecord(pid=me.pid, started=me.started - 1)  # its pid has since been given to us
        dead = ProcessRecord(pid=process.pid, started=1)
        running = ProcessRecord(pid=process.pid, started=process.started)
        processes = {"router": stranger, "prefill-0": dead, "decode-0": running}
        table = Table(supervisor=stranger, cluster="c", url="u", state="ready", processes=processes)
        write_table(tmp_path, table)
        said: list[str] = []
        assert list(find_leftovers(tmp_path)) == ["decode-0"]
        end_leftovers(find_leftovers(tmp_path), PATIENCE, said.append, lambda: True)  # Ctrl-C ends the wait
        grace = 0.3 if code == -signal.SIGKILL else PATIENCE
        end_leftovers(find_leftovers(tmp_path), grace, said.append, lambda: False)
        assert left.wait(PATIENCE) == code
    assert f"left decode-0 (pid {left.pid}) running: waiting" in said[0]
    said.clear()
    assert find_leftovers(tmp_path) == find_leftovers(tmp_path / "nothing") == {}
    end_leftovers({}, PATIENCE, said.append, lambda: False)
    assert not said


@pytest.mark.parametrize("written", [True, False])
def test_a_supervisor_that_waits_for_leftovers_is_found_by_down(
    make: Callable[..., Watching], written: bool
) -> None:
    """Its table is there before the wait, with the leftovers: if it is killed too, the next one ends them."""
    cluster = make(router=STAY)
    if written:
        lock_path(cluster.file).touch()  # as if deploy/up had written the file for a model
    run_dir, seen, locked = cluster.supervisor.run_dir, list[Table | None](), list[bool]()
    with subprocess.Popen([sys.executable, "-c", "import time\nwhile True: time.sleep(0.01)"]) as left:
        process, me = entry(left.pid), entry(os.getpid())
        gone = ProcessRecord(pid=me.pid, started=me.started - 1)
        processes = {"decode-0": ProcessRecord(pid=process.pid, started=process.started)}
        write_table(run_dir, Table(supervisor=gone, cluster="c", url="u", state="ready", processes=processes))
        assert read_table(run_dir) is None

        def report(text: str) -> None:
            seen.append(read_table(run_dir))
            locked.extend([is_locked(run_dir), is_locked(cluster.file.parent)])
            cluster.supervisor.request_stop()

        with pytest.raises(StartError, match="stopped while starting"):
            cluster.supervisor.start(lambda children: None, report)
        left.wait(PATIENCE)
    (table,) = seen
    assert table is not None
    assert (table.supervisor, table.state) == (me, "starting")
    assert table.processes == processes
    assert read_table(run_dir) is None
    # A program that removes old files leaves these alone. deploy/api_key has to lock a directory of the user.
    assert locked == [True, written]
    assert not is_locked(run_dir)


def test_leftovers_stay_known_if_the_disk_has_no_room_for_the_first_table(
    make: Callable[..., Watching], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The start is refused before they have ended, so the next one has to find them."""

    def write(run_dir: Path, table: Table) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    cluster = make(router=STAY)
    run_dir = cluster.supervisor.run_dir
    with subprocess.Popen([sys.executable, "-c", "import time\nwhile True: time.sleep(0.01)"]) as left:
        process, me = entry(left.pid), entry(os.getpid())
        gone = ProcessRecord(pid=me.pid, started=me.started - 1)
        processes = {"decode-0": ProcessRecord(pid=process.pid, started=process.started)}
        write_table(run_dir, Table(supervisor=gone, cluster="c", url="u", state="ready", processes=processes))
        monkeypatch.setattr("deploy.supervisor.write_table", write)
        with pytest.raises(ConfigError, match="cannot write to .*No space left"):
            cluster.supervisor.start(lambda children: None, cluster.said.append)
        found = find_leftovers(run_dir)
        left.kill()
    assert found == processes
    again = make(router=STAY)
    again.supervisor.stop()
    assert not table_path(run_dir).exists()


class Loading:
    """Lets processes report a step in each turn of the supervisor, after which 0.6 s pass on its clock."""

    def __init__(self, folder: Path, processes: int) -> None:
        self._folder = folder
        self._processes = processes
        self._steps = 0
        self.clock = Clock()
        folder.mkdir()
        self.script = f"""
for done in range({STEPS}):
    while not os.path.exists(f"{folder}/permitted-{{done}}"): time.sleep(0.005)
    os.write(status, b'{{"phase":"loading","done":%d,"total":{STEPS}}}\\n' % done)
    open(f"{folder}/reported-{{done}}-{{os.getpid()}}", "x").close()
print("no such model", file=sys.stderr); sys.exit(2)
"""

    def show(self, children: list[Child]) -> None:
        if self._steps < STEPS:
            (self._folder / f"permitted-{self._steps}").touch()
            reported = f"reported-{self._steps}-*"
            until(lambda: len(list(self._folder.glob(reported))) == self._processes)
            self._steps += 1
            self.clock.now += 0.6


def test_every_process_that_starts_is_heard_while_another_one_is_slow(
    make: Callable[..., Watching], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """All of them make progress for longer than they may be silent, and a start that is silent is named."""
    monkeypatch.setattr("deploy.watcher.SILENT_SECONDS", 0.0)
    loading = Loading(tmp_path / "three", 3)
    monkeypatch.setattr("deploy.supervisor.StartBounds", partial(StartBounds, clock=loading.clock))
    script = loading.script
    supervisor = make(first=script, second=script, third=script).supervisor
    with pytest.raises(StartError, match=r"ended with exit code 2: no such model"):
        supervisor.start(loading.show, lambda text: None)
    loading = Loading(tmp_path / "two", 2)
    monkeypatch.setattr("deploy.supervisor.StartBounds", partial(StartBounds, clock=loading.clock))
    script = loading.script
    supervisor = make(first=script, silent="time.sleep(60)", third=script).supervisor
    with pytest.raises(
        StartError, match=r"^silent has reported no progress for 1 s \(phase importing\); see "
    ):
        supervisor.start(loading.show, lambda text: None)
