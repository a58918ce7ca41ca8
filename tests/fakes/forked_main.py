"""Runs the main program of a fork, which must not return to the frames of the process that forked it."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from typing import NoReturn


def run_and_exit(main: Callable[[], object]) -> NoReturn:
    """Run `main` and end this process with the exit code that an interpreter would give it, without its last steps."""
    status = 1
    try:
        main()
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
