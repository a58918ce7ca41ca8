"""deploy/up, status and down as used by a person and by a script: exit codes, messages, nothing left over."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cluster.harness import ENV, MODEL, PATIENT, ROOT, hold_port
from tests.fakes.waiting import PATIENCE, until

pytestmark = pytest.mark.timeout(900)


@pytest.fixture
def port() -> Iterator[socket.socket]:
    """Bind a port for the router, so that no other test gets it; a listener on it keeps the router out."""
    with hold_port() as held:
        yield held


@pytest.fixture
def cluster_file(tmp_path: Path, port: socket.socket) -> Path:
    file = tmp_path / "mine.yaml"
    # Short, because the path of an ipc socket is limited.
    run_dir = f"/tmp/tandem-deploy-{os.getpid()}-{time.monotonic_ns() % 100_000}"
    sections = {
        "model": {"path": str(MODEL)},
        "router": {"port": port.getsockname()[1]},
        "health": PATIENT,
        "process": {"run_dir": run_dir},
    }
    file.write_text(yaml.safe_dump(sections, sort_keys=False))
    return file


def run_dir_of(file: Path) -> Path:
    return Path(re.findall(r"run_dir: (\S+)", file.read_text())[0])


def deploy(
    command: str, *arguments: str, environment: Mapping[str, str] = ENV
) -> subprocess.CompletedProcess[str]:
    """Run what deploy/COMMAND runs once the environment is set up."""
    return subprocess.run(
        [sys.executable, "-m", "deploy.cli", command, *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )


def left_behind(file: Path) -> dict[str, list[str]]:
    """Return the processes, sockets, segments and state of this cluster that still exist."""
    processes = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                if str(file).encode() in (entry / "cmdline").read_bytes():
                    processes.append(entry.name)
            except OSError:
                continue
    run_dir = run_dir_of(file)
    files = [path.name for path in run_dir.iterdir() if path.name not in ("logs", "supervisor.log")]
    return {"processes": processes, "files": files}


def pids_of(file: Path) -> set[tuple[int, int]]:
    """Return (pid, start time) of its processes; the start time matters because pids are reused."""
    table = json.loads((run_dir_of(file) / "cluster.json").read_text())
    return {(entry["pid"], entry["started"]) for entry in table["processes"].values()}


def record_of(file: Path, name: str) -> dict[str, Any]:
    record: dict[str, Any] = json.loads((run_dir_of(file) / "cluster.json").read_text())["processes"][name]
    return record


def ask(file: Path, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    return post(json.loads((run_dir_of(file) / "cluster.json").read_text())["url"] + path, body)


def post(url: str, body: dict[str, Any] | None) -> dict[str, Any]:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=PATIENCE) as response:
        answer: dict[str, Any] = json.loads(response.read())
        return answer


def is_ready(file: Path) -> bool:
    """Return whether every node of the file is up."""
    try:
        return ask(file, "/ready") == {"status": "ready"}
    except OSError:
        return False


def segments_of(pids: set[tuple[int, int]]) -> set[str]:
    """Return the segments created by these processes; clusters of other tests run at the same time."""
    return {path.name for pid, at in pids for path in Path("/dev/shm").glob(f"tandem.*.*.{pid}.{at}.*")}


def test_up_detached_status_down(cluster_file: Path) -> None:
    assert deploy("status", str(cluster_file)).returncode == 3
    up = deploy("up", str(cluster_file), "--detach")
    try:
        assert up.returncode == 0, up.stderr
        assert "answers at http://127.0.0.1:" in up.stderr
        status = deploy("status", str(cluster_file))
        assert status.returncode == 0, status.stdout
        assert "prefill-0" in status.stdout
        pids = pids_of(cluster_file)
        assert segments_of(pids)
        second = deploy("up", str(cluster_file))
        assert second.returncode == 1
        assert "already running" in second.stderr
    finally:
        down = deploy("down", str(cluster_file))
    assert down.returncode == 0
    assert left_behind(cluster_file) == {"processes": [], "files": []}
    assert not segments_of(pids)


def test_a_model_directory_is_served_by_one_command(tmp_path: Path, port: socket.socket) -> None:
    """A copy of the tiny model under its own name, with a draft, goes through up, a question, status and down."""
    model = tmp_path / "my-model"
    shutil.copytree(MODEL, model)
    runtime = Path(tempfile.mkdtemp(prefix="td"))
    here = {**ENV, "XDG_RUNTIME_DIR": str(runtime)}
    address = f"http://127.0.0.1:{port.getsockname()[1]}"
    arguments = [
        "--draft",
        str(MODEL.parent / "tiny-eagle3"),
        "--port",
        str(port.getsockname()[1]),
        "--detach",
    ]
    up = deploy("up", str(model), *arguments, environment=here)
    try:
        assert up.returncode == 0, up.stderr
        assert f"my-model answers at {address}/v1" in up.stderr
        body = {"model": "my-model", "prompt": "There are 8", "max_tokens": 4, "temperature": 0}
        answer = post(f"{address}/v1/completions", body)
        assert answer["model"] == "my-model"
        assert answer["usage"]["completion_tokens"] == 4
        assert deploy("status", str(model), environment=here).returncode == 0
        shown = deploy("config", str(model), environment=here).stdout
        assert "eagle3" in next(line for line in shown.splitlines() if "speculation.algorithm" in line)
    finally:
        down = deploy("down", str(model), environment=here)
        shutil.rmtree(runtime)
    assert (down.returncode, down.stderr.strip()) == (0, "stopped")


def test_ctrl_c_drains_and_a_killed_node_is_restarted(cluster_file: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "deploy.cli", "up", str(cluster_file)],
        cwd=ROOT,
        env=ENV,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    try:
        for line in process.stdout:
            if "Ctrl-C" in line:
                break
        table = json.loads((run_dir_of(cluster_file) / "cluster.json").read_text())
        pids = pids_of(cluster_file)
        os.kill(table["processes"]["decode-0"]["pid"], signal.SIGKILL)
        deadline = time.monotonic() + 300
        while True:
            try:
                body = json.dumps({"prompt": [5, 6], "max_tokens": 3, "ignore_eos": True}).encode()
                request = urllib.request.Request(
                    f"{table['url']}/v1/completions", body, {"Content-Type": "application/json"}
                )
                with urllib.request.urlopen(request, timeout=120) as response:
                    if (
                        json.loads((run_dir_of(cluster_file) / "cluster.json").read_text())["processes"]
                        != table["processes"]
                    ):
                        assert json.loads(response.read())["usage"]["completion_tokens"] == 3
                        break
            except OSError:
                pass
            assert time.monotonic() < deadline, "the killed node did not come back"
            time.sleep(0.1)
        pids |= pids_of(cluster_file)
        process.send_signal(signal.SIGINT)
        output = process.stdout.read()
        assert process.wait(300) == 0, output
        assert "stopped" in output
    finally:
        if process.poll() is None:
            process.kill()
        process.wait(60)
        process.stdout.close()
    assert left_behind(cluster_file) == {"processes": [], "files": []}
    assert not segments_of(pids)


def listens(port: socket.socket) -> bool:
    try:
        port.listen()
    except OSError:
        return False
    return True


def test_crash_loops_end_nothing(cluster_file: Path, port: socket.socket) -> None:
    """A node that cannot start again, and then a router whose port is taken, both come back by themselves."""
    file = cluster_file
    file.write_text(file.read_text() + "prefill: {nodes: [{name: prefill-0}, {name: prefill-1}]}\n")
    up = deploy("up", str(file), "--detach")
    try:
        assert up.returncode == 0, up.stderr
        in_the_way = run_dir_of(file) / "prefill-1.sock"
        os.kill(record_of(file, "prefill-1")["pid"], signal.SIGKILL)
        in_the_way.unlink()
        in_the_way.write_text("not a socket")
        answered = 0
        deadline = time.monotonic() + 4 * PATIENCE
        while record_of(file, "prefill-1")["restarts"] < 2:
            assert time.monotonic() < deadline, "it was not started again"
            body = {"prompt": [5, 6, answered], "max_tokens": 3, "ignore_eos": True}
            assert ask(file, "/v1/completions", body)["usage"]["completion_tokens"] == 3
            answered += 1
            time.sleep(0.05)  # leaves the processors to the node that starts
        assert answered > 3
        assert ask(file, "/ready")["missing"] == [{"name": "prefill-1", "role": "prefill"}]
        status = deploy("status", str(file))
        assert status.returncode == 4, status.stdout
        assert ": degraded" in status.stdout
        assert "prefill-1 ended with exit code 2" in status.stdout
        assert "not a socket" in status.stdout
        in_the_way.unlink()
        until(lambda: is_ready(file), 300)

        os.kill(record_of(file, "router")["pid"], signal.SIGKILL)
        until(lambda: listens(port))  # the kernel must first release the dead router's socket
        until(lambda: "router.port" in record_of(file, "router")["last_end"], 300)
        nodes = {name: record_of(file, name)["pid"] for name in ("prefill-0", "prefill-1", "decode-0")}
        port.close()
        until(lambda: is_ready(file), 300)
        assert {name: record_of(file, name)["pid"] for name in nodes} == nodes
        until(lambda: deploy("status", str(file)).returncode == 0)
    finally:
        down = deploy("down", str(file))
    assert down.returncode == 0
    assert left_behind(file) == {"processes": [], "files": []}


def test_a_failed_start_is_explained_and_leaves_nothing(cluster_file: Path, tmp_path: Path) -> None:
    missing = deploy("up", str(cluster_file), "--set", f"model.path={tmp_path}/nothing")
    assert missing.returncode == 2
    assert f"model.path: {tmp_path}/nothing does not exist: correct the path" in missing.stderr
    assert left_behind(cluster_file) == {"processes": [], "files": []}
    (tmp_path / "empty").mkdir()
    empty = deploy("up", str(cluster_file), "--set", f"model.path={tmp_path}/empty")
    assert empty.returncode == 1
    assert f"{tmp_path}/empty is empty; give a directory with config.json" in empty.stderr
    assert left_behind(cluster_file) == {"processes": [], "files": []}
    gpu = cluster_file.read_text() + "decode: {nodes: [{name: decode-0, device: cuda}]}\n"
    cluster_file.write_text(gpu)
    refused = deploy("up", str(cluster_file))
    assert refused.returncode == 1
    assert "cuda" in refused.stderr
    cluster_file.write_text("model: {path: x}\nrouter: {prot: 1}\n")
    typo = deploy("up", str(cluster_file))
    assert typo.returncode == 2
    assert "router.prot: unknown key; did you mean 'router.port'?" in typo.stderr
