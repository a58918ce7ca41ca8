"""Options that name the same cluster to several commands: values for keys of its file, and command lines with them."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer

from common.config.keys import ENV_PREFIX
from common.config.run_directory import KEY as RUN_DIR

RUN_DIR_VARIABLE = ENV_PREFIX + RUN_DIR.replace(".", "_").upper()

Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Set a key, such as router.port=8001, overriding file and environment; may be repeated.",
    ),
]
Port = Annotated[
    int | None, typer.Option(metavar="N", help="Port of the API; the same as --set router.port=N.")
]


def with_port(overrides: list[str] | None, port: int | None) -> list[str]:
    """Return the overrides with that of the port."""
    return [*(overrides or []), *([] if port is None else [f"router.port={port}"])]


def set_options(overrides: Iterable[str]) -> list[str]:
    """Return the options of a command that give it these overrides."""
    return [part for each in overrides for part in ("--set", each)]


def command_line(command: str, target: str | Path, overrides: Iterable[str]) -> str:
    """Return the line that runs `deploy/COMMAND` on a target, to be copied into a shell."""
    return shlex.join([f"deploy/{command}", str(target), *set_options(overrides)])


def down_line(cluster: str | Path, overrides: Iterable[str]) -> str:
    """Return the line that stops the cluster that was started from this file with these overrides.

    It keeps the override of the run directory, of several the last: another directory belongs to another cluster, or
    to none.
    """
    kept = [each for each in overrides if each.partition("=")[0].strip() == RUN_DIR]
    return command_line("down", cluster, kept[-1:])
