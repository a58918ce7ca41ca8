"""KV events as vLLM writes them: frames that vLLM 0.26.0 has published, compared byte for byte."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from common.errors import ProtocolError
from common.kv_events import wire
from common.kv_events.wire import (
    CPU,
    END,
    GPU,
    AllBlocksCleared,
    Batch,
    BlockRemoved,
    BlockStored,
    decode,
    encode,
    sequence_of,
)

RECORDED: dict[str, Any] = json.loads((Path(__file__).parent / "vllm_frames.json").read_text())
H1, H2, H3 = 0x0123456789ABCDEF, 0xFEDCBA9876543210, 7
WIDE = bytes(range(32))


def stored(
    hashes: list[int], parent: int | None, tokens: list[int], size: int, medium: str = GPU
) -> BlockStored:
    return BlockStored(hashes, parent, tokens, size, None, medium, None)


# The batches that were given to vLLM's publisher.
BATCHES = {
    "stored": Batch(1.5, [stored([H1, H2], None, list(range(8)), 4)], 0),
    "stored_child": Batch(2.25, [stored([H3], H2, [300, 70000, 2, 2**31 - 1], 4)], 0),
    "stored_cpu_without_tokens": Batch(3.0, [stored([H1], None, [], 64, CPU)], 0),
    "removed": Batch(4.0, [BlockRemoved([H3, H2], GPU), BlockRemoved([H1], CPU)], 0),
    "cleared": Batch(5.0, [AllBlocksCleared()], 0),
}


def frames_of(name: str) -> list[bytes]:
    return [bytes.fromhex(each) for each in RECORDED["published"][name]]


@pytest.mark.parametrize("name", BATCHES)
def test_batches_are_written_as_vllm_writes_them(name: str) -> None:
    assert encode(BATCHES[name]) == frames_of(name)[2]


@pytest.mark.parametrize("name", BATCHES)
def test_batches_of_vllm_are_read(name: str) -> None:
    assert decode(frames_of(name)[2], tokens=True) == BATCHES[name]


@pytest.mark.parametrize("name", BATCHES)
def test_batches_of_a_newer_vllm_are_read(name: str) -> None:
    """It has further fields, and so many that its maps have another header."""
    assert decode(bytes.fromhex(RECORDED["newer"]["payloads"][name]), tokens=True) == BATCHES[name]


def test_further_fields_of_vllm_are_ignored() -> None:
    assert decode(frames_of("all_fields")[2], tokens=True) == Batch(
        6.0, [BlockStored([H1], None, [1, 2], 2, 3, GPU, "sql"), BlockRemoved([H1], GPU)], 0
    )


def test_hashes_of_more_bytes_count_by_their_low_64_bits() -> None:
    low = int.from_bytes(WIDE[-8:], "big")
    assert decode(frames_of("bytes_hashes")[2], tokens=True).events == [
        stored([low], None, [1, 2], 2),
        BlockRemoved([low], GPU),
    ]


def test_events_may_be_arrays_as_older_versions_write_them() -> None:
    older = [
        2.0,
        [["BlockStored", [-1, WIDE], 5, [1, 2], 1, None], ["BlockRemoved", [3]], ["AllBlocksCleared"]],
    ]
    assert decode(msgspec.msgpack.encode(older), tokens=True) == Batch(
        2.0,
        [
            BlockStored([2**64 - 1, int.from_bytes(WIDE[-8:], "big")], 5, [1, 2], 1, None, None, None),
            BlockRemoved([3], None),
            AllBlocksCleared(),
        ],
    )


@pytest.mark.parametrize(
    "sent",
    [
        7,
        [1.0],
        ["now", []],
        [1.0, [{"type": "BlockStored", "block_hashes": ["x"]}]],
        [1.0, [{"type": "BlockMoved"}]],
        [1.0, [["BlockRemoved", 3]]],
        [1.0, [None]],
        [
            1.0,
            [
                {
                    "type": "BlockStored",
                    "block_hashes": [],
                    "parent_block_hash": None,
                    "token_ids": [],
                    "block_size": 0,
                }
            ],
        ],
    ],
)
def test_what_is_no_batch_is_refused(sent: object) -> None:
    with pytest.raises(ProtocolError, match="not a batch of KV events"):
        decode(msgspec.msgpack.encode(sent))


def stored_with(**fields: object) -> dict[str, object]:
    least = {"type": "BlockStored", "block_hashes": [1], "parent_block_hash": None, "token_ids": []}
    return {**least, "block_size": 64, **fields}


@pytest.mark.parametrize(
    "events",
    [
        pytest.param([["BlockRemoved", []]] * (wire.MAX_EVENTS + 1), id="events"),
        pytest.param([["BlockRemoved", [1] * (wire.MAX_BLOCKS + 1)]], id="blocks of one event"),
        pytest.param([["BlockRemoved", [1] * (wire.MAX_BLOCKS // 2 + 1)]] * 2, id="blocks of two events"),
        pytest.param([stored_with(medium="G" * (wire.MAX_NAME + 1))], id="medium"),
        pytest.param([stored_with(lora_name="a" * (wire.MAX_NAME + 1))], id="name"),
        pytest.param([stored_with(parent_block_hash=bytes(65))], id="parent"),
    ],
)
def test_what_would_cost_its_reader_too_much_is_refused(events: object) -> None:
    with pytest.raises(ProtocolError, match="not a batch of KV events"):
        decode(msgspec.msgpack.encode([1.0, events]))


def test_text_that_is_no_utf_8_is_refused() -> None:
    sent = msgspec.msgpack.encode([1.0, [{"type": "BlockStored"}]]).replace(b"Stored", b"Stor\xff\xfe")
    with pytest.raises(ProtocolError, match="not a batch of KV events"):
        decode(sent)


def test_a_payload_that_is_cut_short_is_refused() -> None:
    with pytest.raises(ProtocolError, match="not a batch of KV events"):
        decode(frames_of("stored")[2][:-3])


def test_sequence_numbers_are_eight_bytes() -> None:
    published = [sequence_of(frames_of(name)[1]) for name in RECORDED["published"]]
    assert published == list(range(len(published)))
    assert [sequence_of(bytes.fromhex(each[2])) for each in RECORDED["replayed"]] == [5, 6, -1]
    assert bytes.fromhex(RECORDED["replayed"][-1][2]) == END
    with pytest.raises(ProtocolError, match="3 bytes"):
        sequence_of(b"abc")


def test_token_ids_are_read_on_request_only() -> None:
    (event,) = decode(frames_of("stored")[2]).events
    assert isinstance(event, BlockStored)
    assert not event.token_ids
