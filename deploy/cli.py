"""The commands `deploy/up`, `down`, `status` and `config`. Targets are a cluster file, a model directory or ORG/NAME.

Exit codes: 0 success, 1 failed, 2 refused, 3 not running. For `status`: 0 everything is up, 1 the router cannot serve,
4 degraded: requests are served, but a process is down or the supervisor reports a problem.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, NoReturn

import typer
import typer.core
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table as RichTable

from common.config import Resolved, load_cluster
from common.config.cluster_schema import cluster_schema
from common.config.keys import option_answer
from common.config.run_directory import run_directory
from common.errors import ConfigError
from common.observability.stderr_file import StderrFile, has_room, never_wait_for_readers
from deploy.children import Child
from deploy.cluster_options import Overrides, Port, command_line, with_port
from deploy.command import HELP
from deploy.detached import REFUSED, SUPERVISOR_LOG, StartRefused, start_detached
from deploy.disk import disk_problem
from deploy.found_cluster import FoundCluster, find_cluster
from deploy.launched import NotStopped, stop_launched, unrecorded
from deploy.other_cluster import other_cluster
from deploy.prepare import cluster_file_of, prepare
from deploy.router_states import router_states, server_info
from deploy.status_view import show_launched, show_status
from deploy.supervisor import AlreadyRunning, StartError, Supervisor

DEFAULT = Path(__file__).parent / "clusters" / "local.yaml"
EXIT_FAILED, EXIT_REFUSED, EXIT_NOT_RUNNING = 1, REFUSED, 3

app = typer.Typer(
    add_completion=False, pretty_exceptions_enable=False, no_args_is_help=True, context_settings=HELP
)
console = Console(stderr=True)

Target = Annotated[
    str,
    typer.Argument(
        metavar="CLUSTER.yaml|MODEL_DIR|ORG/NAME",
        help="A cluster file, a model directory, or a model on the Hugging Face hub. "
        "An existing path takes precedence.",
        show_default="deploy/clusters/local.yaml, a tiny model",
    ),
]


@app.command(context_settings=HELP)
def up(
    target: Target = str(DEFAULT),
    draft: Annotated[
        str | None,
        typer.Option(
            metavar="DIR",
            help="Draft model for speculative decoding; its config.json determines the algorithm.",
        ),
    ] = None,
    port: Port = None,
    revision: Annotated[
        str | None, typer.Option(metavar="REV", help="Branch, tag or commit of ORG/NAME; default: main.")
    ] = None,
    overrides: Overrides = None,
    detach: Annotated[bool, typer.Option("--detach", help="Return once the cluster is ready.")] = False,
) -> None:
    """Start a cluster on this machine and keep it running; Ctrl-C drains it.

    A model runs on one prefill node and one decode node: on two GPUs, on one, or on the CPU if there is no GPU.

    ORG/NAME is loaded from the Hugging Face cache, or downloaded if it is not cached.
    """
    values = with_port(overrides, port)
    try:
        file = prepare(target, draft, revision, values, say)
    except ConfigError as error:
        _refuse(target, error)
    except AlreadyRunning as error:
        _fail(str(error))
    with file as cluster:
        resolved = _load(cluster, values)
        if detach:
            _detach(resolved, cluster, values, () if file.lock is None else (file.lock,))
        else:
            _supervise(resolved, cluster, values)


def _supervise(resolved: Resolved, cluster: Path, values: list[str]) -> None:
    """Run the cluster until a signal asks for its end."""
    never_wait_for_readers()  # what restarts processes that have ended must go on
    try:
        supervisor = Supervisor(resolved, values)
    except ConfigError as error:
        _refuse(cluster, error)
    except AlreadyRunning as error:
        _fail(str(error))
    signal.signal(signal.SIGINT, supervisor.request_stop)
    signal.signal(signal.SIGTERM, supervisor.request_stop)
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # not under nohup
        signal.signal(signal.SIGHUP, supervisor.request_stop)  # the terminal was closed
    own_log = StderrFile(resolved.cluster.process.log_max_mib << 20, supervisor.run_dir / SUPERVISOR_LOG)

    def report(text: str) -> None:
        line = f"{time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime())} {text}"
        own_log.make_room(len(line.encode()) + 1)
        say(line, "yellow")

    try:
        with StartView() as view:
            supervisor.start(view.show, report)
    except ConfigError as error:
        _refuse(cluster, error)
    except StartError as error:
        _fail(str(error))
    say(f"{_served_name(resolved)} answers at {supervisor.url}/v1  (logs: {supervisor.run_dir}/logs)", "bold")
    say("Ctrl-C stops it.")
    try:
        supervisor.watch(report, show_rest)
        say("draining ...")
    finally:
        supervisor.stop()
    say("stopped")


@app.command(context_settings=HELP)
def down(target: Target = str(DEFAULT), port: Port = None, overrides: Overrides = None) -> None:
    """Drain and stop a cluster that was started on this host by deploy/up or by the launch scripts."""
    cluster = _cluster_file(target, missing_exit=0)
    values = with_port(overrides, port)
    found = _find(cluster, values)
    table = found.table
    if other := other_cluster(table, found.file, values):
        _fail(f"not running; {other}")
    if table is None:
        try:
            say(stop_launched(found))
        except NotStopped as error:
            _fail(str(error))
        return
    table.supervisor.send(signal.SIGTERM)
    timeout = 2 * table.drain_timeout + 20
    deadline = time.monotonic() + timeout
    while table.supervisor.alive:
        if time.monotonic() > deadline:
            _fail(f"the supervisor (pid {table.supervisor.pid}) did not stop within {timeout:.0f} s")
        time.sleep(0.05)
    say("stopped")


@app.command(context_settings=HELP)
def status(target: Target = str(DEFAULT), port: Port = None, overrides: Overrides = None) -> None:
    """Show the processes of a cluster and what the router reports about its nodes.

    Exit codes: 0 everything is up, 1 not ready, 2 refused, 3 not running, 4 degraded.
    """
    cluster = _cluster_file(target, missing_exit=EXIT_NOT_RUNNING)
    values = with_port(overrides, port)
    found = _find(cluster, values)
    table, info = found.table, server_info(found.sockets)
    if other := other_cluster(table, found.file, values):
        say(f"not running; {other}")
        raise typer.Exit(EXIT_NOT_RUNNING)
    if table is None:
        if info is not None:
            raise typer.Exit(show_launched(info, _output()))
        if found.unrecorded:
            _fail(unrecorded(found))
        if found.launched:
            _fail(
                "no router answers here; "
                + ", ".join(f"{name} (pid {each.pid}) runs" for name, each in found.launched)
            )
        say(f"not running; {command_line('up', target, values)} starts it")
        raise typer.Exit(EXIT_NOT_RUNNING)
    routers = router_states(found.run_dir, table.processes)
    raise typer.Exit(show_status(table, disk_problem(found.run_dir), info, routers, _output()))


@app.command(context_settings=HELP)
def config(target: Target = str(DEFAULT), port: Port = None, overrides: Overrides = None) -> None:
    """Show every value of a cluster's configuration and where it comes from."""
    cluster = _cluster_file(target, missing_exit=EXIT_NOT_RUNNING)
    view = RichTable("key", "value", "origin")
    for path, value, origin in _load(cluster, with_port(overrides, port)).rows():
        view.add_row(
            escape(path), escape(str(value)), escape(origin), style=None if origin == "default" else "bold"
        )
    _output().print(view)


class StartView:
    """Shows start-up progress: one bar per process on a terminal, otherwise one line per change.

    No thread draws, because this process forks meanwhile. While the terminal takes no output, as after Ctrl-S, the bars
    wait for it. If it is closed, nothing more is drawn.
    """

    def __init__(self) -> None:
        columns = (
            TextColumn("{task.description:12}"),
            BarColumn(),
            TextColumn("{task.fields[phase]}"),
            TimeElapsedColumn(),
        )
        self._bars = Progress(*columns, console=console, auto_refresh=False, disable=not console.is_terminal)
        self._tasks: dict[str, TaskID] = {}
        self._said: dict[str, str] = {}

    def __enter__(self) -> StartView:
        return self

    def __exit__(self, *error: object) -> None:
        with contextlib.suppress(OSError), _written_at_once():
            self._bars.stop()

    def show(self, children: list[Child]) -> None:
        if not console.is_terminal:
            self._say_changes(children)
        elif not self._bars.disable and has_room():
            self._draw(children)

    def _draw(self, children: list[Child]) -> None:
        try:
            with _written_at_once():
                self._bars.start()
                self._update(children)
                self._bars.refresh()
        except BlockingIOError:
            # The terminal has just been stopped; the rest is written before the next bars.
            pass
        except OSError:
            self._bars.disable = True

    def _update(self, children: list[Child]) -> None:
        for child in children:
            at = child.progress
            if child.name not in self._tasks:
                self._tasks[child.name] = self._bars.add_task(child.name, total=1, phase="starting")
            ready = at.phase == "ready"
            self._bars.update(
                self._tasks[child.name],
                total=at.total or 1,
                completed=(at.total or 1) if ready else at.done,
                phase=at.phase,
            )

    def _say_changes(self, children: list[Child]) -> None:
        for child in children:
            phase = child.progress.phase
            if self._said.get(child.name) != phase:
                self._said[child.name] = phase
                say(f"{child.name}: {phase}")


@contextlib.contextmanager
def _written_at_once() -> Iterator[None]:
    """Write what is printed within to the terminal at the end. Raises OSError if it does not take all of that.

    rich changes its own state between its writes, and an error in the midst of them would leave half a change.
    """
    try:
        with console:
            yield
    except OSError:
        # Python keeps what the terminal has not taken, and rich would write all of it again.
        console.quiet = True
        with console:
            pass
        console.quiet = False
        raise


def _detach(resolved: Resolved, cluster: Path, overrides: list[str], keeps: Sequence[int]) -> None:
    try:
        run_dir = run_directory(resolved, to_write=True)
        started = start_detached(run_dir, cluster, overrides, say, keeps)
    except ConfigError as error:
        _refuse(cluster, error)
    except StartRefused as error:
        say(str(error), "red")
        raise typer.Exit(EXIT_REFUSED) from None
    except (AlreadyRunning, StartError) as error:
        _fail(str(error))
    name = _served_name(resolved)
    say(f"{name} answers at {started.url}/v1 (supervisor pid {started.pid}, logs: {run_dir}/logs)")


def _served_name(resolved: Resolved) -> str:
    return resolved.cluster.model.served_name or resolved.model_path.name


def _cluster_file(target: str, missing_exit: int) -> Path:
    """Return the cluster file of a target. Ends the command if the target is a model that was never started."""
    try:
        file = cluster_file_of(target)
    except ConfigError as error:
        _refuse(target, error)
    if not file.exists() and str(file) != target:
        say(f"not running: deploy/up {target} has not been run")
        raise typer.Exit(missing_exit)
    return file


def _load(cluster: Path, overrides: list[str]) -> Resolved:
    try:
        return load_cluster(cluster, overrides)
    except ConfigError as error:
        _refuse(cluster, error)


def _find(cluster: Path, overrides: list[str]) -> FoundCluster:
    """Return what runs of a cluster file; say what is wrong with the file or the run directory."""
    try:
        found = find_cluster(cluster, overrides)
    except ConfigError as error:
        _refuse(cluster, error)
    if found.notice:
        say(found.notice, "yellow")
    return found


def _output() -> Console:
    """Return a console for tables on stdout, as wide as the terminal; wide enough never to cut lines in a pipe."""
    return Console(width=None if sys.stdout.isatty() else 1000)


def say(text: str, style: str | None = None) -> None:
    """Print one line to stderr, without markup and without wrapping paths.

    A closed or stopped terminal or a log on a full disk must not end a cluster.
    """
    with contextlib.suppress(OSError):
        if console.is_terminal:
            with _written_at_once():
                console.print(text, style=style, highlight=False, markup=False, soft_wrap=True)
        else:
            print(text, file=sys.stderr, flush=True)


def show_rest() -> None:
    """Write what the terminal has not taken so far, as after Ctrl-S, if it takes it now."""
    with contextlib.suppress(OSError):
        sys.stderr.flush()


def _fail(text: str) -> NoReturn:
    say(text, "red")
    raise typer.Exit(EXIT_FAILED)


def _refuse(target: Path | str, error: ConfigError) -> NoReturn:
    # A problem of the whole file may name it already. A short target may also be part of another word.
    named = not error.path and str(target) in [word.rstrip(":") for word in str(error).split()]
    say(str(error) if named else f"{target}: {error}", "red")
    raise typer.Exit(EXIT_REFUSED) from None


def main(arguments: list[str]) -> None:
    """Run the command that the calling script names; help and errors name that script."""
    group = typer.main.get_command(app)
    assert isinstance(group, typer.core.TyperGroup)
    command = group.commands.get(arguments[0]) if arguments else None
    if command is None:
        app()
        return
    own = {name for parameter in command.params for name in parameter.opts}
    for word in arguments[1:]:
        answer = option_answer(cluster_schema(), word)
        if answer is not None and word.partition("=")[0] not in own:
            say(f"deploy/{arguments[0]}: {word}: {answer}", "red")
            sys.exit(EXIT_REFUSED)
    command.main(arguments[1:], prog_name=f"deploy/{arguments[0]}")


if __name__ == "__main__":
    main(sys.argv[1:])
