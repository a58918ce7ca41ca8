"""The run directory: its location, its permissions, and the length of its path."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from common.config import Resolved, load_cluster
from common.config import run_directory as module
from common.config.run_directory import control_addresses, peer_address, run_directory
from common.errors import ConfigError


def resolved(
    directory: Path, run_dir: str | None = None, name: str = "cluster.yaml", more: str = ""
) -> Resolved:
    file = directory / name
    file.write_text("model: {path: m}\n" + (f"process: {{run_dir: {run_dir}}}\n" if run_dir else "") + more)
    return load_cluster(file, environ={})


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A private XDG_RUNTIME_DIR with a short path, because it holds sockets."""
    with tempfile.TemporaryDirectory(prefix="td") as base:
        monkeypatch.setenv("XDG_RUNTIME_DIR", base)
        yield Path(base)


@pytest.fixture
def lax_umask() -> Iterator[None]:
    previous = os.umask(0)
    yield
    os.umask(previous)


def test_auto_is_private_and_named_after_the_file(tmp_path: Path, runtime: Path, lax_umask: None) -> None:
    path = run_directory(resolved(tmp_path, name="local.yaml"))
    assert path.parent == runtime
    assert path.name.startswith("local-")
    assert mode(path) == 0o700
    assert run_directory(resolved(tmp_path, name="local.yaml")) == path


def test_files_of_one_name_do_not_meet(tmp_path: Path, runtime: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    assert run_directory(resolved(tmp_path / "a")) != run_directory(resolved(tmp_path / "b"))


def test_long_names_of_files_are_cut(tmp_path: Path, runtime: Path) -> None:
    assert len(run_directory(resolved(tmp_path, name="n" * 200 + ".yaml")).name) == 24 + 1 + 8


@pytest.mark.parametrize("broken", ["missing", "writable by others", "unset"])
def test_without_a_private_runtime_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    """XDG_RUNTIME_DIR may belong to another user (sudo, su) or be /tmp in a container: it must not be chmod-ed."""
    base = tmp_path / "x"
    if broken == "unset":
        monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    else:
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(base))
    if broken == "writable by others":
        base.mkdir()
        base.chmod(0o1777)
    path = run_directory(resolved(tmp_path))
    try:
        assert path.parent == Path(f"/tmp/tandem-{os.getuid()}")
        assert mode(path) == mode(path.parent) == 0o700
        if base.exists():
            assert mode(base) == 0o1777
    finally:
        path.rmdir()


def test_a_directory_that_is_removed_at_logout_is_not_used(
    tmp_path: Path, runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cluster that outlives the login, as in a job, would lose its sockets and its files.

    Lingering changes nothing: a cluster that runs while it is enabled must be found where it was started.
    """
    own = runtime / "user" / str(os.getuid())
    own.mkdir(0o700, parents=True)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(own))
    monkeypatch.setattr(module, "LOGIN_DIRECTORIES", own.parent.resolve())
    monkeypatch.setattr(Path, "exists", lambda path: True)  # the files that say who lingers included
    path = run_directory(resolved(tmp_path))
    path.rmdir()
    assert path.parent == Path(f"/tmp/tandem-{os.getuid()}")


def test_a_configured_directory_is_used(tmp_path: Path, lax_umask: None) -> None:
    path = run_directory(resolved(tmp_path, "run"))
    assert path == (tmp_path / "run").resolve()
    assert mode(path) == 0o700


def test_a_directory_that_others_can_read_is_closed(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir(mode=0o755)
    assert mode(run_directory(resolved(tmp_path, "run"))) == 0o700


@pytest.mark.parametrize("bits", [0o777, 0o1777, 0o770, 0o702])
def test_a_directory_that_others_can_write_to_is_refused(tmp_path: Path, bits: int) -> None:
    """Its content may not be ours, and /tmp must not be made private."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run").chmod(bits)
    with pytest.raises(ConfigError, match="others can write"):
        run_directory(resolved(tmp_path, "run"))
    assert mode(tmp_path / "run") == bits


def test_a_directory_of_somebody_else_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "run").mkdir(mode=0o700)
    monkeypatch.setattr(os, "getuid", lambda: os.stat(tmp_path).st_uid + 1)
    with pytest.raises(ConfigError, match="belongs to another user") as caught:
        run_directory(resolved(tmp_path, "run"))
    assert caught.value.path == "process.run_dir"


def test_a_link_is_followed_only_where_a_person_set_it(tmp_path: Path, runtime: Path) -> None:
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    assert run_directory(resolved(tmp_path, str(tmp_path / "link"))).stat() == (tmp_path / "real").stat()
    path = run_directory(resolved(tmp_path))
    path.rmdir()
    path.symlink_to(tmp_path / "real")
    with pytest.raises(ConfigError, match="not a directory"):
        run_directory(resolved(tmp_path))


def test_what_cannot_be_made_is_a_config_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for run_dir in ("file", "file/below", "/proc/nowhere"):
        with pytest.raises(ConfigError, match="run_dir"):
            run_directory(resolved(tmp_path, run_dir))


def test_a_read_only_directory_is_refused_for_writing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nodes of a running cluster connect to sockets there even if the disk has become read-only."""
    cluster = resolved(tmp_path, "run")
    path = run_directory(cluster, to_write=True)
    access = os.access
    monkeypatch.setattr(os, "access", lambda other, mode: other != path and access(other, mode))
    with pytest.raises(ConfigError, match=f"cannot write to {path}: .* set process.run_dir"):
        run_directory(cluster, to_write=True)
    assert control_addresses(cluster) == [f"ipc://{path}/router.sock"]


@pytest.mark.parametrize("name", ["prefill-0", "p" * 41])
def test_every_socket_fits(tmp_path: Path, name: str) -> None:
    """The longest name in the directory fits exactly into the limit of 107 bytes."""
    nodes = f"prefill: {{nodes: [{{name: {name}}}]}}\n"
    longest = max(len(name), len(module.ADMIN))
    room = 107 - len(f"/{'n' * longest}.sock")
    base = f"/tmp/tandem-test-{os.getpid()}-"
    fitting = base + "d" * (room - len(base))
    try:
        path = run_directory(resolved(tmp_path, fitting, more=nodes))
        sockets = [path / f"{each}.sock" for each in (module.ADMIN, name)]
        assert peer_address(resolved(tmp_path, fitting, more=nodes), name) == f"ipc://{sockets[1]}"
        assert max(len(str(socket)) for socket in sockets) == 107
        with pytest.raises(ConfigError, match="too long"):
            run_directory(resolved(tmp_path, fitting + "d", more=nodes))
    finally:
        Path(fitting).rmdir()
        Path(fitting + "d").rmdir()


def test_length_is_counted_in_bytes(tmp_path: Path) -> None:
    path = f"/tmp/{os.getpid()}{'ü' * 45}"
    try:
        with pytest.raises(ConfigError, match="too long"):
            run_directory(resolved(tmp_path, path))
    finally:
        Path(path).rmdir()


def test_addresses_follow_from_the_run_directory(tmp_path: Path, runtime: Path) -> None:
    auto = resolved(tmp_path)
    assert control_addresses(auto) == [f"ipc://{run_directory(auto)}/router.sock"]
    assert peer_address(auto, "prefill-0") == f"ipc://{run_directory(auto)}/prefill-0.sock"
    named = resolved(
        tmp_path,
        more="router: {control_address: 'tcp://127.0.0.1:1'}\n"
        "prefill: {nodes: [{name: a, peer_address: 'tcp://127.0.0.1:2'}]}\n",
    )
    assert control_addresses(named) == ["tcp://127.0.0.1:1"]
    assert peer_address(named, "a") == "tcp://127.0.0.1:2"
    with pytest.raises(ConfigError, match="no node is called 'b'"):
        peer_address(named, "b")
