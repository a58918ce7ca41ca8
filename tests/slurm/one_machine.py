"""Slurm on this machine: munged, slurmctld and a slurmd for each of three hosts, without systemd and cgroups.

It needs Debian's packages slurm-wlm and munge, and root.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from tests.fakes.free_ports import free_ports
from tests.fakes.waiting import PATIENCE

HOSTS = ("n1", "n2", "n3")
DAEMONS = ("munged", "slurmctld", "slurmd")
CONFIG = """ClusterName=tandem-test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
KillWait=10
{nodes}
PartitionName=all Nodes={names} Default=YES State=UP MaxTime=INFINITE
"""
NODE = "NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs={cpus} RealMemory=1000"


class OneMachineSlurm:
    """The daemons of a Slurm cluster; use it as a context. `folder` must belong to root, and all its parents too."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config = folder / "slurm.conf"

    def __enter__(self) -> OneMachineSlurm:
        for name in ("state", "spool"):
            (self.folder / name).mkdir()
        host, ports = socket.gethostname().partition(".")[0], free_ports(1 + len(HOSTS))
        nodes = [
            NODE.format(name=name, host=host, port=port, cpus=os.cpu_count())
            for name, port in zip(HOSTS, ports[1:], strict=True)
        ]
        text = CONFIG.format(
            host=host, ports=ports, folder=self.folder, nodes="\n".join(nodes), names=",".join(HOSTS)
        )
        self.config.write_text(text)
        key = self.folder / "munge.key"
        key.write_bytes(secrets.token_bytes(1024))
        key.chmod(0o400)
        places = {
            "key-file": key,
            "socket": self.folder / "munge.socket",
            "pid-file": self.folder / "munged.pid",
        }
        places |= {"log-file": self.folder / "munged.log", "seed-file": self.folder / "munged.seed"}
        self.run("munged", "--force", *(f"--{option}={place}" for option, place in places.items()))
        self.run("slurmctld")
        for name in HOSTS:
            self.run("slurmd", "-N", name)
        wait_for(lambda: self.run("sinfo", "-h", "-o", "%D %t").strip() == f"{len(HOSTS)} idle")
        return self

    def __exit__(self, *error: object) -> None:
        self.run("scancel", "--user=root")
        wait_for(lambda: not self.run("squeue", "--noheader"))
        # A daemon may still be needed by the ones that are stopped before it.
        for pattern in ("slurmd-*.pid", "slurmctld.pid", "munged.pid"):
            for file in self.folder.glob(pattern):
                os.kill(int(file.read_text()), signal.SIGTERM)
            wait_for(lambda found=pattern: not list(self.folder.glob(found)))  # type: ignore[misc]

    def run(self, *command: str, cwd: Path | None = None) -> str:
        """Run one of Slurm's commands and return what it prints."""
        program = shutil.which(command[0], path=f"{os.environ['PATH']}:/usr/sbin")
        assert program is not None, f"{command[0]} is not installed"
        done = subprocess.run(
            [program, *command[1:]],
            env={**os.environ, "SLURM_CONF": str(self.config)},
            cwd=cwd,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
        )
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout

    def job(self, number: str, field: str) -> str:
        """Return a field of `scontrol show job`."""
        shown = self.run("scontrol", "show", "job", number, "--oneliner")
        return dict(part.partition("=")[::2] for part in shown.split())[field]


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.1)
