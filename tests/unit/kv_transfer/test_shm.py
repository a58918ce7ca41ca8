"""Shared memory: names, sweeping, and the proof of a sender's death, with real child processes and signals."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import re
import resource
import secrets
import signal
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from common.errors import ConfigError, HandshakeRefused
from kv_transfer import messages
from kv_transfer.events import PagesFree, RoomFailed
from kv_transfer.transport.base import Region, Target
from kv_transfer.transport.one_host import process
from kv_transfer.transport.one_host import segment as shm_segment
from kv_transfer.transport.one_host.process import ProcessIdentity, ProcessWatch
from kv_transfer.transport.one_host.segment import sweep_orphans
from kv_transfer.transport.shm.kind import ShmDescription
from kv_transfer.transport.shm.receiver import ShmReceiver
from kv_transfer.transport.shm.sender import ShmSender
from tests.fakes.descriptors import open_descriptors
from tests.fakes.pools import layers_layout
from tests.fakes.stopped_process import is_stopped
from tests.fakes.waiting import PATIENCE, until
from tests.unit.kv_transfer.rig import Clock, Decode

INCARNATION = "ab" * 16
LAYOUT = layers_layout("m", "float32", 2, 4, [(2, 4)])
ROOT = Path(__file__).parents[3]


class Child:
    """A Python process that has printed one line and sleeps."""

    def __init__(self, code: str) -> None:
        self.popen = subprocess.Popen(
            [sys.executable, "-c", code + "\nimport time; time.sleep(600)"],
            stdout=subprocess.PIPE,
            cwd=ROOT,
            text=True,
        )
        assert self.popen.stdout is not None
        self.line = self.popen.stdout.readline().strip()

    @property
    def identity(self) -> ProcessIdentity:
        started = process.start_ticks(self.popen.pid)
        assert started is not None
        return ProcessIdentity(process.current().host, self.popen.pid, started)

    def end(self) -> None:
        self.popen.kill()
        self.popen.wait()
        assert self.popen.stdout is not None
        self.popen.stdout.close()


@pytest.fixture
def child() -> Iterator[Callable[[str], Child]]:
    made: list[Child] = []

    def start(code: str) -> Child:
        made.append(Child(code))
        return made[-1]

    yield start
    for each in made:
        each.end()


@pytest.fixture
def receiver() -> Iterator[ShmReceiver]:
    incarnation = secrets.token_hex(16)
    made = ShmReceiver(incarnation)
    made.allocate(Region.KV, LAYOUT.total_bytes)
    made.allocate(Region.RECORDS, 256)
    made.open(LAYOUT, 64)
    yield made
    made.close()


def target(receiver: ShmReceiver, **changes: object) -> Target:
    description = receiver.describe("p")
    assert isinstance(description, ShmDescription)
    values = {"kv": description.kv, "records": description.records, "owner": description.owner, **changes}
    incarnation = description.kv.split(".")[5]
    return Target(incarnation, ShmDescription(**values), LAYOUT.total_bytes, 256)  # type: ignore[arg-type]


def segments(receiver: ShmReceiver) -> list[Path]:
    description = receiver.describe("p")
    assert isinstance(description, ShmDescription)
    return [shm_segment.SHM_DIR / description.kv, shm_segment.SHM_DIR / description.records]


def test_segments_are_private_and_gone_after_close_while_the_view_lives(receiver: ShmReceiver) -> None:
    paths = segments(receiver)
    for path in paths:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    view = receiver.kv
    receiver.close()
    assert not any(path.exists() for path in paths)
    view[0] = 1  # the engine's pool still exists
    receiver.close()


def test_a_sender_unmaps_the_memory_at_detach(receiver: ShmReceiver) -> None:
    sender = ShmSender()
    sender.register(LAYOUT, memoryview(bytearray(LAYOUT.total_bytes)))
    peer = sender.attach(target(receiver))
    name = segments(receiver)[0].name
    assert name in Path("/proc/self/maps").read_text()
    mapped = Path("/proc/self/maps").read_text().count(name)
    sender.detach(peer)
    assert Path("/proc/self/maps").read_text().count(name) == mapped - 1
    assert sender.poll(sender.write(peer, [], 1)).value == "failed"
    assert sender.poll(sender.write_record(peer, 0, b"x", 1)).value == "failed"
    sender.detach(peer)
    sender.close()


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"kv": "../../etc/passwd"}, "not the name of a segment that it created"),
        (
            {"owner": ProcessIdentity(process.current().host, 1, 1)},
            "not the name of a segment that it created",
        ),
        ({"owner": ProcessIdentity("elsewhere", 1, 1)}, "another host or in another pid namespace"),
    ],
)
def test_refused_descriptions(receiver: ShmReceiver, changes: dict[str, object], says: str) -> None:
    with pytest.raises(HandshakeRefused, match=says):
        ShmSender().attach(target(receiver, **changes))


@pytest.mark.parametrize("end", ["raise SystemExit('the start has failed')", "raise KeyboardInterrupt", ""])
def test_a_process_that_ends_before_it_serves_leaves_no_segments(own_directory: Path, end: str) -> None:
    """Its children do not remove them before."""
    code = f"""
import os, sys
from pathlib import Path
from kv_transfer.transport.one_host import segment
segment.SHM_DIR = Path(sys.argv[1])
own = segment.OwnSegments({INCARNATION!r})
own.create("kv", 4096)
if not (child := os.fork()):
    sys.exit()
os.waitpid(child, 0)
print(len(os.listdir(sys.argv[1])), flush=True)
{end}
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(own_directory)], cwd=ROOT, capture_output=True, text=True
    )
    assert done.stdout == "1\n"
    assert os.listdir(own_directory) == []


def test_refused_segments(receiver: ShmReceiver) -> None:
    wanted = target(receiver)
    too_much = Target(wanted.incarnation, wanted.description, LAYOUT.total_bytes, 10**6)
    with pytest.raises(HandshakeRefused, match="its layout needs 1000000"):
        ShmSender().attach(too_much)
    for owner in (process.current(), ProcessIdentity(process.current().host, process.current().pid, 1)):
        name = f"tandem.0.0.{owner.pid}.{owner.started}.{INCARNATION}"
        missing = ShmDescription(f"{name}.kv", f"{name}.records", owner)
        with pytest.raises(HandshakeRefused, match=r"cannot be opened \(No such file or directory\)"):
            ShmSender().attach(Target(INCARNATION, missing, LAYOUT.total_bytes, 256))


def test_a_segment_whose_name_somebody_has_removed_is_found_by_its_owner(
    child: Callable[[str], Child],
) -> None:
    """As systemd-logind does when the user logs out: a prefill node that starts later has to reach the pool."""
    before = open_descriptors()
    owner = child(
        "from kv_transfer.transport.one_host.segment import OwnSegments\n"
        f"own = OwnSegments({INCARNATION!r})\n"
        "views = [own.create('kv', 4096), own.create('records', 4096)]\n"
        "views[0][:5] = b'pages'\n"
        "print(own.names['kv'], flush=True)"
    )
    (shm_segment.SHM_DIR / owner.line).unlink()
    mapped = shm_segment.attach_owned(owner.line, owner.identity, INCARNATION, 4096)
    assert mapped[:5] == b"pages"
    mapped.close()
    records = owner.line.replace(".kv", ".records")
    (shm_segment.SHM_DIR / records).unlink()
    with pytest.raises(HandshakeRefused, match="has 4096 bytes, its layout needs 8192"):
        shm_segment.attach_owned(records, owner.identity, INCARNATION, 8192)
    owner.end()
    with pytest.raises(HandshakeRefused, match="cannot be opened"):
        shm_segment.attach(owner.line, 4096)
    assert open_descriptors() == before


def test_no_room_in_dev_shm_is_a_sentence() -> None:
    incarnation = secrets.token_hex(16)
    with pytest.raises(ConfigError, match="has no room for .* MiB of KV pages: enlarge it"):
        ShmReceiver(incarnation).allocate(Region.KV, 1 << 50)
    assert not list(shm_segment.SHM_DIR.glob(f"*{incarnation}*"))


def test_a_limit_of_file_sizes_is_named() -> None:
    """Segments are files, which Python may not make larger than `ulimit -f` allows."""
    incarnation = secrets.token_hex(16)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
    try:
        with pytest.raises(
            ConfigError, match="2 MiB of KV pages are more than a file may have here: raise ulimit -f"
        ):
            ShmReceiver(incarnation).allocate(Region.KV, 2 << 20)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not list(shm_segment.SHM_DIR.glob(f"*{incarnation}*"))


@pytest.mark.parametrize(
    ("number", "remedy"),
    [
        (errno.ENOENT, "mount a tmpfs there, or use the tcp transport"),
        (errno.EROFS, "mount it writable, or use the tcp transport"),
        (errno.EACCES, "let this user write there (chmod 1777), or use the tcp transport"),
        (errno.ENOSPC, "remove files there, enlarge it (docker: --shm-size, "),
        (errno.ENOTDIR, "use the tcp transport"),
        (errno.EIO, "use the tcp transport"),
    ],
)
def test_a_segment_that_cannot_be_created_is_a_sentence_with_the_remedy_that_fits(
    monkeypatch: pytest.MonkeyPatch, number: int, remedy: str
) -> None:
    really_open = os.open

    def refuse(path: Path, flags: int, mode: int = 0o777) -> int:
        if isinstance(path, Path) and path.parent == shm_segment.SHM_DIR:
            raise OSError(number, os.strerror(number))
        return really_open(path, flags, mode)

    monkeypatch.setattr(os, "open", refuse)
    said = f"takes no KV pages ({os.strerror(number)}): {remedy}"
    with pytest.raises(ConfigError, match=re.escape(said)):
        ShmReceiver(secrets.token_hex(16)).allocate(Region.KV, 4096)


@pytest.fixture
def own_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory instead of /dev/shm, which clusters that start next to this test sweep, too."""
    monkeypatch.setattr(shm_segment, "SHM_DIR", tmp_path)
    return tmp_path


CREATE = f"""
from pathlib import Path
from kv_transfer.transport.one_host import segment as shm_segment
from kv_transfer.transport.shm.receiver import ShmReceiver
from kv_transfer.transport.base import Region
shm_segment.SHM_DIR = Path("DIRECTORY")
made = ShmReceiver({INCARNATION!r})
made.allocate(Region.KV, 4096); made.allocate(Region.RECORDS, 64)
print(made.describe("p").kv, flush=True)
"""


def test_a_killed_owner_is_swept_and_a_living_one_is_not(
    own_directory: Path, child: Callable[[str], Child], receiver: ShmReceiver
) -> None:
    owner = child(CREATE.replace("DIRECTORY", str(own_directory)))
    path = own_directory / owner.line
    os.kill(owner.popen.pid, signal.SIGSTOP)
    assert owner.line not in sweep_orphans()
    assert path.exists()
    os.kill(owner.popen.pid, signal.SIGKILL)
    owner.popen.wait()
    assert path.exists()  # nobody could clean it up
    removed = sweep_orphans()
    assert {owner.line, owner.line.replace(".kv", ".records")} <= set(removed)
    assert not path.exists()
    assert all(own.exists() for own in segments(receiver))


def test_an_owner_whose_exit_code_nobody_has_collected_is_swept(
    child: Callable[[str], Child], own_directory: Path
) -> None:
    """As a process that `deploy/down` has just ended: its parent may be busy."""
    owner = child("print(1, flush=True)")
    me, prefix = owner.identity, f"tandem.{os.getuid()}.{process.pid_namespace()}"
    left = own_directory / f"{prefix}.{me.pid}.{me.started}.{INCARNATION}.kv"
    left.touch()
    assert sweep_orphans() == []
    owner.popen.kill()
    watch = ProcessWatch(me)
    until(lambda: watch.dead)
    assert process.start_ticks(me.pid) == me.started
    assert sweep_orphans() == [left.name]


def test_sweeping_detects_reused_pids_and_spares_foreign_segments(own_directory: Path) -> None:
    me = process.current()
    prefix = f"tandem.{os.getuid()}.{process.pid_namespace()}"
    reused = own_directory / f"{prefix}.{me.pid}.{me.started - 1}.{'cd' * 16}.kv"
    foreign = own_directory / f"tandem.{os.getuid()}.1.{me.pid}.1.{'cd' * 16}.kv"
    odd = own_directory / f"{prefix}.not-ours"
    for path in (reused, foreign, odd):
        path.touch()
    assert sweep_orphans() == [reused.name]
    assert foreign.exists()
    assert odd.exists()


def test_death_is_proved_by_the_process_and_by_nothing_less(
    child: Callable[[str], Child], receiver: ShmReceiver
) -> None:
    sender = child("print('up', flush=True)")
    receiver.admit("p", sender.identity)
    assert not receiver.peer_is_dead("p")
    assert not receiver.peer_is_dead("never admitted")
    os.kill(sender.popen.pid, signal.SIGSTOP)
    until(lambda: is_stopped(sender.popen.pid))
    receiver.expel("p")
    assert not receiver.peer_is_dead("p")  # it is only stopped: it may continue to write
    assert receiver.revoke(1) is False
    os.kill(sender.popen.pid, signal.SIGKILL)
    until(lambda: receiver.peer_is_dead("p"))  # a zombie is already dead
    sender.popen.wait()
    assert receiver.peer_is_dead("p")
    receiver.forget("p")
    assert not receiver.peer_is_dead("p")


def test_a_watch_is_not_fooled_by_another_process_with_the_same_pid(child: Callable[[str], Child]) -> None:
    alive = child("print('up', flush=True)")
    other = ProcessIdentity(alive.identity.host, alive.identity.pid, alive.identity.started - 1)
    assert ProcessWatch(other).dead
    alive.end()
    assert ProcessWatch(other).dead  # there is no such pid
    alive.popen = subprocess.Popen([sys.executable, "-c", ""], stdout=subprocess.PIPE, text=True)


def test_a_process_that_cannot_be_watched_is_refused(
    receiver: ShmReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    def denied(pid: int) -> int:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "pidfd_open", denied)
    with pytest.raises(HandshakeRefused, match="cannot be watched"):
        receiver.admit("p", process.current())


@contextlib.contextmanager
def free_descriptors(count: int) -> Iterator[None]:
    """Let this process open `count` descriptors more."""
    # Garbage of an earlier test that is collected later would give its descriptors back.
    gc.collect()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    opened = [os.open("/dev/null", os.O_RDONLY) for _ in range(count + 1)]
    for each in opened:
        os.close(each)
    resource.setrlimit(resource.RLIMIT_NOFILE, (opened[-1], hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("count", [0, 1])
def test_without_a_free_descriptor_no_process_counts_as_dead(receiver: ShmReceiver, count: int) -> None:
    """Of two that are needed, the second one was missing: the start of the process could not be compared."""
    me = process.current()
    with free_descriptors(count):
        assert process.current() == me, "a prefill node names itself to every decode node that connects"
        with pytest.raises(HandshakeRefused, match=r"Too many open files.*ulimit -Hn") as refused:
            receiver.admit("p", me)
        assert "use the tcp transport" not in str(refused.value), "its pages could be watched"
        assert not receiver.peer_is_dead("p")
    receiver.admit("p", me)
    assert not receiver.peer_is_dead("p")


def test_a_sender_without_a_free_descriptor_does_not_blame_the_segment(receiver: ShmReceiver) -> None:
    sender = ShmSender()
    sender.register(LAYOUT, memoryview(bytearray(LAYOUT.total_bytes)))
    where = target(receiver)
    with free_descriptors(0), pytest.raises(OSError, match="Too many open files"):
        sender.attach(where)
    sender.detach(sender.attach(where))


def test_a_process_that_is_hidden_in_proc_does_not_count_as_dead(
    monkeypatch: pytest.MonkeyPatch, child: Callable[[str], Child]
) -> None:
    sender = child("print('up', flush=True)")
    identity = sender.identity
    monkeypatch.setattr(process, "start_ticks", lambda pid: None)
    watch = ProcessWatch(identity)
    assert not watch.dead
    sender.popen.kill()
    until(lambda: watch.dead)


def test_sweeping_spares_what_it_cannot_judge_or_remove(
    own_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefix = f"tandem.{os.getuid()}.{process.pid_namespace()}"
    unknown, foreign = (own_directory / f"{prefix}.{pid}.1.{'cd' * 16}.kv" for pid in (1, 2))
    for path in (unknown, foreign):
        path.touch()
    remove, ticks = Path.unlink, process.start_ticks

    def unlink(path: Path, missing_ok: bool = False) -> None:
        if path == foreign:
            raise PermissionError(1, "Operation not permitted")
        remove(path, missing_ok)

    def start_ticks(pid: int) -> int | None:
        if pid == 1:
            raise OSError(24, "Too many open files")
        return ticks(pid)

    monkeypatch.setattr(Path, "unlink", unlink)
    monkeypatch.setattr(process, "start_ticks", start_ticks)
    assert sweep_orphans() == []
    assert unknown.exists()


WRITER = """
import sys, mmap, os
from kv_transfer.transport.one_host import segment as shm_segment
mapped = shm_segment.attach(sys.argv[1], 64)
if os.fork() == 0:
    try:
        mapped[0] = 1
    finally:
        os._exit(0)
print(os.waitstatus_to_exitcode(os.wait()[1]), flush=True)
"""


def test_a_forked_child_does_not_inherit_the_mapping(receiver: ShmReceiver) -> None:
    """Otherwise it could write after its parent was proved dead."""
    name = segments(receiver)[1].name
    done = subprocess.run(
        [sys.executable, "-c", WRITER, name],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=True,
    )
    assert done.stdout.strip() == str(-signal.SIGSEGV)
    assert receiver.records[0] == 0


def test_the_receiver_frees_pages_of_a_killed_sender_and_keeps_those_of_a_stopped_one(
    child: Callable[[str], Child],
) -> None:
    clock = Clock()
    incarnation, peer = secrets.token_hex(16), secrets.token_hex(16)
    decode = Decode(clock, ShmReceiver(incarnation), incarnation=incarnation)
    sender = child("print('up', flush=True)")
    said: list[bytes] = []
    decode.receiver.connect(peer, said.append)
    welcome = messages.encode(messages.Welcome("prefill-0", sender.identity), peer)
    decode.receiver.handle(peer, welcome)
    decode.receiver.open(1, (peer,), [1, 2], 0)
    os.kill(sender.popen.pid, signal.SIGSTOP)
    decode.receiver.peer_lost(peer)
    (failed,) = decode.poll()
    assert isinstance(failed, RoomFailed)
    clock.now += 1000
    assert decode.poll() == []
    assert decode.receiver.quarantined_pages == 2
    sender.end()
    assert decode.poll() == [PagesFree(1, (1, 2))]
    assert decode.receiver.quarantined_pages == 0
    # Without any message from the router, the death of a process is noticed at the next poll.
    second = child("print('up', flush=True)")
    peer = secrets.token_hex(16)
    decode.receiver.connect(peer, said.append)
    decode.receiver.handle(peer, messages.encode(messages.Welcome("prefill-1", second.identity), peer))
    decode.receiver.open(2, (peer,), [1, 2], 0)
    assert decode.poll() == []
    second.end()
    failed, free = decode.poll()
    assert isinstance(failed, RoomFailed)
    assert (failed.code, free) == ("node_lost", PagesFree(2, (1, 2)))
    decode.receiver.shutdown()
