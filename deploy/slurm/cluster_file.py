"""Writes the cluster file of a Slurm job: the sections of a base file, and nodes on the hosts that Slurm has allocated.

The batch script calls it, and reads from its output which process runs where: one line `NAME ROLE HOST` each.
"""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from common.config import load_cluster
from common.config.http_exposure import is_loopback
from common.config.router_processes import router_name
from common.config.yaml_file import read_mapping
from common.errors import ConfigError
from common.resolved_path import resolved_path
from deploy.command import run_program

ROUTER = "router"
MOVABLE = "deploy.movable_node"
SECTIONS = ("prefill", "decode", "movable")  # that list nodes
# Values of one node, which a template for several nodes cannot have.
OWN_KEYS = ("name", "count", "peer_address", "host", "bulk_port")


@dataclass(frozen=True, slots=True)
class AllocatedHost:
    """A host of the job."""

    name: str  # as Slurm calls it
    address: str  # IP address


@dataclass(frozen=True, slots=True)
class Placed:
    """A process and its host."""

    name: str
    role: str  # the folder that `python -m` runs
    host: AllocatedHost


@dataclass(frozen=True, slots=True)
class Wanted:
    """The numbers of processes."""

    prefill: int
    decode: int
    movable: int = 0
    routers: int = 1  # processes


def place(hosts: Sequence[AllocatedHost], wanted: Wanted) -> list[Placed]:
    """Return all processes: routers on the first host, then prefill, decode and movable nodes on all hosts in turn.

    The routers have their host for themselves if there are more hosts than nodes.
    """
    nodes = wanted.prefill + wanted.decode + wanted.movable
    turn = cycle(hosts[1:] if len(hosts) > nodes else hosts)
    return [
        *(Placed(router_name(index), ROUTER, hosts[0]) for index in range(wanted.routers)),
        *(Placed(f"prefill-{index}", "prefill_node", next(turn)) for index in range(wanted.prefill)),
        *(Placed(f"decode-{index}", "decode_node", next(turn)) for index in range(wanted.decode)),
        *(Placed(f"flex-{index}", MOVABLE, next(turn)) for index in range(wanted.movable)),
    ]


def sections_of(base: dict[str, Any], placed: Sequence[Placed], port: int, keys: Path) -> dict[str, Any]:
    """Return the sections of the job's cluster file. `base` is not changed.

    The first node of each role in `base` is the template of all nodes of that role, also of movable ones, and the first
    entry of its movable.nodes says with which role these start. `keys` becomes security.keys if there are hosts off
    loopback and `base` has no directory of its own.
    """
    sections = {name: dict(section) for name, section in base.items()}
    entries: dict[str, list[dict[str, Any]]] = {section: [] for section in SECTIONS}
    for index, each in enumerate(placed):
        # The router has the first port, its further processes those after it.
        at = f"tcp://{_in_url(each.host.address)}:{port + index}"
        if each.name == ROUTER:
            sections.setdefault("router", {})["control_address"] = at
        if each.role in ("prefill_node", MOVABLE):
            entries["prefill"].append({"name": each.name, "peer_address": at})
        if each.role in ("decode_node", MOVABLE):
            entries["decode"].append({"name": each.name, "host": each.host.address})
        if each.role == MOVABLE:
            entries["movable"].append({"name": each.name})
    for name, nodes in entries.items():
        section = sections.setdefault(name, {})
        template = (section.get("nodes") or [{}])[0]
        shared = {key: value for key, value in template.items() if key not in OWN_KEYS}
        section["nodes"] = [{**node, **shared} for node in nodes]
    if not entries["movable"]:
        sections["movable"].pop("nodes")
    security = sections.setdefault("security", {})
    if not all(is_loopback(each.host.address) for each in placed) and not security.get("keys"):
        security["keys"] = str(keys)
    return {name: section for name, section in sections.items() if section}


def _in_url(address: str) -> str:
    return f"[{address}]" if ":" in address else address


def read_hosts(arguments: Sequence[str]) -> Iterator[AllocatedHost]:
    """Yield the hosts of arguments NAME=ADDRESS, where the address may be a name. Raises ConfigError."""
    for each in arguments:
        name, _, address = each.partition("=")
        try:
            found = socket.getaddrinfo(address or name, None, type=socket.SOCK_STREAM)
        except OSError as error:
            raise ConfigError(each, f"has no address: {error}; set NodeAddr in slurm.conf") from None
        yield AllocatedHost(name, str(found[0][4][0]))


def main(
    base: Annotated[Path, typer.Argument(help="cluster file with the model and all settings but the nodes")],
    out: Annotated[Path, typer.Argument(help="cluster file to write; in the folder of BASE")],
    hosts: Annotated[list[str], typer.Argument(metavar="HOST=ADDRESS...", help="the hosts of the job")],
    prefill: Annotated[int, typer.Option(min=1, max=256, help="number of prefill nodes")] = 1,
    decode: Annotated[int, typer.Option(min=1, max=256, help="number of decode nodes")] = 1,
    movable: Annotated[int, typer.Option(min=0, max=256, help="number of movable nodes")] = 0,
    port: Annotated[int, typer.Option(min=1024, max=65000, help="first port of the links")] = 7100,
    keys: Annotated[Path, typer.Option(help="directory of the link keys, if hosts are off loopback")] = Path(
        "keys"
    ),
) -> None:
    """Write the cluster file of a job and print where each process runs."""
    try:
        if resolved_path(out).parent != resolved_path(base).parent:
            raise ConfigError(str(out), f"must be in the folder of {base}, to which its paths are relative")
        routers = load_cluster(base).cluster.router.processes
        placed = place(list(read_hosts(hosts)), Wanted(prefill, decode, movable, routers))
        sections = sections_of(read_mapping(base), placed, port, keys.absolute())
        out.write_text(
            f"# Written for a Slurm job from {base.name}.\n" + yaml.safe_dump(sections, sort_keys=False)
        )
        load_cluster(out)
    except ConfigError as error:
        print(f"{base}: {error}", file=sys.stderr)
        raise typer.Exit(2) from None
    except OSError as error:
        print(f"{out}: {error.strerror}", file=sys.stderr)
        raise typer.Exit(2) from None
    for each in placed:
        print(each.name, each.role, each.host.name)


if __name__ == "__main__":
    run_program(main, "python -m deploy.slurm.cluster_file")
