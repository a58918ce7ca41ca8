"""The process that runs the MPS server of a cluster, with a script in place of NVIDIA's program."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from common.config import load_cluster
from common.config.gpu_sharing import SERVER, server_answers
from common.process_entry import entry
from deploy.process_table import ProcessRecord
from deploy.status_view import process_state
from deploy.supervisor import Supervisor
from tests.fakes.waiting import PATIENCE, until

ROOT = Path(__file__).parents[3]
# Ends if it is asked to, as the real one does once it has no client.
PROGRAM = f"""#!{sys.executable}
import os, socket, sys
control = os.environ["CUDA_MPS_PIPE_DIRECTORY"] + "/control"
place = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
if sys.argv[1:] == ["-f"]:
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        sys.exit("sees only some GPUs")
    place.bind(control)
    place.listen()
    print("started", flush=True)
    while (said := place.accept()[0].recv(99)) not in (b"quit\\n", b"fail"):
        pass
    sys.exit(said == b"fail")
place.connect(control)
place.sendall(sys.stdin.buffer.read())
"""


@dataclass
class Place:
    """A directory with the program, for clusters on GPUs."""

    root: Path

    @property
    def program(self) -> Path:
        return self.root / "bin" / "nvidia-cuda-mps-control"

    @property
    def sockets(self) -> Path:
        return self.root / "run" / "mps"

    @property
    def file(self) -> Path:
        file = self.root / "c.yaml"
        file.write_text(
            f"model: {{path: m}}\nprocess: {{run_dir: {self.root / 'run'}, gpu_sharing: decode_first}}\n"
            "prefill: {nodes: [{name: p, device: cuda:0}]}\ndecode: {nodes: [{name: d, device: cuda:0}]}\n"
        )
        return file

    def start(self) -> subprocess.Popen[str]:
        environment = {**os.environ, "PATH": str(self.program.parent), "CUDA_VISIBLE_DEVICES": "3"}
        return subprocess.Popen(
            [sys.executable, "-m", "deploy.mps_server", "--cluster", str(self.file)],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )


@pytest.fixture
def place() -> Iterator[Place]:
    with tempfile.TemporaryDirectory(prefix="td") as root:
        made = Place(Path(root))
        made.program.parent.mkdir()
        made.program.write_text(PROGRAM)
        made.program.chmod(0o700)
        yield made


def end_of(server: subprocess.Popen[str]) -> tuple[int, str]:
    output, _ = server.communicate(timeout=PATIENCE)
    return server.returncode, output


def test_it_serves_until_it_is_asked_to_end(place: Place) -> None:
    place.sockets.mkdir(parents=True)
    (place.sockets / "control").touch()  # of an earlier server
    server = place.start()
    until(lambda: server_answers(place.sockets) or server.poll() is not None)
    server.send_signal(signal.SIGTERM)
    code, output = end_of(server)
    assert code == 0, output
    assert '"line":"started"' in output
    assert not server_answers(place.sockets)


def test_a_server_that_ends_by_itself_is_an_error(place: Place) -> None:
    server = place.start()
    until(lambda: server_answers(place.sockets) or server.poll() is not None)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as asking:
        asking.connect(str(place.sockets / "control"))
        asking.sendall(b"fail")
    code, output = end_of(server)
    assert code == 1
    assert '"event":"the MPS server has ended"' in output


def test_without_the_program_it_is_refused(place: Place) -> None:
    place.program.unlink()
    code, output = end_of(place.start())
    assert code == 2
    assert (
        "process.gpu_sharing: nvidia-cuda-mps-control cannot be started (No such file or directory)" in output
    )


def test_a_run_directory_with_a_long_path_is_refused(place: Place) -> None:
    place.root = place.root / ("d" * (81 - len(str(place.root))))
    # Longer paths are refused for the sockets of every cluster.
    assert len(str(place.sockets / "control_privileged")) == 109
    place.program.parent.mkdir(parents=True)
    code, output = end_of(place.start())
    assert code == 2
    assert "is too long for the sockets of an MPS server; set a shorter path" in output


def test_the_supervisor_starts_it_first_and_the_status_shows_it(place: Place) -> None:
    (place.root / "m").mkdir()
    supervisor = Supervisor(load_cluster(place.file), [])
    try:
        assert [child.name for child in supervisor.children] == [SERVER, "router", "p", "d"]
    finally:
        supervisor.stop()
    own = entry(os.getpid())
    record = ProcessRecord(pid=own.pid, started=own.started, state="up")
    assert process_state(SERVER, record, {}, None) == "up"
