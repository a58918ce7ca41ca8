"""deploy/slurm on one machine with a real Slurm: a cluster answers, restarts a killed node, drains, is queued again.

    apt-get install slurm-wlm munge; TANDEM_SLURM=1 python -m pytest -s tests/slurm

It is not part of the usual tests: it needs root and two Debian packages.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from common.config import load_cluster
from common.config.admin_listener import admin_listeners
from tests.fakes.free_ports import free_ports
from tests.slurm.one_machine import OneMachineSlurm, wait_for

pytestmark = pytest.mark.skipif(os.environ.get("TANDEM_SLURM") != "1", reason="set TANDEM_SLURM=1")

ROOT = Path(__file__).resolve().parents[2]
QUESTION = "There are 8 stickers in every bag and Felix owns 8 bags. How many stickers are there?"


@pytest.fixture
def slurm() -> Iterator[OneMachineSlurm]:
    """Munged refuses a folder whose parents others may write to, unless they are sticky as /tmp is."""
    folder = Path(tempfile.mkdtemp(prefix="tandem-slurm-", dir="/tmp"))
    with OneMachineSlurm(folder) as running:
        yield running
    shutil.rmtree(folder)


class ClusterJob:
    """A cluster of the tiny model as a job."""

    def __init__(self, slurm: OneMachineSlurm, prefill: int, decode: int, movable: int = 0) -> None:
        self.slurm = slurm
        self.port, links = free_ports(2)
        base = slurm.folder / "base.yaml"
        model = {"path": str(ROOT / "deploy/tiny_models/tiny-target")}
        base.write_text(yaml.safe_dump({"model": model, "router": {"port": self.port}}))
        nodes = ["--prefill", str(prefill), "--decode", str(decode), "--movable", str(movable)]
        said = slurm.run(
            "sbatch",
            "--nodes=3",
            "--ntasks-per-node=2",
            f"--output={slurm.folder}/job.log",
            f"--chdir={ROOT}",
            "deploy/slurm/cluster.sbatch",
            str(base),
            *nodes,
            "--port",
            str(links),
            cwd=ROOT,
        )
        self.number = said.split()[-1]
        self.folder = ROOT / f"tandem-{self.number}"

    @property
    def log(self) -> str:
        return (self.slurm.folder / "job.log").read_text()

    def get(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """Return the JSON of an answer; None if there is none or its status is an error."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}", data, {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=60) as response:
                return json.load(response)
        except (urllib.error.URLError, OSError):
            return None

    def wait_ready(self) -> None:
        wait_for(lambda: self.get("/ready") == {"status": "ready"})

    def answer(self) -> str:
        body = {"messages": [{"role": "user", "content": QUESTION}], "temperature": 0}
        return str(self.get("/v1/chat/completions", body)["choices"][0]["message"]["content"])

    def change_role(self, name: str, role: str) -> dict[str, str]:
        """Move a node on the admin listener of the router, which runs on this machine."""
        (file,) = self.slurm.folder.glob("base.slurm-*.yaml")
        socket = admin_listeners(load_cluster(file), to_write=False).socket
        url, body = f"http://localhost/workers/{name}/role", json.dumps({"role": role})
        words = ["curl", "-s", "--unix-socket", str(socket), "--json", body, url]
        done = subprocess.run(words, capture_output=True, check=True, timeout=60)
        answer = json.loads(done.stdout)
        return {key: answer.get(key) for key in ("name", "role")}

    def pid(self, name: str) -> int | None:
        """Return the process of a node, if it runs: the command of a step, not the srun that started it."""
        for folder in Path("/proc").glob("[0-9]*"):
            words = _words(folder / "cmdline")
            if str(self.slurm.folder) in " ".join(words) and words[-1] == name and "srun" not in words[0]:
                return int(folder.name)
        return None


def _words(file: Path) -> list[str]:
    try:
        return file.read_text().strip("\0").split("\0")
    except OSError:
        return [""]


@pytest.mark.parametrize(("prefill", "decode", "movable"), [(1, 1, 1), (2, 2, 0)])
def test_a_cluster_answers_restarts_and_drains(
    slurm: OneMachineSlurm, prefill: int, decode: int, movable: int
) -> None:
    job = ClusterJob(slurm, prefill, decode, movable)
    try:
        job.wait_ready()
        answer = job.answer()
        assert answer.endswith("#### 64")
        killed = job.pid("decode-0")
        assert killed is not None
        os.kill(killed, signal.SIGKILL)
        wait_for(lambda: "decode-0 on" in job.log and "ended with 137; it starts again in 1 s" in job.log)
        wait_for(lambda: job.pid("decode-0") not in (None, killed))
        job.wait_ready()
        assert job.answer() == answer
        for node in range(movable):
            assert job.change_role(f"flex-{node}", "prefill") == {"name": f"flex-{node}", "role": "prefill"}
        slurm.run("scancel", "--signal=TERM", job.number)
        wait_for(lambda: slurm.job(job.number, "JobState") == "COMPLETED")
        assert slurm.job(job.number, "ExitCode") == "0:0"
        counts = {"prefill": prefill, "decode": decode, "flex": movable}
        names = ["router", *(f"{kind}-{n}" for kind, count in counts.items() for n in range(count))]
        assert sorted(
            line.split()[1] for line in job.log.splitlines() if line.endswith("has drained")
        ) == sorted(names)
        assert not list(slurm.folder.glob("base.slurm-*"))
    finally:
        print(job.log)
        shutil.rmtree(job.folder, ignore_errors=True)


def test_a_job_near_its_time_limit_drains_and_is_queued_again(slurm: OneMachineSlurm) -> None:
    """Slurm signals the batch shell only, as `scancel --batch` does."""
    job = ClusterJob(slurm, 1, 1)
    try:
        job.wait_ready()
        slurm.run("scancel", "--batch", "--signal=TERM", job.number)
        wait_for(lambda: slurm.job(job.number, "Restarts") == "1")
        assert job.log.count("has drained") == 3
        assert "ended with" not in job.log
    finally:
        print(job.log)
        shutil.rmtree(job.folder, ignore_errors=True)


def test_a_job_that_is_stopped_before_a_process_runs_is_queued_again(slurm: OneMachineSlurm) -> None:
    job = ClusterJob(slurm, 1, 1)
    try:
        # The next step is the cluster file, which takes a second.
        wait_for(job.folder.exists)
        time.sleep(0.1)
        slurm.run("scancel", "--batch", "--signal=TERM", job.number)
        wait_for(lambda: slurm.job(job.number, "Restarts") == "1")
        assert "ended with" not in job.log
    finally:
        print(job.log)
        shutil.rmtree(job.folder, ignore_errors=True)
