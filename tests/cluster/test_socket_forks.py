"""A server of forks goes on when a client is killed, or is slow to say what its fork shall be."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.socket_forks import start_server
from tests.fakes.waiting import PATIENCE

SERVED = """
import os, sys
from tests.fakes.socket_forks import serve
if serve(sys.argv[1]):
    print("a fork in", os.getcwd(), flush=True)
    os._exit(3)
"""


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """Arguments with which a Python gets a fork that says where it runs and ends with the code 3."""
    folder = tmp_path_factory.mktemp("forks")
    (folder / "served.py").write_text(SERVED)
    # `deploy/check` keeps modules of the current directory from being found.
    paths = f"{folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    return start_server("served", environment={**os.environ, "PYTHONPATH": paths}, directory=folder)


@pytest.fixture
def silent(program: tuple[str, ...]) -> Iterator[socket.socket]:
    """A client that has connected and has said nothing yet."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as client:
        client.connect(program[-1])
        yield client


def expect_a_fork(program: tuple[str, ...], directory: Path) -> None:
    command = [sys.executable, *program]
    ended = subprocess.run(command, cwd=directory, stdout=subprocess.PIPE, text=True, timeout=PATIENCE)
    assert (ended.returncode, ended.stdout) == (3, f"a fork in {directory}\n")


def test_a_client_that_is_killed_before_it_asks_gets_no_fork(
    program: tuple[str, ...], silent: socket.socket, tmp_path: Path
) -> None:
    silent.close()
    expect_a_fork(program, tmp_path)


@pytest.mark.usefixtures("silent")
def test_a_client_that_has_not_asked_yet_delays_no_other(program: tuple[str, ...], tmp_path: Path) -> None:
    expect_a_fork(program, tmp_path)
