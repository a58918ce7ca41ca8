"""deploy/top: shows the nodes of a running cluster every second; without a terminal, prints one snapshot.

Exit codes: 0 success, 1 the router does not answer, 2 the target or the key is refused.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import termios
import time
import tty
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from http.client import HTTPException
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from common.errors import ConfigError
from deploy.admin_client import MAX_ANSWER_BYTES, ask
from deploy.cluster_options import Overrides, Port, with_port
from deploy.cluster_sample import ClusterSample, Fetch, read_sample
from deploy.command import run_program
from deploy.found_cluster import find_cluster
from deploy.openai_client import api_base, authorization
from deploy.other_cluster import require_own_cluster
from deploy.prepare import cluster_file_of
from deploy.process_table import Table, read_table
from deploy.terminal_text import printable
from deploy.top_view import render

EXIT_NO_ANSWER, EXIT_REFUSED = 1, 2
REFRESH_SECONDS = 1.0
WINDOW = 10  # samples; rates and percentiles are those since the oldest
ANSWER_SECONDS = 5.0
MAX_KEYS = 1024  # bytes read at a time
NO_ANSWER = (OSError, HTTPException)


_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def over_http(url: str, api_key: str | None, path: str) -> bytes:
    """Ask a router for a path. Raises ConfigError if it refuses the key, OSError if it does not answer."""
    address = api_base(url).removesuffix("/v1") + path
    if not address.startswith(("http://", "https://")):
        raise ConfigError(url, "is not an http or https URL")
    request = urllib.request.Request(address, headers=authorization(api_key))
    try:
        with _opener.open(request, timeout=ANSWER_SECONDS) as response:
            body: bytes = response.read(MAX_ANSWER_BYTES)
            return body
    except urllib.error.HTTPError as error:
        if error.code in (401, 403):
            raise ConfigError(
                "--api-key", f"{path} was answered {error.code}: it needs the scope admin"
            ) from None
        if error.code == 404:
            raise ConfigError(url, f"answered 404 to {path}: is it a tandem router?") from None
        raise


def over_admin_socket(socket: Path, check: Callable[[], None], path: str) -> bytes:
    """Ask the router of this host for a path. Raises OSError or HTTPException if it does not answer.

    `check` raises OSError if another cluster answers there.
    """
    check()
    try:
        return ask(socket, "GET", path, timeout=ANSWER_SECONDS)[1]
    except (FileNotFoundError, ConnectionRefusedError):
        raise ConnectionError(f"nothing listens at {socket}; does it run on this host?") from None


def source(
    target: str, api_key: str | None, values: Sequence[str]
) -> tuple[Fetch, Callable[[], Table | None]]:
    """Return how to ask the router of a target, and how to read the supervisor's table.

    A running cluster is found although its file is no longer valid; then a line on stderr says so.

    `values` override keys of the target's cluster file, as in "router.port=8001".

    Raises ConfigError; OSError if the target is a model that was never started.
    """
    if "://" in target:
        if values:
            raise ConfigError(target, "is a URL; --set and --port apply to a cluster file or a model")
        # The supervisor runs elsewhere.
        return partial(over_http, target, api_key), lambda: None
    try:
        file = cluster_file_of(target)
    except ConfigError as error:
        raise ConfigError(target, f"{error}; or a URL that begins with http:// or https://") from None
    if not file.exists() and str(file) != target:
        raise FileNotFoundError(f"deploy/up {target} has not been run")
    found = find_cluster(file, values)
    if found.notice:
        typer.echo(printable(f"deploy/top: {found.notice}"), err=True)
    check = partial(require_own_cluster, found.run_dir, found.file, values)
    return partial(over_admin_socket, found.admin_socket, check), partial(read_table, found.run_dir)


def watch(
    fetch: Fetch, table: Callable[[], Table | None], wait: Callable[[float], bool]
) -> Iterator[RenderableType]:
    """Yield a picture about every second until `wait` returns True. Raises ConfigError, ValueError."""
    samples: deque[ClusterSample] = deque(maxlen=WINDOW)
    while True:
        began = time.monotonic()
        try:
            samples.append(read_sample(fetch, began))
            yield render(samples, table())
        except NO_ANSWER as error:
            problem = Text(printable(f"the router does not answer: {error}"), style="red")
            yield Group(problem, render(samples, table())) if samples else problem
        if wait(max(REFRESH_SECONDS - (time.monotonic() - began), 0.0)):
            return


def snapshot(fetch: Fetch, table: Callable[[], Table | None], out: Console) -> None:
    """Print one picture, whose rates are those of a second."""
    samples = [read_sample(fetch, time.monotonic())]
    time.sleep(REFRESH_SECONDS)
    samples.append(read_sample(fetch, time.monotonic()))
    out.print(render(samples, table()))


@contextlib.contextmanager
def key_pressed() -> Iterator[Callable[[float], bool]]:
    """Read keys without Enter. The value waits some seconds and returns whether q was pressed."""
    before = termios.tcgetattr(sys.stdin)
    tty.setcbreak(sys.stdin)

    def wait(seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            ready, _, _ = select.select([sys.stdin], [], [], left)
            # Not by `read` of a file, whose buffer would hide further keys from `select`.
            if ready and (not (keys := os.read(sys.stdin.fileno(), MAX_KEYS)) or b"q" in keys):
                return True
        return False

    try:
        yield wait
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def interrupt(*_: object) -> None:
    """Leave as on Ctrl-C, so that the terminal is restored."""
    raise KeyboardInterrupt


def run(
    target: Annotated[
        str,
        typer.Argument(
            metavar="CLUSTER.yaml|MODEL_DIR|ORG/NAME|URL",
            help="as for deploy/status, or a URL",
            show_default="deploy/clusters/local.yaml, a tiny model",
        ),
    ] = str(Path(__file__).parent / "clusters" / "local.yaml"),
    api_key: Annotated[
        str | None, typer.Option(envvar="OPENAI_API_KEY", help="for a URL: a key with the scope admin")
    ] = None,
    port: Port = None,
    overrides: Overrides = None,
) -> None:
    """Show the nodes of a cluster live; q or Ctrl-C leaves. Without a terminal: print one snapshot.

    A cluster file is read through the router's admin socket on this host and needs no key.
    """
    out = Console(width=None if sys.stdout.isatty() else 160)
    try:
        fetch, table = source(target, api_key, with_port(overrides, port))
        if not (out.is_terminal and sys.stdin.isatty()):
            snapshot(fetch, table, out)
            return
        signal.signal(signal.SIGTERM, interrupt)
        with contextlib.suppress(KeyboardInterrupt), key_pressed() as wait:
            with Live(console=out, screen=True, auto_refresh=False) as live:
                for picture in watch(fetch, table, wait):
                    live.update(picture, refresh=True)
    except (ConfigError, ValueError) as error:
        typer.echo(printable(f"deploy/top: {error}"), err=True)
        raise typer.Exit(EXIT_REFUSED) from None
    except NO_ANSWER as error:
        typer.echo(printable(f"deploy/top: the router of {target} does not answer: {error}"), err=True)
        raise typer.Exit(EXIT_NO_ANSWER) from None


if __name__ == "__main__":
    run_program(run, "deploy/top")
