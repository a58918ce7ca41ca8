"""Entry point of a router process: `python -m router --cluster FILE [--process N]`."""

from __future__ import annotations

import asyncio
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated

import typer
import uvloop

from common.config import Resolved
from common.config.admin_listener import admin_socket
from common.config.router_processes import RouterProcess, router_name, router_process
from common.huge_pages import use_huge_pages
from common.observability.failed_threads import log_failed_threads
from common.observability.logs import Log
from common.observability.startup import StartupReporter
from common.process import (
    END_SECONDS,
    ClusterOption,
    SetOption,
    StatusOption,
    end_within,
    run_command,
    run_process,
)
from router.build import build
from router.process.garbage import collect_when_idle, collect_young, prepare_heap

ProcessOption = Annotated[
    int, typer.Option("--process", metavar="N", help="Index of this process, from 0, of several routers")
]

# They compete with the event loop for the interpreter. Python's default, up to 32, depends on the number of cores.
THREADS = 6


async def _serve(resolved: Resolved, process: RouterProcess, reporter: StartupReporter, log: Log) -> None:
    """Run a router until it has drained."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.set_default_executor(ThreadPoolExecutor(THREADS, "router"))
    try:
        # This task both enters and leaves the watch, which sets a context variable.
        with reporter.watched(resolved.cluster.health.start_hang_timeout):
            app = build(resolved, process, log)
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(number, stop.set)
            # nohup sets SIGHUP to be ignored: keep it so.
            if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
                loop.add_signal_handler(signal.SIGHUP, app.http.reload)
            await app.start()
            prepare_heap()
            log.info("start-up memory on huge pages", mib=use_huge_pages() >> 20)
            # The loop would keep each async generator in a set of weak references, to close it when the loop ends.
            # Handlers close theirs themselves; an abandoned one is still closed, by the other hook.
            sys.set_asyncgen_hooks(firstiter=None)
            collectors = [
                loop.create_task(collect_when_idle(lambda: app.generating)),
                loop.create_task(collect_young(lambda: app.generating)),
            ]
            reporter.report("ready")
        await stop.wait()
    except BaseException:
        end_within(END_SECONDS)
        raise
    end_within(resolved.cluster.health.drain_timeout + END_SECONDS)
    for each in collectors:
        each.cancel()
    await app.finish_requests()
    # Closing waits for child processes, and the event loop for every thread of its pool.
    end_within(END_SECONDS)
    await app.close()


def main(
    cluster: ClusterOption,
    process: ProcessOption = 0,
    set_: SetOption = None,
    status_fd: StatusOption = None,
) -> None:
    """Run a router until SIGTERM or SIGINT asks it to drain."""

    def body(resolved: Resolved, reporter: StartupReporter, log: Log) -> None:
        with log_failed_threads(log):
            uvloop.run(_serve(resolved, router_process(resolved.cluster, process), reporter, log))

    run_process(router_name(process), cluster, set_, status_fd, body, admin_socket)


if __name__ == "__main__":
    run_command(main, "launch_router")
