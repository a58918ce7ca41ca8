"""The router processes of a cluster: their names, addresses, and which of them share a host.

Processes are numbered over all hosts of `router.control_address`, `router.processes` on each. The first one is called
"router", the others "router.1", "router.2" ...; no node has such a name, since names of nodes contain no dots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from common.config.schema import Cluster, RouterSection
from common.errors import ConfigError
from common.messages.identity import ROUTER_NAME
from common.node_names import FOUND

PROCESSES = "router.processes"
CONTROL = "router.control_address"
MAX_PROCESSES = 64  # router processes of a cluster; every node has a link to each


@dataclass(frozen=True, slots=True)
class RouterProcess:
    """One of the router processes."""

    index: int
    host_peers: tuple[int, ...]  # the others on its host, ascending

    @property
    def name(self) -> str:
        return router_name(self.index)


def router_name(index: int) -> str:
    return f"{ROUTER_NAME}.{index}" if index else ROUTER_NAME


def names_router(name: str) -> bool:
    """Return whether a process of this name is a router."""
    return name.partition(".")[0] == ROUTER_NAME


def router_hosts(router: RouterSection) -> tuple[str, ...]:
    """Return the control address of the first process of each host."""
    address = router.control_address
    return (address,) if isinstance(address, str) else address


def router_process(cluster: Cluster, index: int) -> RouterProcess:
    """Return the process with this number. Raises ConfigError if the cluster has fewer."""
    count, hosts = cluster.router.processes, len(router_hosts(cluster.router))
    if not 0 <= index < count * hosts:
        raise ConfigError(
            PROCESSES,
            f"there is no router process {index}: {hosts} control addresses with {count} processes each are numbered "
            f"0 to {count * hosts - 1}",
        )
    first = index // count * count
    return RouterProcess(index, tuple(each for each in range(first, first + count) if each != index))


def derived_addresses(router: RouterSection, run_dir: Path) -> list[str]:
    """Return the control addresses of all processes, in the order of their numbers."""
    return [
        _address(base, process, run_dir)
        for base in router_hosts(router)
        for process in range(router.processes)
    ]


def check_routers(router: RouterSection) -> None:
    """Check that the processes of the cluster can have addresses of their own. Raises ConfigError."""
    hosts = router_hosts(router)
    if len(hosts) * router.processes > MAX_PROCESSES:
        raise ConfigError(
            PROCESSES,
            f"{len(hosts) * router.processes} router processes are too many; write at most {MAX_PROCESSES}",
        )
    if hosts[0].startswith(FOUND) and router.processes > 1:
        raise ConfigError(PROCESSES, f"{hosts[0]} has one router process per address; write 1")
    if len(hosts) > 1 and not all(each.startswith("tcp://") for each in hosts):
        raise ConfigError(CONTROL, "routers on several hosts need addresses of the form tcp://HOST:PORT")
    addresses = derived_addresses(router, Path("/"))
    if len(set(addresses)) < len(addresses):
        raise ConfigError(
            CONTROL,
            f"two router processes would have one address: each host needs {router.processes} ports of its own, from "
            "the given one on",
        )
    if any(int(each.rpartition(":")[2]) > 65_535 for each in addresses if each.startswith("tcp://")):
        raise ConfigError(
            CONTROL,
            f"{router.processes} processes need as many ports from the given one on; choose a lower one",
        )
    if router.processes > 1 and router.port == 0:
        raise ConfigError("router.port", f"{router.processes} router processes share one port; set it")


def _address(base: str, process: int, run_dir: Path) -> str:
    if base == "auto":
        return f"ipc://{run_dir}/{router_name(process)}.sock"
    if not process:
        return base
    if base.startswith("ipc://"):
        return f"{base}.{process}"
    host, _, port = base.rpartition(":")
    return f"{host}:{int(port) + process}"


def names_of(cluster: Cluster) -> Sequence[str]:
    """Return the names of all router processes."""
    count = len(router_hosts(cluster.router)) * cluster.router.processes
    return [router_name(index) for index in range(count)]
