"""Processes of the router's own that read what strangers wrote: confined, and spoken to in frames.

A frame is 4 bytes of length, little-endian, and that much msgpack. Text workers, whose frames are large, have the
payload of a frame beside its msgpack, so that nothing is copied.
"""

from __future__ import annotations

import os
import resource
from asyncio import StreamReader

import msgspec

from common.errors import ProtocolError

START_SECONDS = 30.0  # until a process says that it is ready


def confine(address_space: int, open_files: int) -> None:
    """This process, from here on: its memory in bytes, no files written, no core dumps."""
    os.setpgrp()  # a Ctrl-C in the terminal ends the router, which ends this one
    for limit, value in (
        (resource.RLIMIT_AS, address_space),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NOFILE, open_files),
    ):
        resource.setrlimit(limit, (value, value))


def framed(message: msgspec.Struct) -> bytes:
    content = msgspec.msgpack.encode(message)
    return len(content).to_bytes(4, "little") + content


def frame_head(head: msgspec.Struct, payload_bytes: int) -> bytes:
    """What a frame begins with: all of it but the payload."""
    content = msgspec.msgpack.encode(head)
    return len(content).to_bytes(4, "little") + payload_bytes.to_bytes(4, "little") + content


async def read_frame(reader: StreamReader, most: int) -> bytes:
    """Its content. Raises EOFError, OSError, or ProtocolError for one of more than `most` bytes."""
    length = int.from_bytes(await reader.readexactly(4), "little")
    if length > most:
        raise ProtocolError(f"a frame of {length} bytes, at most {most} are taken")
    return await reader.readexactly(length)
