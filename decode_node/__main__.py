"""`python -m decode_node --cluster FILE --name NAME`: one decode process."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from common.config import load_cluster
from common.observability import logs
from common.observability.logs import Log
from common.observability.process import on_termination, run_process
from common.observability.startup import StartupReporter


def main(
    cluster: Annotated[Path, typer.Option(help="Cluster file")],
    name: Annotated[str, typer.Option(help="Which of the file's decode nodes this process is")],
    set_: Annotated[list[str], typer.Option("--set", help="PATH=VALUE, over file and environment")] = [],  # noqa: B006
    status_fd: Annotated[
        int | None, typer.Option(help="Descriptor for start-up progress", hidden=True)
    ] = None,
) -> None:
    """Run a decode node until it is told to drain (SIGTERM)."""

    def body(reporter: StartupReporter, log: Log) -> None:
        resolved = load_cluster(cluster, set_)
        logs.configure(name, resolved.cluster.process.log_level)
        reporter.report("importing")
        from decode_node.build import build

        built = build(resolved, name, reporter, log)
        try:
            on_termination(built.node.drain)
            built.link.start()
            reporter.report("ready")
            built.node.run()
            log.info("drained")
        finally:
            built.close()

    logs.configure(name, "info")
    run_process(name, status_fd, body)


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(main)
    app()
