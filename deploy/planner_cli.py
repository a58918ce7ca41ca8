"""deploy/planner: watches a cluster and changes the roles of its nodes, or its replicas in Kubernetes.

Exit codes: 0 ended by a signal, 2 settings, target or key refused, or nothing in the cluster that it could change.
"""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import Annotated

import typer

from common.errors import ConfigError
from common.observability import logs
from common.observability.logs import Log
from common.observability.stderr_file import never_wait_for_readers
from deploy.command import run_program
from deploy.planning.changers import Changer, KubernetesScaler, RoleChanger
from deploy.planning.observing import Observer
from deploy.planning.planner import Planner, PlannerLoop
from deploy.planning.routers import Routers
from deploy.planning.settings import PlannerSettings, read_settings

EXIT_REFUSED = 2


async def plan(settings: PlannerSettings, routers: Routers, dry_run: bool) -> None:
    """Run until SIGTERM or SIGINT. Raises ConfigError."""
    task = asyncio.current_task()
    assert task is not None
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    target = settings.kubernetes
    changer: Changer
    changer = RoleChanger(routers, settings.change_timeout) if target is None else KubernetesScaler(target)
    planner = Planner(settings.limits(), Observer(settings.quantile, settings.least_requests))
    await PlannerLoop(planner, routers, changer, settings.interval, dry_run, Log("planner")).run()


def run(
    file: Annotated[Path, typer.Argument(metavar="SETTINGS.yaml", help="see docs/operations.md")],
    target: Annotated[
        str,
        typer.Argument(metavar="CLUSTER.yaml|URL", help="a cluster file on this host, or a URL of routers"),
    ],
    api_key: Annotated[
        str | None, typer.Option(envvar="OPENAI_API_KEY", help="for a URL: a key with the scope admin")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="log decisions, but change nothing")] = False,
) -> None:
    """Adapt the roles of movable nodes, or the replicas in Kubernetes, to measured latencies."""
    try:
        settings, routers = read_settings(file), Routers(target, api_key)
        if routers.notice:
            typer.echo(f"deploy/planner: {routers.notice}", err=True)
        asyncio.run(plan(settings, routers, dry_run))
    except ConfigError as error:
        typer.echo(f"deploy/planner: {error}", err=True)
        raise typer.Exit(EXIT_REFUSED) from None
    except (asyncio.CancelledError, KeyboardInterrupt):
        pass


if __name__ == "__main__":
    never_wait_for_readers()
    logs.configure("planner", "info")
    run_program(run, "deploy/planner")
