"""A cluster does not start on a port that is in use, and says by whom."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from common.config import Resolved, load_cluster
from common.errors import ConfigError
from deploy import ports
from deploy.ports import check_ports
from deploy.supervisor import Supervisor
from tests.fakes.waiting import PATIENCE

LISTENER = """
import socket, sys
made = socket.create_server(("127.0.0.1", 0), reuse_port=True)
print(made.getsockname()[1], flush=True)
sys.stdin.read()
"""
Load = Callable[..., Resolved]


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Load:
    """Return a cluster with these keys, and some of the section `router`."""
    for name in list(os.environ):
        if name.startswith("TANDEM_"):
            monkeypatch.delenv(name)
    monkeypatch.setattr(ports, "LEAVE_SECONDS", 0.2)
    file = tmp_path / "c.yaml"
    (tmp_path / "m").mkdir()
    file.write_text(
        f"model: {{path: m}}\nprocess: {{run_dir: {tmp_path}/run}}\nsecurity: {{open_http: true}}\n"
    )

    def loaded(*others: str, **router: object) -> Resolved:
        return load_cluster(file, [*others, *(f"router.{key}={value}" for key, value in router.items())])

    return loaded


@contextlib.contextmanager
def listener(*arguments: str, **variables: str) -> Iterator[tuple[int, int]]:
    """Start a process with these arguments that shares a port, as one of several routers does; return pid and port.

    `variables`: of its environment, besides those of this process.
    """
    started = subprocess.Popen(
        [sys.executable, "-c", LISTENER, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **variables},
    )
    try:
        assert started.stdout is not None
        yield started.pid, int(started.stdout.readline())
    finally:
        started.communicate(timeout=PATIENCE)


def held_port() -> socket.socket:
    """Return a socket that has a port on which it does not listen."""
    held = socket.socket()
    held.bind(("127.0.0.1", 0))
    return held


def test_the_port_of_another_cluster_is_refused_before_anything_starts(load: Load) -> None:
    with listener("router", "--cluster", "/home/me/other.yaml") as (pid, port):
        supervisor = Supervisor(load(port=port, processes=2), [])
        with pytest.raises(ConfigError) as caught:
            supervisor.start(lambda children: None, lambda text: None)
    assert str(caught.value) == (
        f"router.port: port {port} is in use by the cluster of /home/me/other.yaml (pid {pid}); choose another one "
        "with --port, or stop that cluster with deploy/down /home/me/other.yaml"
    )
    assert [path.name for path in supervisor.run_dir.iterdir()] == ["logs"]
    assert not any((supervisor.run_dir / "logs").iterdir())


def test_the_other_cluster_is_stopped_in_the_directory_that_it_was_given(load: Load) -> None:
    options = ("--set", "router.port=1", "--set", "process.run_dir=/home/me/my run")
    with listener("--cluster", "o.yaml", *options) as (_, port):
        with pytest.raises(ConfigError) as caught:
            check_ports(load(port=port), lambda: False)
    assert str(caught.value).endswith("with deploy/down o.yaml --set 'process.run_dir=/home/me/my run'")


@pytest.mark.parametrize(
    ("options", "directory"),
    [((), "/home/me/env"), (("--set", "process.run_dir=/home/me/set"), "/home/me/set")],
)
def test_the_other_cluster_may_have_its_directory_from_its_environment(
    load: Load, options: tuple[str, ...], directory: str
) -> None:
    """The shell of who reads this has another environment. Options override it, as they do in the cluster."""
    with listener("--cluster", "o.yaml", *options, TANDEM_PROCESS_RUN_DIR="/home/me/env") as (_, port):
        with pytest.raises(ConfigError) as caught:
            check_ports(load(port=port), lambda: False)
    assert str(caught.value).endswith(f"with deploy/down o.yaml --set process.run_dir={directory}")


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_another_process_is_named(load: Load, host: str) -> None:
    with listener() as (pid, port):
        with pytest.raises(ConfigError, match=rf"in use by process {pid} \(.*python.*\).* or end it"):
            check_ports(load(port=port, host=host), lambda: False)
        check_ports(load(port=port, host="127.0.0.2"), lambda: False)


def test_a_process_that_closes_files_meanwhile_is_named(load: Load) -> None:
    """This process closes the descriptor with which it lists its own before it reads where they lead to."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        with pytest.raises(ConfigError, match=f"in use by process {os.getpid()} "):
            check_ports(load(port=taken.getsockname()[1]), lambda: False)


def test_other_ports_are_checked_too(load: Load) -> None:
    with held_port() as held, listener("--cluster", "o.yaml") as (_, port):
        address, own = f"tcp://127.0.0.1:{port}", held.getsockname()[1]
        for key, value in (
            ("router.control_address", address),
            ("prefill.nodes", f"[{{name: prefill-0, peer_address: '{address}'}}]"),
        ):
            with pytest.raises(ConfigError, match="choose another one, or stop") as caught:
                check_ports(load(f"{key}={value}", port=own), lambda: False)
            assert caught.value.path.startswith(key.rstrip("s"))


@pytest.mark.parametrize("key", ["first_port", "first_replay_port"])
def test_the_ports_of_kv_events_are_checked_for_every_node(load: Load, key: str) -> None:
    with held_port() as held, listener("--cluster", "o.yaml") as (_, port):
        first = f"kv_events.{key}={port - 1}"  # the decode node has the second one
        with pytest.raises(ConfigError, match=f"port {port} is in use") as caught:
            check_ports(load("kv_events.enabled=true", first, port=held.getsockname()[1]), lambda: False)
        assert caught.value.path == f"kv_events.{key}"


def test_a_text_that_cannot_be_a_name_is_left_to_the_process_that_binds_to_it(load: Load) -> None:
    with listener() as (_, port):
        check_ports(load(port=port, host="a" * 64), lambda: False)


def test_a_process_that_ends_soon_is_waited_for(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ports, "LEAVE_SECONDS", PATIENCE)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        cluster = load(port=taken.getsockname()[1])
        threading.Timer(0.2, taken.close).start()
        check_ports(cluster, lambda: False)
        assert taken.fileno() == -1


def test_a_port_that_nobody_listens_on_is_free(load: Load) -> None:
    with held_port() as held:
        check_ports(load(port=held.getsockname()[1]), lambda: False)
