"""What every process of the cluster does around its work: logs, start-up report, signals, exit codes.

Exit codes: 0 drained, 1 a defect (traceback in the log), 2 the configuration or the model cannot be served.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable

from common.errors import ConfigError, ModelError
from common.observability.logs import Log
from common.observability.startup import StartupReporter

EXIT_REFUSED = 2


def run_process(name: str, status_fd: int | None, body: Callable[[StartupReporter, Log], None]) -> None:
    """Run `body`, tell whoever started us how it went, and exit. Logging has been configured."""
    log = Log(name)
    try:
        with StartupReporter(status_fd, log) as reporter:
            body(reporter, log)
    except (ConfigError, ModelError) as error:
        log.error("cannot start", reason=str(error))
        print(f"{name}: {error}", file=sys.stderr)
        sys.exit(EXIT_REFUSED)


def on_termination(drain: Callable[[], None]) -> None:
    """SIGTERM and SIGINT drain; a second SIGINT ends the process at once."""

    def handle(number: int, frame: object) -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        drain()

    signal.signal(signal.SIGTERM, handle)
    signal.signal(signal.SIGINT, handle)
