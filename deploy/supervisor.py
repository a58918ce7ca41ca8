"""Runs one cluster on this machine: starts its processes, watches them, restarts what dies, drains in order."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import msgspec

from common.config import Resolved
from common.config.run_directory import run_directory
from common.errors import ConfigError, TandemError
from deploy.children import Child
from deploy.process_table import State, Table, entry, read_table, table_path, write_table
from kv_transfer.transport.shm_segment import sweep_orphans

START_TIMEOUT = 900.0  # seconds until every process has loaded its weights
PROBE_TIMEOUT = 60.0
RESTARTS = 5  # of one process within RESTART_WINDOW seconds; then the cluster is given up
RESTART_WINDOW = 120.0
EXIT_REFUSED = 2  # common.process: starting again would not help
LOCAL = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # http_proxy is not for this host


def local_url(host: str, port: int) -> str:
    """How this host reaches a server that binds to `host`."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class StartError(TandemError):
    """The cluster did not come up; the text says which process and why."""


class AlreadyRunning(TandemError):
    """Another supervisor runs this cluster."""


class Supervisor:
    """One instance per `deploy/up`; `start`, then `watch` until `stop` is asked for."""

    def __init__(self, resolved: Resolved, overrides: list[str]) -> None:
        self._resolved = resolved
        self._run_dir = run_directory(resolved)
        cluster = resolved.cluster
        if cluster.router.port == 0:
            raise ConfigError("router.port", "deploy/up has to know the port: choose one")
        self.url = local_url(cluster.router.host, cluster.router.port)
        self._drain = cluster.health.drain_timeout
        logs = self._run_dir / "logs"
        logs.mkdir(exist_ok=True)
        common = ["--cluster", str(resolved.file), *(part for item in overrides for part in ("--set", item))]
        self.children = [Child("router", ["router", *common], logs / "router.log")]
        for role, nodes in (("prefill", cluster.prefill.nodes), ("decode", cluster.decode.nodes)):
            for node in nodes:
                command = [f"{role}_node", "--name", node.name, *common]
                self.children.append(Child(node.name, command, logs / f"{node.name}.log"))
        self._stop_requested = False
        self._restarted: list[tuple[float, str]] = []
        self._lock = self._take_lock()

    @property
    def run_dir(self) -> Path:
        return self._run_dir

    def request_stop(self, number: int = 0, frame: FrameType | None = None) -> None:
        """As a signal handler, or called."""
        self._stop_requested = True

    @property
    def stop_requested(self) -> bool:
        return self._stop_requested

    def start(self, show: Callable[[list[Child]], None]) -> None:
        """Start everything and return once a probe request has gone through. `show` is called while it waits.

        Raises StartError; then nothing is left running.
        """
        sweep_orphans()
        try:
            for child in self.children:
                child.log_path.unlink(missing_ok=True)
                child.start()
            self._write("starting")
            self._wait_loaded(show)
            self._probe(show)
            self._write("ready")
        except BaseException:
            self.stop()
            raise

    def watch(self, report: Callable[[str], None]) -> None:
        """Until a stop is requested: restart processes that die. Raises StartError when one dies too often."""
        while not self._stop_requested:
            time.sleep(0.2)
            for child in self.children:
                child.read_progress()
                code = child.exit_code
                if code is None or self._stop_requested:
                    continue
                report(f"{child.name} ended with {_describe(code)}; see {child.log_path}")
                now = time.monotonic()
                self._restarted = [(at, n) for at, n in self._restarted if now - at < RESTART_WINDOW]
                if code == EXIT_REFUSED or sum(n == child.name for _, n in self._restarted) >= RESTARTS:
                    raise StartError(f"{child.name} cannot be kept running:\n{child.log_tail()}")
                time.sleep(min(0.2 * 2 ** sum(n == child.name for _, n in self._restarted), 5.0))
                self._restarted.append((now, child.name))
                child.restarts += 1
                child.start()
                self._write("ready")
                report(f"{child.name} was started again")

    def stop(self) -> None:
        """Drain: the router first, since it holds the clients, then the nodes. Leaves nothing behind."""
        started = [child for child in self.children if child.launched]
        if not started:
            return
        self._write("stopping")
        started[0].stop(self._drain + 5)
        for child in started[1:]:
            child.signal(signal.SIGTERM)
        deadline = time.monotonic() + self._drain + 5
        for child in started[1:]:
            child.stop(max(deadline - time.monotonic(), 0.1))
        sweep_orphans()
        for socket in self._run_dir.glob("*.sock"):
            socket.unlink(missing_ok=True)
        table_path(self._run_dir).unlink(missing_ok=True)
        self._lock_path.unlink(missing_ok=True)
        os.close(self._lock)

    # -- start-up ------------------------------------------------------------------------------------------------

    def _wait_loaded(self, show: Callable[[list[Child]], None]) -> None:
        deadline = time.monotonic() + START_TIMEOUT
        while any(child.read_progress().phase != "ready" for child in self.children):
            show(self.children)
            self._check_children()
            if time.monotonic() > deadline:
                late = ", ".join(c.name for c in self.children if c.progress.phase != "ready")
                raise StartError(f"not ready after {START_TIMEOUT:.0f} s: {late}")
            time.sleep(0.05)
        show(self.children)

    def _probe(self, show: Callable[[list[Child]], None]) -> None:
        """One real request through router, prefill node, transfer and decode node."""
        body = msgspec.json.encode(
            {"prompt": [1, 1, 1], "max_tokens": 2, "temperature": 0, "ignore_eos": True}
        )
        request = urllib.request.Request(
            f"{self.url}/v1/completions",
            body,
            {"Content-Type": "application/json", "X-Request-Id": "deploy-probe"},
        )
        deadline = time.monotonic() + PROBE_TIMEOUT
        while True:
            self._check_children()
            try:
                with LOCAL.open(request, timeout=PROBE_TIMEOUT) as response:
                    answer = msgspec.json.decode(response.read())
                    if answer["usage"]["completion_tokens"] == 2:
                        return
                    problem = f"the probe was answered with {answer['usage']}"
            except urllib.error.HTTPError as error:
                problem = (
                    f"the probe was answered {error.code}: {error.read()[:300].decode(errors='replace')}"
                )
            except OSError as error:
                problem = f"{self.url} does not answer: {error}"
            if time.monotonic() > deadline:
                raise StartError(problem)
            show(self.children)
            time.sleep(0.1)

    def _check_children(self) -> None:
        if self._stop_requested:
            raise StartError("stopped while starting")
        for child in self.children:
            if child.exit_code is not None:
                child.read_progress()
                reason = child.progress.message or child.log_tail()
                raise StartError(f"{child.name} ended with {_describe(child.exit_code)}: {reason}")

    # -- state ---------------------------------------------------------------------------------------------------

    def _take_lock(self) -> int:
        self._lock_path = self._run_dir / "lock"
        while True:
            descriptor = os.open(self._lock_path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                os.close(descriptor)
                table = read_table(self._run_dir)
                where = f" at {table.url} (pid {table.supervisor.pid})" if table else ""
                raise AlreadyRunning(f"this cluster runs already{where}; stop it with deploy/down") from None
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(descriptor), self._lock_path.stat()):
                    return descriptor
            os.close(descriptor)  # the lock of a file that its last owner has just removed holds nobody off

    def _write(self, state: State) -> None:
        write_table(
            self._run_dir,
            Table(
                supervisor=entry(os.getpid()),
                cluster=str(self._resolved.file),
                url=self.url,
                state=state,
                processes={child.name: entry(child.pid) for child in self.children if child.launched},
            ),
        )


def _describe(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
