"""The record that describes a transport to all code outside its folder."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import msgspec

from common.config.schema import Transfer
from common.config.section import Section


@dataclass(frozen=True, slots=True)
class Topology:
    """The places of a cluster's nodes."""

    gpu: bool  # all prefill and decode nodes are on GPUs; False: all are on CPUs
    one_host: bool  # all their addresses are on this host
    isolated_network: bool = False  # security.isolated_network


class TransportOptions(Section, frozen=True, kw_only=True):
    """The keys that a transport adds to the section `transfer`: none, unless it has a subclass."""


Options = TypeVar("Options", bound=TransportOptions)


def always_allowed(topology: Topology, options: Any) -> None:
    """No-op, the default of `allow`: the transport needs no permission."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportKind(Generic[Options]):
    """One transport. Endpoints are "module:function", imported only when the transport is chosen."""

    name: str
    # Returns the reason why the transport cannot move pages in this topology, or "".
    refusal: Callable[[Topology], str]
    options: type[Options]
    # Make a SenderEndpoint from a SenderSetup and a ReceiverEndpoint from a ReceiverSetup
    # (kv_transfer/transport/base.py).
    sender: str
    receiver: str
    # Whether a decode node binds a socket for it: decode.nodes[].host and bulk_port.
    listens: bool = False
    # Whether it sends pages layer by layer, see transfer.layers.
    layers: bool = False
    # Whether it moves pages between the two halves of a movable node, which are one process.
    within_process: bool = True
    # Raises ConfigError if the cluster file does not allow it.
    allow: Callable[[Topology, Options], None] = always_allowed

    def read(self, section: Transfer) -> Options:
        """Return its own keys of the section; keys that are missing in a section made without the loader get
        defaults.
        """
        fields = msgspec.structs.fields(self.options)
        return self.options(**{field.name: getattr(section, field.name, field.default) for field in fields})
