"""Runs the MPS server of a cluster until SIGTERM: `python -m deploy.mps_server --cluster FILE`.

The server belongs to the user who runs the cluster, has its sockets in the run directory, and serves this cluster only.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from common import mps
from common.config import Resolved
from common.config.devices import SHARING
from common.config.gpu_sharing import ASK_INTERVAL, SERVER, server_answers, server_directory
from common.config.run_directory import KEY, run_directory
from common.errors import ConfigError
from common.observability.logs import Log
from common.observability.startup import StartupReporter
from common.parent_death import at_parent_death
from common.process import (
    EXIT_DEFECT,
    ClusterOption,
    SetOption,
    StatusOption,
    on_termination,
    run_command,
    run_process,
)

PROGRAM = "nvidia-cuda-mps-control"
START_SECONDS = 30.0
SOCKETS = ("control", "control_privileged")
MAX_SOCKET_PATH = 107  # bytes, of a Unix socket's path


def _directory(resolved: Resolved) -> Path:
    """Create and return the directory of the server's sockets, without those of an earlier server."""
    run_directory(resolved, to_write=True)
    directory = server_directory(resolved)
    if max(len(os.fsencode(directory / name)) for name in SOCKETS) > MAX_SOCKET_PATH:
        raise ConfigError(
            KEY, f"{directory} is too long for the sockets of an MPS server; set a shorter path"
        )
    directory.mkdir(mode=0o700, exist_ok=True)
    for name in SOCKETS:
        (directory / name).unlink(missing_ok=True)
    return directory


def _environment(directory: Path) -> dict[str, str]:
    """Return the environment of the server. It sees all GPUs; which of them a process uses is up to that process."""
    own = {mps.DIRECTORY: str(directory), mps.LOG_DIRECTORY: str(directory)}
    return {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"} | own


def serve(resolved: Resolved, reporter: StartupReporter, log: Log) -> None:
    """Run the server; what it says goes to the log. Raises ConfigError if it cannot be started."""
    directory = _directory(resolved)
    environment = _environment(directory)
    try:
        server = subprocess.Popen(
            [PROGRAM, "-f"],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            preexec_fn=at_parent_death(signal.SIGTERM),
        )
    except OSError as error:
        raise ConfigError(
            SHARING,
            f"{PROGRAM} cannot be started ({error.strerror}): it comes with NVIDIA's driver, and in a container "
            "with the driver capability `utility`; install it, or write turns",
        ) from error
    assert server.stdout is not None
    stopping = list[bool]()

    def stop() -> None:
        """Ask the server to end once its last client has ended."""
        stopping.append(True)
        with contextlib.suppress(OSError):
            asking = subprocess.Popen([PROGRAM], env=environment, stdin=subprocess.PIPE)
            assert asking.stdin is not None
            asking.stdin.write(b"quit\n")
            asking.stdin.close()

    on_termination(stop)
    deadline = time.monotonic() + START_SECONDS
    while not server_answers(directory) and server.poll() is None and not stopping:
        if time.monotonic() > deadline:
            server.kill()
            server.wait()
            raise ConfigError(
                SHARING, f"{PROGRAM} does not answer in {directory} after {START_SECONDS:.0f} s"
            )
        time.sleep(ASK_INTERVAL)
    reporter.report("ready")
    for line in server.stdout:
        log.info("the MPS server says", line=line.decode(errors="replace").strip())
    code = server.wait()
    if not stopping:
        log.error("the MPS server has ended", code=code)
        sys.exit(EXIT_DEFECT)


def main(cluster: ClusterOption, set_: SetOption = None, status_fd: StatusOption = None) -> None:
    """Run the MPS server of a cluster until SIGTERM."""
    run_process(SERVER, cluster, set_, status_fd, serve)


if __name__ == "__main__":
    run_command(main, "up")
