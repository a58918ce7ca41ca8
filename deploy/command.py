"""Runs programs that are one command, with the options and manners that all of them share."""

from __future__ import annotations

from collections.abc import Callable

import typer

HELP = {"help_option_names": ["-h", "--help"]}


def run_program(command: Callable[..., None], name: str) -> None:
    """Call `command` with what the command line says, then exit. `name`: of the program in its help."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command(context_settings=HELP)(command)
    app(prog_name=name)
