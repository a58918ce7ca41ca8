"""A handoff record survives a round trip or is refused with its cause; damage raises no other exception."""

from __future__ import annotations

import struct

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import RecordError
from kv_transfer import handoff_record as hr
from kv_transfer.handoff_record import HandoffRecord

SLOT = 4096
f = st.floats(allow_nan=False)
u63 = st.integers(0, 2**63 - 1)


@st.composite
def records(draw: st.DrawFn) -> HandoffRecord:
    topk = draw(st.integers(0, 8))
    hidden = draw(st.binary(max_size=64))
    return HandoffRecord(
        first_token=draw(u63),
        num_tokens=draw(u63),
        cached_tokens=draw(u63),
        checksums=hr.pack_checksums(draw(st.lists(st.integers(0, 2**64 - 1), max_size=10))),
        draft_topk_probs=tuple(draw(st.lists(f, min_size=topk, max_size=topk))),
        draft_topk_ids=tuple(draw(st.lists(u63, min_size=topk, max_size=topk))),
        draft_hidden=hidden,
        draft_hidden_dtype="bfloat16" if hidden else "",
    )


@given(records(), u63, u63)
def test_a_record_survives_a_round_trip_in_a_larger_slot(
    record: HandoffRecord, room: int, generation: int
) -> None:
    data = hr.encode(record, room, generation, SLOT)
    assert hr.decode(data, room, generation) == record
    assert hr.decode(data.ljust(SLOT, b"\xff"), room, generation) == record
    assert hr.pack_checksums(hr.unpack_checksums(record.checksums)) == record.checksums
    assert hr.encode(record, room, generation, len(data)) == data, "a slot without a byte to spare"
    with pytest.raises(RecordError, match=f"has {len(data)} bytes, its slot {len(data) - 1};"):
        hr.encode(record, room, generation, len(data) - 1)


@given(records(), st.data())
def test_any_damage_is_a_record_error(record: HandoffRecord, data: st.DataObject) -> None:
    good = hr.encode(record, 5, 6, SLOT)
    bad = bytearray(good)
    at = data.draw(st.integers(0, len(good) - 1))
    bad[at] ^= data.draw(st.integers(1, 255))
    with pytest.raises(RecordError):
        hr.decode(bytes(bad), 5, 6)
    with pytest.raises(RecordError):
        hr.decode(good[: data.draw(st.integers(0, len(good) - 1))], 5, 6)


@given(st.binary(max_size=300))
def test_noise_is_a_record_error(noise: bytes) -> None:
    with pytest.raises(RecordError):
        hr.decode(noise, 1, 1)


@pytest.mark.parametrize(
    ("offset", "fmt", "value", "cause"),
    [
        (0, "<8s", b"NOTMAGIC", "magic"),
        (8, "<I", 99, "version"),
        (12, "<I", 1 << 20, "length"),
        (16, "<Q", 6, "room"),
        (24, "<Q", 6, "generation"),
        (32, "<Q", 6, "crc"),
        (-8, "<Q", 6, "trailer"),
    ],
)
def test_each_damage_has_its_cause(offset: int, fmt: str, value: object, cause: str) -> None:
    data = bytearray(hr.encode(HandoffRecord(first_token=1, num_tokens=2), 3, 4, SLOT))
    struct.pack_into(fmt, data, offset % len(data), value)
    with pytest.raises(RecordError) as caught:
        hr.decode(bytes(data), 3, 4)
    assert caught.value.cause == cause


def test_a_payload_of_another_shape_is_refused_even_with_a_right_hash() -> None:
    payload = msgspec.msgpack.encode(["text", None])
    header = hr._HEADER.pack(hr.MAGIC, hr.VERSION, len(payload), 3, 4)
    data = header + hr._HASH.pack(hr._digest(header, payload)) + payload + hr._TRAILER.pack(4)
    with pytest.raises(RecordError) as caught:
        hr.decode(data, 3, 4)
    assert caught.value.cause == "payload"


def test_too_large_is_refused_at_encode_and_record_bytes_is_enough() -> None:
    hidden = bytes(5000)
    big = HandoffRecord(
        first_token=2**63 - 1,
        num_tokens=2**63 - 1,
        cached_tokens=2**63 - 1,
        checksums=bytes(8 * 300),
        draft_topk_probs=(0.3,) * 16,
        draft_topk_ids=(2**62,) * 16,
        draft_hidden=hidden,
        draft_hidden_dtype="bfloat16",
    )
    enough = hr.record_bytes(300, 16, len(hidden))
    assert enough % hr.SLOT_ALIGN == 0
    assert len(hr.encode(big, 2**63 - 1, 2**63 - 1, enough)) <= enough
    with pytest.raises(RecordError, match="raise record_bytes") as caught:
        hr.encode(big, 1, 1, 4096)
    assert caught.value.cause == "length"


def test_a_record_must_agree_with_itself() -> None:
    with pytest.raises(ValueError, match="draft probabilities"):
        HandoffRecord(first_token=1, num_tokens=1, draft_topk_probs=(0.1,))
    with pytest.raises(ValueError, match="come together"):
        HandoffRecord(first_token=1, num_tokens=1, draft_hidden=b"ab")
    with pytest.raises(ValueError, match="not a multiple of 8"):
        HandoffRecord(first_token=1, num_tokens=1, checksums=b"abc")
