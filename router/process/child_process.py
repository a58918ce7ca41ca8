"""Confinement and framing for the router's child processes, which parse untrusted input.

A frame is a 4-byte little-endian length followed by that many bytes of msgpack. Frames of text workers are large, so
they carry their payload next to the msgpack, which avoids copies.
"""

from __future__ import annotations

import os
import resource
from asyncio import StreamReader

import msgspec

from common.errors import ProtocolError
from common.resource_limits import lower_limit

START_SECONDS = 30.0  # until a process must report that it is ready
START_BYTES = 1 << 16  # largest message that requests a process


def confine(address_space: int, open_files: int) -> None:
    """Limit the current process: `address_space` bytes of memory, no written files, no core dumps.

    Limits that are lower already stay.
    """
    # Ctrl-C in the terminal ends only the router, which then ends this process.
    os.setpgrp()
    for limit, value in (
        (resource.RLIMIT_AS, address_space),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NOFILE, open_files),
    ):
        lower_limit(limit, value)


def framed(message: msgspec.Struct) -> bytes:
    content = msgspec.msgpack.encode(message)
    return len(content).to_bytes(4, "little") + content


def frame_head(head: msgspec.Struct, payload_bytes: int) -> bytes:
    """Return everything of a frame that precedes its payload."""
    content = msgspec.msgpack.encode(head)
    return len(content).to_bytes(4, "little") + payload_bytes.to_bytes(4, "little") + content


async def read_frame(reader: StreamReader, most: int) -> bytes:
    """Return the content of a frame. Raises EOFError, OSError, or ProtocolError if it has more than `most` bytes."""
    length = int.from_bytes(await reader.readexactly(4), "little")
    if length > most:
        raise ProtocolError(f"a frame has {length} bytes, the limit is {most}")
    return await reader.readexactly(length)
