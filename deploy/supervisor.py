"""Runs one cluster on this machine: starts its processes, watches and restarts them, and drains them in order."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from http.client import HTTPException
from pathlib import Path
from types import FrameType

import msgspec

from common.cleaned_directories import exempt_from_cleaning
from common.config import Cluster, Resolved
from common.config.admin_listener import admin_listeners
from common.config.gpu_sharing import SERVER
from common.config.router_processes import names_of, names_router, router_hosts
from common.config.run_directory import run_directory, unwritable
from common.errors import ConfigError, TandemError
from common.node_names import is_pattern
from common.process_entry import entry
from deploy.admin_client import ask
from deploy.children import Child, describe_exit
from deploy.cluster_options import down_line, set_options
from deploy.disk import disk_problem
from deploy.leftovers import end_leftovers, find_leftovers
from deploy.model_directories import check_model_directories
from deploy.other_cluster import other_cluster
from deploy.own_model import lock_path
from deploy.ports import check_ports
from deploy.process_table import ProcessRecord, State, Table, read_table, table_path, write_table
from deploy.watcher import Report, StartBounds, Watcher
from kv_transfer.transport.one_host.segment import sweep_orphans

PROBE_TIMEOUT = 60.0
OWN_FILES = ("*.sock", "*.sock.lock", "*.use")  # of processes, in the run directory
WATCH_INTERVAL = 0.1  # seconds between two checks of the processes
DISK_INTERVAL = 1.0  # seconds between two checks of the disk, and between attempts to write the table


def local_url(host: str, port: int, scheme: str) -> str:
    """Return the URL at which this host reaches a server that binds to `host`."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


class StartError(TandemError):
    """The cluster did not start; the text says which process failed and why."""


class AlreadyRunning(TandemError):
    """Another supervisor runs this cluster."""


def already_running(table: Table | None, cluster: Path, overrides: Sequence[str]) -> AlreadyRunning:
    if other := other_cluster(table, cluster, overrides):
        return AlreadyRunning(f"{other}; set another process.run_dir, or stop that cluster")
    down = down_line(cluster, overrides)
    if table is not None and table.state == "stopping":
        return AlreadyRunning(
            f"this cluster is being stopped (pid {table.supervisor.pid}); {down} returns once it has ended"
        )
    where = f" at {table.url} (pid {table.supervisor.pid})" if table else ""
    return AlreadyRunning(f"this cluster is already running{where}; stop it with {down}")


def _refuse_unstartable(cluster: Cluster) -> None:
    """Raise ConfigError if deploy/up cannot start this cluster by itself."""
    for role, entries in (("prefill", cluster.prefill.nodes), ("decode", cluster.decode.nodes)):
        if all(is_pattern(entry.name) for entry in entries):
            raise ConfigError(
                f"{role}.nodes",
                f"deploy/up starts the nodes that the file lists, and {entries[0].name} lists none; list one, or "
                f"start every process with its deploy/launch_* script",
            )
    if cluster.router.port == 0:
        raise ConfigError("router.port", "deploy/up needs a fixed port: set one")
    if len(router_hosts(cluster.router)) > 1:
        raise ConfigError(
            "router.control_address",
            "deploy/up runs a cluster of one host; start routers on several hosts with deploy/launch_router",
        )


def _processes(cluster: Cluster) -> Iterator[tuple[str, list[str]]]:
    """Yield the name of each process, and its module with the arguments that are its own; nodes last."""
    if cluster.process.gpu_sharing != "turns":
        yield SERVER, ["deploy.mps_server"]
    for index, name in enumerate(names_of(cluster)):
        yield name, ["router", "--process", str(index)]
    for role, nodes in (("prefill", cluster.prefill.nodes), ("decode", cluster.decode.nodes)):
        for node in nodes:
            if not is_pattern(node.name) and cluster.starts_as(node.name, role):
                movable = cluster.movable.role_of(node.name) is not None
                module = "deploy.movable_node" if movable else f"{role}_node"
                yield node.name, [module, "--name", node.name]


class Supervisor:
    """Supervises one cluster: call `start`, then `watch`, which returns when a stop is requested, then `stop`."""

    def __init__(self, resolved: Resolved, overrides: list[str]) -> None:
        self._resolved = resolved
        self._overrides = overrides
        self.run_dir = run_directory(resolved, to_write=True)
        cluster = resolved.cluster
        _refuse_unstartable(cluster)
        scheme = "http" if resolved.tls_paths is None else "https"
        self.url = local_url(cluster.router.host, cluster.router.port, scheme)
        self._admin_socket = admin_listeners(resolved).socket
        self._drain = cluster.health.drain_timeout
        logs = self.run_dir / "logs"
        try:
            logs.mkdir(exist_ok=True)
            self._lock = self._take_lock()
        except OSError as error:
            raise unwritable(self.run_dir, error.strerror or str(error)) from error
        common = ["--cluster", str(resolved.file), *set_options(overrides)]
        children = [
            Child(name, [*command, *common], logs / f"{name}.log") for name, command in _processes(cluster)
        ]
        self._kept = contextlib.ExitStack()
        self._stop_requested = False
        self._problems: list[str] = []
        self._table_problem = ""
        self._leftovers: dict[str, ProcessRecord] = {}  # of a killed supervisor, until they have ended
        self.supervise(children)

    def supervise(self, children: list[Child]) -> None:
        """Set the processes of the cluster, the routers first, before any is started."""
        self.children = children
        self._watcher = Watcher(children, self._resolved.cluster.health.start_hang_timeout)

    def request_stop(self, number: int = 0, frame: FrameType | None = None) -> None:
        """Ask `watch` to return. Usable as a signal handler."""
        self._stop_requested = True

    def start(self, show: Callable[[list[Child]], None], report: Report) -> None:
        """Start everything and return once a probe request has succeeded. `show` is called while it waits.

        Raises StartError, or ConfigError if the run directory is not writable, a port is in use or there is no model.
        In these cases no process that it started is left running.
        """
        try:
            self._kept.enter_context(exempt_from_cleaning(*self._own_directories()))
            # The waits that follow may take long, and `deploy/down` finds this process by the table.
            self._leftovers = find_leftovers(self.run_dir)
            check_model_directories(self._resolved)
            self._write_first()
            end_leftovers(self._leftovers, self._drain + 5, report, lambda: self._stop_requested)
            self._leftovers = {}
            sweep_orphans()
            check_ports(self._resolved, lambda: self._stop_requested)
            for child in self.children:
                child.remove_logs()
                child.start()
            self._write("starting")
            self._wait_loaded(show)
            self._probe(show)
            self._write("ready")
        except OSError as error:
            self.stop()
            raise StartError(f"cannot start a process: {error}") from error
        except BaseException:
            self.stop()
            raise

    def watch(self, report: Report, meanwhile: Callable[[], None] = lambda: None) -> None:
        """Restart processes that end and report every problem, until a stop is requested.

        `meanwhile` is called between two checks, and must not wait.
        """
        next_look = 0.0
        while not self._stop_requested:
            changed = self._watcher.check(report)
            if time.monotonic() >= next_look:
                next_look = time.monotonic() + DISK_INTERVAL
                changed = self._look_for_problems(report) or changed or self._table_is_old()
            if changed:
                self._write("ready")
            meanwhile()
            time.sleep(WATCH_INTERVAL)

    def stop(self) -> None:
        """Drain the routers first, because they hold the clients, then the nodes, then end the server that they share
        GPUs in. Remove sockets, table and lock.
        """
        started = [child for child in self.children if child.launched]
        if started:
            self._write("stopping")
        for group in (
            [c for c in started if names_router(c.name)],
            [c for c in started if not names_router(c.name) and c.name != SERVER],
            [c for c in started if c.name == SERVER],
        ):
            for child in group:
                child.signal(signal.SIGTERM)
            deadline = time.monotonic() + self._drain + 5
            for child in group:
                child.stop(max(deadline - time.monotonic(), 0.1))
        with contextlib.suppress(OSError):
            sweep_orphans()
        own = [file for pattern in OWN_FILES for file in self.run_dir.glob(pattern)]
        # By the table the next supervisor finds leftovers that this one has not ended.
        if not self._leftovers:
            own.append(table_path(self.run_dir))
        for file in (*own, self._lock_path):
            with contextlib.suppress(OSError):  # on a disk that has become read-only, the file stays
                file.unlink()
        self._kept.close()
        os.close(self._lock)

    def _own_directories(self) -> list[Path]:
        """Return the directories in which only tandem has files. deploy/api_key locks those of the user."""
        file = self._resolved.file
        return [self.run_dir, *([file.parent] if lock_path(file).exists() else [])]

    # -- start-up ------------------------------------------------------------------------------------------------

    def _wait_loaded(self, show: Callable[[list[Child]], None]) -> None:
        bounds = StartBounds(self._resolved.cluster.health.start_hang_timeout)
        # All are read in each turn: one whose reports wait unread would seem to be silent.
        while starting := [each for each in self.children if each.read_progress().phase != "ready"]:
            show(self.children)
            self._check_children()
            for child in starting:
                if problem := bounds.problem(child):
                    raise StartError(f"{child.name} {problem}; see {child.log_path}")
            time.sleep(0.05)
        show(self.children)

    def _probe(self, show: Callable[[list[Child]], None]) -> None:
        """Send a real request through router, prefill node, transfer and decode node."""
        # Each attempt yields a token before the hand-over, so fewer tokens would come from retries even if none works.
        tokens = self._resolved.cluster.router.max_attempts + 1
        body = msgspec.json.encode(
            {"prompt": [1, 1, 1], "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        )
        headers = {"Content-Type": "application/json", "X-Request-Id": "deploy-probe"}
        deadline = time.monotonic() + PROBE_TIMEOUT
        while True:
            self._check_children()
            try:
                status, raw = ask(
                    self._admin_socket, "POST", "/v1/completions", body, headers, timeout=PROBE_TIMEOUT
                )
                problem = f"the probe request got status {status}: {raw[:300].decode(errors='replace')}"
                if status == 200:
                    answer = msgspec.json.decode(raw)
                    if answer["usage"]["completion_tokens"] == tokens:
                        return
                    problem = f"the probe request got usage {answer['usage']}"
            except (OSError, HTTPException) as error:
                problem = f"the router at {self.url} does not answer on {self._admin_socket}: {error}"
            if time.monotonic() > deadline:
                raise StartError(problem)
            show(self.children)
            time.sleep(0.1)

    def _check_children(self) -> None:
        if self._stop_requested:
            raise StartError("stopped while starting")
        for child in self.children:
            if child.exit_code is not None:
                raise StartError(
                    f"{child.name} ended with {describe_exit(child.exit_code)}: {child.start_failure()}"
                )

    # -- state ---------------------------------------------------------------------------------------------------

    def _take_lock(self) -> int:
        self._lock_path = self.run_dir / "lock"
        while True:
            descriptor = os.open(self._lock_path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                os.close(descriptor)
                if not isinstance(error, BlockingIOError):
                    raise
                raise self._already_running(read_table(self.run_dir)) from None
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(descriptor), self._lock_path.stat()):
                    break
            # The last owner has just removed this file, so its lock excludes nobody.
            os.close(descriptor)
        table = read_table(self.run_dir)
        if table is not None:  # the lock file was removed while its supervisor runs
            os.close(descriptor)
            raise self._already_running(table)
        return descriptor

    def _already_running(self, table: Table | None) -> AlreadyRunning:
        return already_running(table, self._resolved.file, self._overrides)

    def _write_first(self) -> None:
        """Write the first table. If that fails the start fails, because `deploy/down` could not find the cluster."""
        self._write("starting")
        if self._table_problem:
            raise unwritable(self.run_dir, self._table_problem)

    def _write(self, state: State) -> None:
        """Write the table. A failure is reported as a problem but never ends the cluster."""
        table = Table(
            supervisor=entry(os.getpid()),
            cluster=str(self._resolved.file),
            url=self.url,
            state=state,
            processes={**self._leftovers, **self._watcher.records()},
            drain_timeout=self._drain,
            admin_socket=str(self._admin_socket),
            problems=self._problems,
        )
        try:
            write_table(self.run_dir, table)
            self._table_problem = ""
        except OSError as error:
            self._table_problem = f"cluster.json cannot be written: {error.strerror or error}"

    def _table_is_old(self) -> bool:
        """Return whether the table could not be written, or was removed by someone."""
        return bool(self._table_problem) or not table_path(self.run_dir).exists()

    def _look_for_problems(self, report: Report) -> bool:
        """Report problems that appeared or disappeared; return True if any did."""
        found = [disk_problem(self.run_dir) or "", *(child.log_problem for child in self.children)]
        if self._table_problem:
            found.append(f"{self.run_dir}: {self._table_problem}; deploy/status shows an outdated state")
        problems = [problem for problem in found if problem]
        for problem in problems:
            if problem not in self._problems:
                report(problem)
        for problem in self._problems:
            if problem not in problems:
                report(f"resolved: {problem}")
        changed = problems != self._problems
        self._problems = problems
        return changed
