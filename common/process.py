"""Runs a process of the cluster: its command line, logs, start-up report, signals and exit codes.

Exit codes: 0 drained, 1 a defect (the log has a traceback, or the stacks of a process that did not end), 2 the
configuration or the model cannot be served, or no router accepts the node, 3 the main loop or the start of a node hung
(the log has the stacks), 4 a rank of a node has failed (the log has the reason), 5 a thread of a node has failed (the
log has its stack).
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import resource
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Protocol

import typer

from common.config import Resolved, load_cluster
from common.config.run_directory import run_directory
from common.descriptors import prepare_descriptors
from common.errors import ConfigError, ModelError, NodeRefused, RankFailed
from common.huge_pages import use_huge_pages
from common.launch_record import launch_record
from common.observability import logs
from common.observability.failed_threads import end_with_failed_threads
from common.observability.logs import Log
from common.observability.loop_watchdog import loop_watchdog
from common.observability.startup import StartupReporter
from common.observability.stderr_file import never_wait_for_readers, write_stderr
from common.ready_file import ReadyFile, ready_file

EXIT_DEFECT = 1
EXIT_REFUSED = 2
EXIT_RANK_FAILED = 4
# For a process to close what it holds, and again for the interpreter to end. Freeing pinned memory takes a while.
END_SECONDS = 120.0

ClusterOption = Annotated[Path, typer.Option("--cluster", help="Cluster file")]
NameOption = Annotated[str, typer.Option("--name", help="Name of this process among the file's nodes")]
SetOption = Annotated[
    list[str] | None, typer.Option("--set", help="KEY=VALUE; overrides file and environment")
]
StatusOption = Annotated[
    int | None, typer.Option("--status-fd", help="Descriptor for start-up progress", hidden=True)
]


class BuiltNode(Protocol):
    """The result of a node's `build`: everything is bound and loaded, nothing runs yet."""

    def start(self) -> None:
        """Begin to register and to send heartbeats."""

    def run(self) -> None:
        """Run the main loop; returns when the node has drained. Raises NodeRefused if no router takes the node."""

    def overdue(self) -> float:
        """Return the seconds by which the main loop exceeds its announced work; not positive while it has time left."""

    def drain(self) -> None:
        """Take no new requests and let `run` return. Called from a signal handler."""

    def close(self) -> None:
        """Close sockets and shared memory."""


Build = Callable[[Resolved, str, StartupReporter, Log], BuiltNode]


def run_command(main: Callable[..., None], script: str) -> None:
    """Run `main` as the command line of a script in deploy/; usage errors speak of the script.

    This process ends afterwards.
    """
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(main)
    try:
        app(prog_name=f"deploy/{script}")
    finally:
        # The interpreter waits for threads, and so would whoever waits for this process.
        end_within(END_SECONDS)


def end_within(seconds: float) -> None:
    """End this process with EXIT_DEFECT and the stacks of all threads, unless it has ended after `seconds`.

    A later call replaces the bound of an earlier one. The timer needs no Python thread and no interpreter lock.
    """
    faulthandler.dump_traceback_later(seconds, exit=True)


def run_process(
    name: str,
    cluster: Path,
    overrides: list[str] | None,
    status_fd: int | None,
    body: Callable[[Resolved, StartupReporter, Log], Any],
    admin_socket: Callable[[Resolved], Path] | None = None,
) -> None:
    """Load the cluster file, run `body`, report the outcome to the process that started this one, and exit.

    `admin_socket`: of a router, by which `deploy/status` and others ask it.
    """
    never_wait_for_readers()
    logs.configure(name, "info")
    log = Log(name)
    prepare_descriptors()
    try:
        with StartupReporter(status_fd, log) as reporter:
            resolved = load_cluster(cluster, overrides or [])
            process = resolved.cluster.process
            if not process.core_dumps:
                resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            # The supervisor opened the log file if it passed a descriptor; otherwise the file belongs to the caller.
            max_bytes = None if status_fd is None else process.log_max_mib << 20
            logs.configure(name, process.log_level, max_bytes)
            with _recorded(resolved, name, admin_socket) if status_fd is None else contextlib.nullcontext():
                body(resolved, reporter, log)
            log.info("drained")
    except (ConfigError, ModelError) as error:
        log.error("cannot start", reason=str(error))
        write_stderr(f"{name}: {error}")
        sys.exit(EXIT_REFUSED)
    except NodeRefused as error:
        log.error("no router takes this node: it ends", reason=str(error))
        sys.exit(EXIT_REFUSED)
    except RankFailed as error:
        log.error("a rank of this node has failed: the node ends", reason=str(error))
        sys.exit(EXIT_RANK_FAILED)


def _recorded(
    resolved: Resolved, name: str, admin_socket: Callable[[Resolved], Path] | None
) -> contextlib.AbstractContextManager[None]:
    """Let `deploy/down` find this process, which no supervisor holds. Not every process needs a run directory."""
    try:
        admin = None if admin_socket is None else admin_socket(resolved)
        return launch_record(run_directory(resolved), name, resolved.cluster.health.drain_timeout, admin)
    except ConfigError:
        return contextlib.nullcontext()


def _ready_file(resolved: Resolved, name: str) -> contextlib.AbstractContextManager[ReadyFile]:
    """Return the file that tells probes of this node's state; none without a run directory."""
    try:
        return ready_file(run_directory(resolved), name)
    except ConfigError:
        return ready_file(None, name)


def run_node(
    import_build: Callable[[Resolved, str], Build],
    cluster: Path,
    name: str,
    overrides: list[str] | None,
    status_fd: int | None,
) -> None:
    """Run one node's whole life.

    `import_build` starts other ranks and imports torch, which takes seconds, so that phase is reported first.
    """

    def body(resolved: Resolved, reporter: StartupReporter, log: Log) -> None:
        reporter.report("importing")
        health = resolved.cluster.health
        with _ready_file(resolved, name) as ready, contextlib.ExitStack() as starting:
            starting.enter_context(reporter.watched(health.start_hang_timeout))
            build = import_build(resolved, name)
            with reporter.times.counting(), end_with_failed_threads(log):
                built = build(resolved, name, reporter, log)

            def started() -> None:
                reporter.report("ready")
                starting.close()
                ready.set()

            serve(built, ready, started, starting, health.hung_limit, log)

    def serve(
        built: BuiltNode,
        ready: ReadyFile,
        started: Callable[[], None],
        starting: contextlib.ExitStack,
        hung_limit: float,
        log: Log,
    ) -> None:
        def drain() -> None:
            ready.clear()
            built.drain()

        try:
            on_termination(drain)
            # Models and graphs live as long as the process: a full collection would halt steps for a tenth of a second.
            gc.collect()
            gc.freeze()
            log.info("start-up memory on huge pages", mib=use_huge_pages() >> 20)
            with end_with_failed_threads(log):
                built.start()
                started()
                with loop_watchdog(built.overdue, hung_limit, log):
                    built.run()
        finally:
            starting.close()
            end_within(END_SECONDS)
            gc.unfreeze()
            built.close()

    run_process(name, cluster, overrides, status_fd, body)


def on_termination(drain: Callable[[], None]) -> None:
    """Drain on SIGTERM and SIGINT, and when the terminal is closed; a second SIGINT ends the process at once."""

    def handle(number: int, frame: object) -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        drain()

    signal.signal(signal.SIGTERM, handle)
    signal.signal(signal.SIGINT, handle)
    # nohup sets SIGHUP to be ignored: keep it so.
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        signal.signal(signal.SIGHUP, handle)
