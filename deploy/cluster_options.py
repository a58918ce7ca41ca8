"""Options that name the same cluster to several commands: values for keys of its file."""

from __future__ import annotations

from typing import Annotated

import typer

Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Override a key of the file and the environment, as in router.port=8001; may be repeated.",
    ),
]
Port = Annotated[
    int | None, typer.Option(metavar="N", help="Port of the API; the same as --set router.port=N.")
]


def with_port(overrides: list[str] | None, port: int | None) -> list[str]:
    """Return the overrides with that of the port."""
    return [*(overrides or []), *([] if port is None else [f"router.port={port}"])]
