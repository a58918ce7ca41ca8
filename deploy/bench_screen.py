"""Progress and lines of deploy/bench on a terminal, and its exit codes."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from deploy.terminal_text import printable

EXIT_FAILED, EXIT_REFUSED, EXIT_NOT_TRUSTED = 1, 2, 3
MAX_ERRORS = 3  # shown of each load or probe


def print_line(out: Console, text: str) -> None:
    """Print a line that may quote a server."""
    out.print(printable(text), markup=False, highlight=False, soft_wrap=True)


@contextlib.contextmanager
def progress(total: int | None) -> Iterator[Callable[[], None]]:
    """Show a bar on a terminal; yield the function that counts an answer. `total`: of answers; None if unknown."""
    console = Console(stderr=True)
    columns = (TextColumn("answered"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    # Lines on the standard output appear above the bar, unless they go to a file.
    terminal = sys.stdout.isatty()
    hidden = not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=hidden, redirect_stdout=terminal) as bar:
        task = bar.add_task("", total=total)
        yield lambda: bar.advance(task)
