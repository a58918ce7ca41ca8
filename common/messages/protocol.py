"""The version of the control protocol: nodes name theirs in Register, routers in Registered.

A process refuses a peer of another version with a sentence that both log. A first message of another version may have
other fields, so its version is also read from frames that cannot be decoded. Three things therefore never change: these
two messages are msgpack maps with "type" and "protocol_version", and so is Rejected with "reason".
"""

from __future__ import annotations

from typing import Final

import msgspec

# Raise it with every change of a message in this folder, which a test compares with the fields, and of frames.
CONTROL_PROTOCOL_VERSION: Final = 30
UNVERSIONED: Final = 0  # the version of peers whose messages have none


class _FirstMessage(msgspec.Struct, frozen=True):
    """The fields of the first message of every version."""

    type: str
    protocol_version: int = UNVERSIONED


_first = msgspec.msgpack.Decoder(_FirstMessage)


def version_mismatch(peer: str, version: int) -> str | None:
    """Return the sentence that refuses `peer`, or None if it speaks the version of this process."""
    if version == CONTROL_PROTOCOL_VERSION:
        return None
    theirs = f"version {version}" if version != UNVERSIONED else "a version from before version 1"
    return (
        f"{peer} speaks {theirs} of the control protocol, this process speaks version {CONTROL_PROTOCOL_VERSION}: "
        "run the same version of tandem on the router and every node"
    )


def undecodable_version(frame: bytes | memoryview, first: str, peer: str) -> str | None:
    """Return the sentence that refuses `peer` if `frame` is its first message and has another version.

    Args:
        frame: a message that could not be decoded.
        first: tag of the first message that `peer` sends.
    """
    try:
        message = _first.decode(frame)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, OverflowError):
        return None
    return version_mismatch(peer, message.protocol_version) if message.type == first else None
