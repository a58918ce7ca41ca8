"""A node whose forwards block while a file exists: its process lives and sends heartbeats, but its main loop hangs.

`python -m tests.fakes.blocking_node FILE prefill --cluster CLUSTER --name NAME`. FILE contains the number of forwards
that run before the one that blocks, which creates FILE.reached.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common.node.overlap import OverlapLoop
from common.process import run_command

CHECK_INTERVAL = 0.02  # seconds


def to_pass(file: Path) -> int:
    """Return how many forwards run before the one that blocks, or 0 without the file, which a test may remove now."""
    with contextlib.suppress(FileNotFoundError):
        return int(file.read_text())
    return 0


def block_while(file: Path) -> None:
    """Make every loop of this process block before a launch."""
    make = OverlapLoop.__init__
    reached = file.with_name(file.name + ".reached")
    passed = 0

    def blocking(self: Any, prepare: Any, launch: Callable[[Any], Any], *rest: Any, **named: Any) -> None:
        def launch_later(plan: Any) -> Any:
            nonlocal passed
            if passed < to_pass(file):
                passed += 1
                return launch(plan)
            while file.exists():
                reached.touch()
                time.sleep(CHECK_INTERVAL)
            passed = 0
            reached.unlink(missing_ok=True)
            return launch(plan)

        make(self, prepare, launch_later, *rest, **named)

    OverlapLoop.__init__ = blocking  # type: ignore[method-assign]


if __name__ == "__main__":
    block_while(Path(sys.argv.pop(1)))
    if sys.argv.pop(1) == "prefill":
        from prefill_node.__main__ import main
    else:
        from decode_node.__main__ import main
    run_command(main, "launch_prefill")
