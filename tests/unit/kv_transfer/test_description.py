"""In Hello a transport describes its memory by name and raw bytes, which only its own endpoint parses."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from common.errors import HandshakeRefused
from kv_transfer.schema_hash import schema_hash
from kv_transfer.transport.base import SenderEndpoint
from kv_transfer.transport.cuda_ipc.kind import CudaIpcDescription
from kv_transfer.transport.cuda_ipc.sender import CudaIpcSender
from kv_transfer.transport.description import Description, from_wire, to_wire
from kv_transfer.transport.nixl.kind import NixlDescription
from kv_transfer.transport.nixl.sender import NixlSender
from kv_transfer.transport.one_host.process import ProcessIdentity
from kv_transfer.transport.shm.kind import ShmDescription
from kv_transfer.transport.shm.sender import ShmSender
from kv_transfer.transport.tcp.kind import TcpDescription
from kv_transfer.transport.tcp.sender import TcpSender
from tests.fakes.loopback import LoopbackDescription, LoopbackSender

PROCESS = ProcessIdentity("boot/1", 12, 345)
TCP = TcpDescription("10.0.0.1", 7, bytes(32))
EVERY: dict[type[SenderEndpoint], Description] = {
    ShmSender: ShmDescription("a", "b", PROCESS),
    CudaIpcSender: CudaIpcDescription(bytes(64), "GPU-1", "b", PROCESS),
    TcpSender: TCP,
    NixlSender: NixlDescription(b"m", 1, -1, 2, TCP),
    LoopbackSender: LoopbackDescription("d"),
}


@pytest.mark.parametrize("sender", EVERY)
def test_each_endpoint_reads_its_own_description_and_no_other(sender: type[SenderEndpoint]) -> None:
    for maker, description in EVERY.items():
        crossed = msgspec.msgpack.decode(
            msgspec.msgpack.encode(to_wire(description)), type=type(to_wire(description))
        )
        if maker is sender:
            assert from_wire(crossed, sender.takes) == description
        else:
            with pytest.raises(HandshakeRefused) as caught:
                from_wire(crossed, sender.takes)
            ours, theirs = (str(type(EVERY[each]).__struct_config__.tag) for each in (sender, maker))
            assert str(caught.value) == (
                f"it takes pages by {theirs}, this prefill node sends by {ours}; set the same transport on both"
            )


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xc1",
        b"\x80",
        b"\x91" * 100_000,
        msgspec.msgpack.encode({"type": "tcp", "host": "h", "port": 0, "key": bytes(32)}),
        msgspec.msgpack.encode({"type": "shm", "host": "h", "port": 1, "key": bytes(32)}),
        msgspec.msgpack.encode(TCP) + b"\x00",
    ],
)
def test_what_cannot_be_read_is_refused(body: bytes) -> None:
    """It is refused with an error: Hello itself was decoded without parsing the description."""
    wire = msgspec.structs.replace(to_wire(TCP), body=msgspec.Raw(body))
    with pytest.raises(HandshakeRefused, match="its tcp description cannot be read"):
        from_wire(wire, TcpDescription)


def test_another_form_of_the_same_transport_is_refused() -> None:
    other: Any = msgspec.defstruct(
        "TcpDescription", [("host", str)], bases=(Description,), frozen=True, tag="tcp"
    )
    with pytest.raises(
        HandshakeRefused, match="for tcp in another form; run the same tandem version on both"
    ):
        from_wire(to_wire(other("h")), TcpDescription)


def test_the_hash_covers_structs_inside_of_structs() -> None:
    """For example, the liveness connection of nixl is a description of tcp."""
    inner = [msgspec.defstruct("Inner", [(name, int)]) for name in ("x", "y", "x")]
    first, second, third = (schema_hash([msgspec.defstruct("Outer", [("inner", each)])]) for each in inner)
    assert first == third != second


def test_the_hash_covers_structs_without_fields() -> None:
    field = msgspec.defstruct("Outer", [("x", int)])
    assert schema_hash([field]) != schema_hash([field, msgspec.defstruct("Empty", [], tag=True)])
