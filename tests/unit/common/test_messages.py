"""The control inboxes: round trips, and decoders that raise nothing but ProtocolError."""

from __future__ import annotations

import contextlib
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import ProtocolError
from common.ipc.channel import MAX_MESSAGE_BYTES
from common.messages import decode_inbox, prefill_inbox, router_inbox
from common.messages.generation import (
    MAX_LOGPROB_IDS,
    OutputToken,
    PromptLogprob,
    SamplingParams,
    TokenLogprob,
)
from common.messages.identity import (
    MAX_ROOM,
    GraphReport,
    NodeCounters,
    NodeLoad,
    NodeRef,
    new_incarnation,
    new_room,
)
from common.messages.node_inbox import (
    Abort,
    ChangeRole,
    FlushCache,
    HeartbeatAck,
    PeerDraining,
    PeerLost,
    Profile,
    Registered,
    Rejected,
)
from common.messages.router_inbox import TokenRun, Tokens
from common.messages.wire import InboxCodec, encode

SAMPLING = SamplingParams(
    max_tokens=4,
    temperature=0.5,
    top_p=0.9,
    top_k=5,
    min_p=0.1,
    repetition_penalty=1.5,
    presence_penalty=-2.0,
    frequency_penalty=2.0,
    logit_bias=((5, -100.0), (6, 1.5)),
    min_tokens=3,
    seed=2**63 - 1,
    stop_token_ids=(1, 2),
)
TOKEN = OutputToken(7, TokenLogprob(-0.5, (7, 8), (-0.5, -1.5)))
NODE = NodeRef(name="prefill-0", role="prefill", incarnation="a" * 32, peer_address="ipc:///run/p.sock")

FOR_NODES = [
    Registered(router_incarnation="r"),
    Rejected(reason="no"),
    HeartbeatAck(router_incarnation="r", sequence=3, known=False),
    Abort(room=1, reason="gone"),
    PeerLost(incarnation="a"),
    PeerDraining(incarnation="a"),
    FlushCache(),
    ChangeRole(order="o", router="router", role="prefill", seconds=30.0),
    Profile(order="o", seconds=2.5, steps=30),
]
FOR_PREFILL = prefill_inbox.Prefill(
    room=MAX_ROOM,
    request_id="q",
    token_ids=[1, 2, 3],
    emitted=1,
    sampling=SAMPLING,
    decode="d",
    deadline_ms=500,
)
FOR_DECODE = decode_inbox.Reserve(
    room=5, request_id="q", token_ids=[], emitted=0, sampling=SAMPLING, prefill=NODE, deadline_ms=500
)
FOR_ROUTER = [
    router_inbox.Register(
        node=NODE,
        host="h",
        pid=7,
        model_fingerprint="f",
        max_model_len=2048,
        page_size=16,
        total_pages=100,
        effective_config={"device": "cpu", "pool_bytes": 2**40, "share": 0.5, "graphs": False, "tp": None},
        graphs=(
            GraphReport(
                phase="decode",
                model="target",
                backend="full",
                hidden_mode="NULL",
                shapes=(1, 8),
                failed={"8 greedy": "CaptureError: why"},
                reasons=("enforced",),
            ),
        ),
    ),
    router_inbox.Heartbeat(
        as_of=1.7e9,
        incarnation="a",
        sequence=2**40,
        state="draining",
        loop_age_ms=0,
        load=NodeLoad(queued=1, free_pages=2),
        counters=NodeCounters(requests=3, avg_spec_accept_length=2.5),
    ),
    router_inbox.PromptScores(
        room=5, start=1, tokens=[PromptLogprob(-0.5, 3, (7, 8), (-0.1, -0.2), (-4.0,))]
    ),
    router_inbox.HiddenStates(room=5, start=3, states=b"\0" * 8),
    router_inbox.FirstToken(room=5, token=TOKEN, finish_reason=None, cached_tokens=16),
    router_inbox.PrefillDone(room=5, stages={"queued": 0.25}),
    router_inbox.Tokens(
        runs=[
            router_inbox.TokenRun(5, 1, [TOKEN, OutputToken(9)]),
            router_inbox.TokenRun(6, 0, [], "stop", {"decode_start": 1.5}, True, 2.5),
        ]
    ),
    router_inbox.Failed(room=5, code="node_lost", message="gone"),
    router_inbox.ProfileEnded(order="o", path="/run/p.gz", file_bytes=5, seconds=2.5, steps=30),
    router_inbox.ChangeAnswered(order="o", refusal="it is ending"),
    router_inbox.Goodbye(incarnation="a"),
]
INBOXES: dict[str, tuple[InboxCodec[Any], list[msgspec.Struct]]] = {
    "prefill": (prefill_inbox.codec, [*FOR_NODES, FOR_PREFILL]),
    "decode": (decode_inbox.codec, [*FOR_NODES, FOR_DECODE]),
    "router": (router_inbox.codec, FOR_ROUTER),
}
ALL = [(name, message) for name, (_, messages) in INBOXES.items() for message in messages]


def refused(codec: InboxCodec[Any], frame: bytes) -> str:
    with pytest.raises(ProtocolError) as caught:
        codec.decode(frame)
    return str(caught.value)


@pytest.mark.parametrize(
    ("inbox", "message"), ALL, ids=lambda value: str(getattr(value, "__class__", value).__name__)
)
def test_round_trip(inbox: str, message: msgspec.Struct) -> None:
    codec = INBOXES[inbox][0]
    assert codec.decode(encode(message)) == message
    assert codec.decode(memoryview(encode(message))) == message


def test_every_message_of_every_inbox_is_tested() -> None:
    unions = {
        "prefill": prefill_inbox.PrefillMessage,
        "decode": decode_inbox.DecodeMessage,
        "router": router_inbox.RouterMessage,
    }
    for name, union in unions.items():
        assert {type(message) for message in INBOXES[name][1]} == set(union.__args__)


@pytest.mark.parametrize("inbox", INBOXES)
def test_a_message_of_another_inbox_is_refused(inbox: str) -> None:
    codec, own = INBOXES[inbox]
    foreign = [message for _, message in ALL if type(message) not in {type(each) for each in own}]
    assert foreign
    for message in foreign:
        assert codec.name in refused(codec, encode(message))


def test_the_tokens_of_the_largest_step_leave_the_node() -> None:
    """A link drops what is larger than a message may be, and requests would wait for their tokens for ever."""
    top, named = 32, MAX_LOGPROB_IDS
    scores = TokenLogprob(-0.1, (2**31 - 1,) * top, (-0.1,) * top, (-0.1,) * named)
    tokens = [OutputToken(2**31 - 1, scores)] * 6
    runs = [TokenRun(MAX_ROOM - number, 2**31 - 1, tokens) for number in range(4096)]
    assert len(encode(Tokens(runs=runs))) > MAX_MESSAGE_BYTES
    messages = list(Tokens.of(runs))
    assert max(len(encode(message)) for message in messages) < MAX_MESSAGE_BYTES // 2
    assert [run for message in messages for run in message.runs] == runs
    assert list(Tokens.of(runs[:600])) == [Tokens(runs=runs[:600])]
    assert not list(Tokens.of([]))


def test_messages_cannot_be_changed() -> None:
    for _, message in ALL:
        for field in message.__struct_fields__:
            with pytest.raises(AttributeError):
                setattr(message, field, None)


@pytest.mark.parametrize("inbox", INBOXES)
@given(st.binary(max_size=200))
def test_noise_is_refused(inbox: str, frame: bytes) -> None:
    refused(INBOXES[inbox][0], frame)


@settings(max_examples=600)
@given(st.data())
def test_damaged_messages_are_refused_or_decode(data: st.DataObject) -> None:
    """Truncated, extended, flipped and spliced input gives a message or a ProtocolError, nothing else."""
    inbox, message = data.draw(st.sampled_from(ALL))
    frame = bytearray(encode(message))
    kind = data.draw(st.sampled_from(["cut", "flip", "insert", "append", "splice"]))
    at = data.draw(st.integers(0, len(frame) - 1))
    if kind == "cut":
        del frame[at:]
    elif kind == "flip":
        frame[at] ^= data.draw(st.integers(1, 255))
    elif kind == "insert":
        frame[at:at] = data.draw(st.binary(min_size=1, max_size=8))
    elif kind == "append":
        frame += data.draw(st.binary(min_size=1, max_size=8))
    else:
        other = encode(data.draw(st.sampled_from(ALL))[1])
        frame[at:] = other[data.draw(st.integers(0, len(other) - 1)) :]
    codec = INBOXES[inbox][0]
    with contextlib.suppress(ProtocolError):
        assert type(codec.decode(bytes(frame))) in {type(each) for each in INBOXES[inbox][1]}
        assert kind not in ("cut", "append")


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=5)
    | st.binary(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=400)
@given(st.data())
def test_wrongly_typed_fields_are_refused_or_decode(data: st.DataObject) -> None:
    """The input is well-formed msgpack with the right tag and an arbitrary value in one of the fields."""
    inbox, message = data.draw(st.sampled_from([each for each in ALL if each[1].__struct_fields__]))
    fields = msgspec.msgpack.decode(encode(message))
    fields[data.draw(st.sampled_from(sorted(fields)))] = data.draw(VALUES)
    with contextlib.suppress(ProtocolError):
        INBOXES[inbox][0].decode(msgspec.msgpack.encode(fields))


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"\xc1",
        b"\x80",
        b"\x81\xa4type",
        b"\x81\xa4type\xa5Drain" + b"\x00",
        b"\x81\xa4type\xa4\xff\xff\xff\xff",
        b"\x91" * 100_000,
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        b"\x81\xa4type\xdb\xff\xff\xff\xff",
        b"\x82\xa4type\xa6Failed\xa4room\xc7\x0c\xff" + b"\xff" * 12,
        b"\x81\x81\x01\x01\x02",
    ],
)
@pytest.mark.parametrize("inbox", INBOXES)
def test_chosen_bad_frames_are_refused(inbox: str, frame: bytes) -> None:
    """Excessive depth, false lengths, invalid UTF-8, impossible dates and unhashable keys are refused."""
    refused(INBOXES[inbox][0], frame)


def test_depth_inside_a_field_is_bounded() -> None:
    frame = encode(FOR_ROUTER[0])
    name = b"effective_config"
    start = frame.index(name) + len(name)
    refused(router_inbox.codec, frame[:start] + b"\x81\xa1a" + b"\x91" * 50_000 + b"\x01")


@pytest.mark.parametrize("inbox", INBOXES)
def test_a_refusal_is_short_whatever_the_peer_sent(inbox: str) -> None:
    """It is logged: a peer must not be able to write megabytes there."""
    frame = msgspec.msgpack.encode({"type": "x" * 1_000_000})
    text = refused(INBOXES[inbox][0], frame)
    assert len(text) < 500
    assert str(len(frame)) in text


@pytest.mark.parametrize("room", [0, -1, MAX_ROOM + 1, "1", 1.0, None])
def test_rooms(room: object) -> None:
    frame = msgspec.msgpack.encode({"type": "Abort", "room": room, "reason": ""})
    refused(prefill_inbox.codec, frame)
    refused(router_inbox.codec, msgspec.msgpack.encode({"type": "Tokens", "runs": [[room, 0, []]]}))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[("seed", 2**63), ("top_k", -1), ("top_k", 2**31), ("max_tokens", "9"), ("temperature", "hot")],
        *[("min_tokens", -1), ("min_tokens", 2**31), ("stop_token_ids", [2**63]), ("min_p", "x")],
        *[("logit_bias", [[1, "x"]]), ("logit_bias", [[2**63, 1.0]]), ("logit_bias", [[1]])],
        *[("logit_bias", [[n, 1.0] for n in range(1025)]), ("stop_token_ids", list(range(257)))],
    ],
)
def test_sampling_values_that_no_tensor_holds(field: str, value: object) -> None:
    """They are written into int32 and int64 rows on the device, so they are refused at the socket."""
    for codec, message in ((prefill_inbox.codec, FOR_PREFILL), (decode_inbox.codec, FOR_DECODE)):
        fields = msgspec.msgpack.decode(encode(message))
        fields["sampling"][field] = value
        refused(codec, msgspec.msgpack.encode(fields))


@pytest.mark.parametrize("token", [2**63, 2**64 - 1, "1", 1.5, None])
def test_token_ids_that_no_tensor_holds(token: object) -> None:
    for codec, message in ((prefill_inbox.codec, FOR_PREFILL), (decode_inbox.codec, FOR_DECODE)):
        fields = msgspec.msgpack.decode(encode(message))
        fields["token_ids"] = [1, token]
        refused(codec, msgspec.msgpack.encode(fields))


def test_what_a_node_reports_can_be_shown_as_json() -> None:
    """/server_info serializes it: extension types and non-string keys must be refused before."""
    fields = msgspec.msgpack.decode(encode(FOR_ROUTER[0]))
    for value in ({"x": msgspec.msgpack.Ext(5, b"")}, {"x": [1]}, {1: 2}, {"x": b"raw"}):
        refused(router_inbox.codec, msgspec.msgpack.encode({**fields, "effective_config": value}))


def test_tokens_that_are_indices_must_be_in_the_vocabulary() -> None:
    assert SAMPLING.fits(7)
    assert not SAMPLING.fits(6)
    assert not SamplingParams(max_tokens=1, min_tokens=1, stop_token_ids=(-1,)).fits(9)
    assert SamplingParams(max_tokens=1, stop_token_ids=(-1, 9)).fits(9), (
        "these ids are only compared on the host"
    )
    assert not SamplingParams(max_tokens=1, logit_bias=((-1, 1.0),)).fits(9)


def test_greedy() -> None:
    assert SamplingParams(max_tokens=1, temperature=0.0).greedy
    assert SamplingParams(max_tokens=1, temperature=1e-6).greedy
    assert not SamplingParams(max_tokens=1, temperature=1e-4).greedy


def test_identities_are_random_and_in_range() -> None:
    rooms = {new_room() for _ in range(1000)}
    assert len(rooms) == 1000
    assert all(1 <= room <= MAX_ROOM for room in rooms)
    assert len({new_incarnation() for _ in range(100)}) == 100
    assert len(new_incarnation()) == 32
