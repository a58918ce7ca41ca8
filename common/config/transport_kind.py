"""What a transport is to everything outside its folder: one record."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import msgspec

from common.config.schema import Section, Transfer


@dataclass(frozen=True, slots=True)
class Topology:
    """Where the nodes of a cluster are."""

    gpu: bool  # all prefill and decode nodes are on GPUs; False: all are on CPUs
    one_host: bool  # all their addresses are of this host
    isolated_network: bool = False  # security.isolated_network


class TransportOptions(Section, frozen=True, kw_only=True):
    """Base of the keys that a transport adds to the section `transfer`."""


Options = TypeVar("Options", bound=TransportOptions)


def always_allowed(topology: Topology, options: Any) -> None:
    """`allow` of a transport that needs no permission."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportKind(Generic[Options]):
    """One transport. Endpoints are "module:function", imported only when the transport is chosen."""

    name: str
    # Returns a sentence that says why the transport moves no pages in this topology, or "".
    refusal: Callable[[Topology], str]
    options: type[Options]
    # From SenderSetup to SenderEndpoint, and from ReceiverSetup to ReceiverEndpoint (kv_transfer/transport/base.py).
    sender: str
    receiver: str
    # A decode node binds a socket for it: decode.nodes[].host and bulk_port.
    listens: bool = False
    # Takes pages layer by layer, see transfer.layers.
    layers: bool = False
    # Raises ConfigError where the file does not allow it.
    allow: Callable[[Topology, Options], None] = always_allowed

    def read(self, section: Transfer) -> Options:
        """Its own keys of the section; those that a section made without the loader lacks have their defaults."""
        fields = msgspec.structs.fields(self.options)
        return self.options(**{field.name: getattr(section, field.name, field.default) for field in fields})
