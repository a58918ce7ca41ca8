"""`deploy/keygen DIR CLUSTER.yaml`: one CURVE key pair per process of the cluster, for links between hosts.

Copy every NAME.key to every host, and NAME.key_secret only to the host that runs NAME; then set security.keys. A key
authenticates its NAME only. Removing NAME.key from a host revokes the key there.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from common.config import load_cluster
from common.errors import ConfigError
from common.ipc.from_config import all_names
from common.ipc.key_files import make_key_pairs
from deploy.command import run_program


def main(
    directory: Annotated[Path, typer.Argument(help="Directory of the keys; created with mode 0700")],
    cluster: Annotated[Path, typer.Argument(help="Cluster file with the node names")],
) -> None:
    """Create the keys that do not exist yet; existing keys are kept."""
    try:
        file = load_cluster(cluster).cluster
    except ConfigError as error:
        print(f"{cluster}: {error}", file=sys.stderr)
        raise typer.Exit(2) from None
    names = all_names(file)
    try:
        made = make_key_pairs(directory, names)
    except ConfigError as error:
        print(error, file=sys.stderr)
        raise typer.Exit(2) from None
    print(f"{len(names)} key pairs in {directory}, {len(made)} of them new: {', '.join(names)}")


if __name__ == "__main__":
    run_program(main, "deploy/keygen")
