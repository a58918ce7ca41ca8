"""The messages of vLLM's KV events: three frames, topic | sequence number | batch.

`encode` writes what vLLM 0.26 and SGLang 0.5 write, byte for byte: a batch is an array [ts, events, rank], an event a
map with its `type`, and fields that have their default are left out; vLLM 0.33 writes
longer map headers. `decode` also reads events as older versions of vLLM write them, as arrays, and batches and events
with further fields.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any, TypeAlias

import msgspec
from msgspec import Meta

from common.errors import ProtocolError

SEQUENCE_BYTES = 8
MASK = (1 << 64) - 1  # a hash of more bytes counts by its low 64 bits
END = (-1).to_bytes(SEQUENCE_BYTES, "big", signed=True)  # the sequence number of the last message of a replay
# Asks the replay socket for the present state instead of past batches. To another publisher this is a sequence number
# that it has not reached, so it answers with END only.
SNAPSHOT = (1 << 63) - 1
# What is read of one batch at most, so that a publisher can cost its reader only so much time and memory.
MAX_EVENTS = 1 << 16
MAX_BLOCKS = 1 << 18
MAX_NAME = 1024  # characters
GPU, CPU = "GPU", "CPU"

BlockHash: TypeAlias = int | bytes


class BlockStored(msgspec.Struct, frozen=True, omit_defaults=True, tag_field="type", tag="BlockStored"):
    """Blocks can be used from now on. Each is the parent of the next one."""

    block_hashes: Sequence[BlockHash]
    parent_block_hash: BlockHash | None  # of the first one; None: it begins a prompt
    token_ids: Sequence[int]  # of all blocks; empty if they are not published
    block_size: int  # tokens of one block
    lora_id: int | None
    medium: str | None  # GPU, CPU, FS or OBJ
    lora_name: str | None


class BlockRemoved(msgspec.Struct, frozen=True, omit_defaults=True, tag_field="type", tag="BlockRemoved"):
    """Blocks are gone from one medium."""

    block_hashes: Sequence[BlockHash]
    medium: str | None


class AllBlocksCleared(
    msgspec.Struct, frozen=True, omit_defaults=True, tag_field="type", tag="AllBlocksCleared"
):
    """No block is left on any medium."""


Event: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared


class Batch(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """The events of one message, in order."""

    ts: float  # Unix seconds
    events: Sequence[Event]
    data_parallel_rank: int | None = None


# What is read of others: fields that some version lacks have a default, and hashes may be signed or wide.
_Hash = int | Annotated[bytes, Meta(max_length=64)]
_Hashes = Annotated[list[_Hash], Meta(max_length=MAX_BLOCKS)]
_Name = Annotated[str, Meta(max_length=MAX_NAME)]


class _StoredFields(msgspec.Struct, frozen=True):
    block_hashes: _Hashes
    parent_block_hash: _Hash | None
    token_ids: msgspec.Raw
    block_size: Annotated[int, Meta(ge=1)]
    lora_id: int | None = None
    medium: _Name | None = None
    lora_name: _Name | None = None


class _RemovedFields(msgspec.Struct, frozen=True):
    block_hashes: _Hashes
    medium: _Name | None = None


class _Stored(_StoredFields, frozen=True, tag_field="type", tag="BlockStored"):
    pass


class _Removed(_RemovedFields, frozen=True, tag_field="type", tag="BlockRemoved"):
    pass


class _Cleared(msgspec.Struct, frozen=True, tag_field="type", tag="AllBlocksCleared"):
    pass


class _StoredArray(_StoredFields, frozen=True, array_like=True, tag="BlockStored"):
    pass


class _RemovedArray(_RemovedFields, frozen=True, array_like=True, tag="BlockRemoved"):
    pass


class _ClearedArray(msgspec.Struct, frozen=True, array_like=True, tag="AllBlocksCleared"):
    pass


class _RawBatch(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    ts: float
    events: list[msgspec.Raw]
    data_parallel_rank: int | None = None


_encoder = msgspec.msgpack.Encoder()
_batches = msgspec.msgpack.Decoder(_RawBatch)
_maps = msgspec.msgpack.Decoder(_Stored | _Removed | _Cleared)
_ids = msgspec.msgpack.Decoder(list[int])
_arrays = msgspec.msgpack.Decoder(_StoredArray | _RemovedArray | _ClearedArray)


def encode(batch: Batch, pause: Callable[[], None] = lambda: None) -> bytes:
    """Return the third frame of a message. `pause` is called after each event, so that other threads can run."""
    events: list[msgspec.Raw] = []
    for event in batch.events:
        events.append(msgspec.Raw(_encoder.encode(event)))
        pause()
    return _encoder.encode(_RawBatch(batch.ts, events, batch.data_parallel_rank))


def decode(payload: bytes, tokens: bool = False) -> Batch:
    """Read the third frame of a message; hashes become integers of 64 bits. Raises ProtocolError.

    Args:
        tokens: whether token ids are read too, which takes longer than all else.
    """
    try:
        read = _batches.decode(payload)
        events = _events(read.events, tokens)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, OverflowError) as error:
        raise ProtocolError(f"not a batch of KV events: {error}") from error
    return Batch(read.ts, events, read.data_parallel_rank)


def sequence_of(frame: bytes) -> int:
    """Return the sequence number in a message's second frame; -1 at the end of a replay. Raises ProtocolError."""
    if len(frame) != SEQUENCE_BYTES:
        raise ProtocolError(f"a sequence number of {len(frame)} bytes, not {SEQUENCE_BYTES}")
    return int.from_bytes(frame, "big", signed=True)


def hash_of(value: BlockHash) -> int:
    """Return a hash as an unsigned integer of 64 bits: of bytes the last eight."""
    number = value if isinstance(value, int) else int.from_bytes(value, "big")
    return number & MASK


def _events(raw: Sequence[msgspec.Raw], tokens: bool) -> list[Event]:
    if len(raw) > MAX_EVENTS:
        raise msgspec.ValidationError(f"{len(raw)} events are more than {MAX_EVENTS}")
    events, left = list[Event](), MAX_BLOCKS
    for each in raw:
        event = _event(each, tokens)
        events.append(event)
        if not isinstance(event, AllBlocksCleared):
            left -= len(event.block_hashes)
            if left < 0:
                raise msgspec.ValidationError(f"its events have more than {MAX_BLOCKS} blocks")
    return events


def _event(raw: msgspec.Raw, tokens: bool) -> Event:
    first = bytes(memoryview(raw)[:1])
    is_map = first >= b"\xde" or b"\x80" <= first < b"\x90"
    read: Any = (_maps if is_map else _arrays).decode(raw)
    if isinstance(read, _StoredFields):
        parent = read.parent_block_hash
        return BlockStored(
            [hash_of(each) for each in read.block_hashes],
            None if parent is None else hash_of(parent),
            _ids.decode(read.token_ids) if tokens else (),
            read.block_size,
            read.lora_id,
            read.medium,
            read.lora_name,
        )
    if isinstance(read, _RemovedFields):
        return BlockRemoved([hash_of(each) for each in read.block_hashes], read.medium)
    return AllBlocksCleared()
