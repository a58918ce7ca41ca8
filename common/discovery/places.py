"""Says where a node's links to routers go: to listed addresses, or to those that a source finds."""

from __future__ import annotations

from dataclasses import dataclass, field

from common.discovery.dns import DnsRouters
from common.discovery.slices import SliceRouters
from common.ipc.host_lookup import Host
from common.kubernetes_api import ApiServer
from common.node_names import DNS, SLICES
from common.node_plan import RouterPlan
from common.observability.logs import Log

KEYS = ("router.control_address", "router.control_address")


@dataclass(frozen=True, slots=True)
class RouterPlaces:
    """One place for each link. The main link, its heartbeats and its images use the same one."""

    hosts: tuple[str | Host, ...]
    sources: tuple[DnsRouters | SliceRouters, ...] = field(default=())

    def close(self) -> None:
        for source in self.sources:
            source.close()


def router_places(plan: RouterPlan, log: Log) -> RouterPlaces:
    """Return the places of a node's links, and begin to look for routers that are not listed.

    Raises ConfigError if they are to be found by EndpointSlices, and this is not a pod with a service account token.
    """
    address = plan.addresses[0]
    source: DnsRouters | SliceRouters
    if address.startswith(DNS):
        source = DnsRouters(address, plan.found)
    elif address.startswith(SLICES):
        source = SliceRouters(address, plan.found, ApiServer(keys=KEYS), log)
    else:
        return RouterPlaces(plan.addresses)
    return RouterPlaces(tuple(source.slots), (source,))
