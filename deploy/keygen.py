"""`deploy/keygen DIR CLUSTER.yaml`: one CURVE key pair per process of the cluster, for links that leave the host.

Copy every NAME.key to every host, and NAME.key_secret only to the host that runs NAME; then set security.keys.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
import zmq.auth

from common.config import load_cluster
from common.errors import ConfigError


def main(
    directory: Annotated[Path, typer.Argument(help="Where the keys go; made 0700")],
    cluster: Annotated[Path, typer.Argument(help="Cluster file: its node names")],
) -> None:
    """Make keys that do not exist yet; existing ones are left alone."""
    try:
        file = load_cluster(cluster).cluster
    except ConfigError as error:
        print(f"{cluster}: {error}", file=sys.stderr)
        raise typer.Exit(2) from None
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    names = ["router", *(n.name for n in file.prefill.nodes), *(n.name for n in file.decode.nodes)]
    for name in names:
        if (directory / f"{name}.key_secret").exists():
            continue
        _, secret = zmq.auth.create_certificates(directory, name)
        Path(secret).chmod(0o600)
    print(f"{len(names)} key pairs in {directory}: {', '.join(names)}")


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(main)
    app()
