"""`python -m router --cluster FILE`: the router process."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import Annotated

import typer
import uvloop

from common.config import Resolved, load_cluster
from common.observability import logs
from common.observability.logs import Log
from common.observability.process import run_process
from common.observability.startup import StartupReporter
from router.app import build


async def _serve(resolved: Resolved, reporter: StartupReporter, log: Log) -> None:
    app = build(resolved, log)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    await app.start()
    reporter.report("ready")
    await stop.wait()
    await app.drain()
    log.info("drained")


def main(
    cluster: Annotated[Path, typer.Option(help="Cluster file")],
    set_: Annotated[list[str], typer.Option("--set", help="PATH=VALUE, over file and environment")] = [],  # noqa: B006
    status_fd: Annotated[
        int | None, typer.Option(help="Descriptor for start-up progress", hidden=True)
    ] = None,
) -> None:
    """Run the router until it is told to drain (SIGTERM)."""

    def body(reporter: StartupReporter, log: Log) -> None:
        resolved = load_cluster(cluster, set_)
        logs.configure("router", resolved.cluster.process.log_level)
        uvloop.run(_serve(resolved, reporter, log))

    logs.configure("router", "info")
    run_process("router", status_fd, body)


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(main)
    app()
