"""The description of a decode node's memory that lets a prefill node write into it: one struct per transport.

Hello carries it as a name and raw bytes, so that the handshake depends on no transport: the prefill node's endpoint
says which struct it accepts, and every other one is refused with an explanation.
"""

from __future__ import annotations

from typing import Annotated, TypeVar

import msgspec

from common.errors import HandshakeRefused
from kv_transfer.schema_hash import schema_hash

Name = Annotated[str, msgspec.Meta(min_length=1, max_length=255)]
Address = Annotated[int, msgspec.Meta(ge=1, le=(1 << 63) - 1)]
Hash = Annotated[int, msgspec.Meta(ge=0)]


class Description(msgspec.Struct, frozen=True):
    """Base of all descriptions. The tag of a subclass is the name of its transport."""


class WireDescription(msgspec.Struct, frozen=True):
    """A description as it crosses the wire."""

    transport: Name
    schema: Hash  # hash of the description's struct
    body: msgspec.Raw  # msgpack


D = TypeVar("D", bound=Description)


def transport_of(description: type[Description]) -> str:
    """Return the transport's name as it is written in the config."""
    return str(description.__struct_config__.tag)


def to_wire(description: Description) -> WireDescription:
    kind = type(description)
    return WireDescription(
        transport_of(kind), schema_hash([kind]), msgspec.Raw(msgspec.msgpack.encode(description))
    )


def from_wire(wire: WireDescription, expected: type[D]) -> D:
    """Decode a description. Raises HandshakeRefused if it belongs to another transport or has another schema."""
    ours = transport_of(expected)
    if wire.transport != ours:
        raise HandshakeRefused(
            f"it takes pages by {wire.transport}, this prefill node sends by {ours}; set the same transport on both"
        )
    if wire.schema != schema_hash([expected]):
        raise HandshakeRefused(
            f"it describes its memory for {ours} in another form; run the same tandem version on both"
        )
    try:
        return msgspec.msgpack.decode(wire.body, type=expected)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise HandshakeRefused(f"its {ours} description cannot be read: {error}") from None
