"""Reads EndpointSlices of Kubernetes, and says which addresses of a Service are routers to connect to."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

IP_TYPES = ("IPv4", "IPv6")


class SliceMetadata(msgspec.Struct, frozen=True, rename="camel"):
    name: str = ""
    resource_version: str = ""


class Conditions(msgspec.Struct, frozen=True):
    """`serving` and `ready` are not read: a router becomes ready by nodes, so they have to reach it before that."""

    terminating: bool | None = None


class PodReference(msgspec.Struct, frozen=True):
    uid: str = ""  # of the pod


class Endpoint(msgspec.Struct, frozen=True, rename="camel"):
    addresses: tuple[str, ...] = ()  # they are equivalent: the first one is used
    conditions: Conditions | None = None
    target_ref: PodReference | None = None

    @property
    def terminating(self) -> bool:
        return self.conditions is not None and bool(self.conditions.terminating)

    @property
    def identity(self) -> str:
        """Return what is the same for two entries of one router: its pod, else its address."""
        return (self.target_ref.uid if self.target_ref else "") or self.addresses[0]


class EndpointSlice(msgspec.Struct, frozen=True, rename="camel"):
    """discovery.k8s.io/v1 EndpointSlice."""

    metadata: SliceMetadata
    address_type: str = ""
    endpoints: tuple[Endpoint, ...] | None = None


class SliceList(msgspec.Struct, frozen=True):
    metadata: SliceMetadata
    items: tuple[EndpointSlice, ...] | None = None


class WatchEvent(msgspec.Struct, frozen=True):
    type: str
    object: msgspec.Raw


class WatchStatus(msgspec.Struct, frozen=True):
    """The object of an event ERROR."""

    code: int = 0
    message: str = ""


def addresses_of(slices: Iterable[EndpointSlice], most: int) -> Sequence[str]:
    """Return one IP address per router that is not terminating, at most `most`.

    A pod may stand in two slices: while it moves from one to the other, or with an IPv4 and an IPv6 address. One that
    terminates in any of them drains: its links stay, and no new ones are opened.
    """
    found: dict[str, str] = {}
    draining: set[str] = set()
    for each in sorted(slices, key=lambda item: (item.address_type, item.metadata.name)):
        if each.address_type not in IP_TYPES:
            continue
        for endpoint in each.endpoints or ():
            if not endpoint.addresses:
                continue
            if endpoint.terminating:
                draining.add(endpoint.identity)
            found.setdefault(endpoint.identity, endpoint.addresses[0])
    listed = (address for identity, address in found.items() if identity not in draining)
    return list(dict.fromkeys(listed))[:most]
