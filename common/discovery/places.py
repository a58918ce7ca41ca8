"""Says where a node's links to routers go: to listed addresses, or to those that a source finds."""

from __future__ import annotations

from dataclasses import dataclass, field

from common.discovery.dns import DnsRouters
from common.ipc.host_lookup import Host
from common.node_names import FOUND
from common.node_plan import RouterPlan


@dataclass(frozen=True, slots=True)
class RouterPlaces:
    """One place for each link. The main link, its heartbeats and its images use the same one."""

    hosts: tuple[str | Host, ...]
    sources: tuple[DnsRouters, ...] = field(default=())

    def close(self) -> None:
        for source in self.sources:
            source.close()


def router_places(plan: RouterPlan) -> RouterPlaces:
    """Return the places of a node's links, and begin to look for routers that are not listed."""
    address = plan.addresses[0]
    if not address.startswith(FOUND):
        return RouterPlaces(plan.addresses)
    source = DnsRouters(address, plan.found)
    return RouterPlaces(tuple(source.slots), (source,))
