"""The record of the `shm` transport: one host, pools on CPUs."""

from __future__ import annotations

from common.config.transport_kind import Topology, TransportKind, TransportOptions
from kv_transfer.transport.description import Description, Name
from kv_transfer.transport.one_host.process import ProcessIdentity


class ShmDescription(Description, frozen=True, tag="shm"):
    """Describes two POSIX shared memory segments on the same host."""

    kv: Name  # names in /dev/shm
    records: Name
    owner: ProcessIdentity


def _refusal(topology: Topology) -> str:
    if topology.gpu:
        return "shm moves pages in host memory, and these nodes are on GPUs"
    return "" if topology.one_host else "shm connects processes of one host"


KIND = TransportKind(
    name="shm",
    refusal=_refusal,
    options=TransportOptions,
    sender="kv_transfer.transport.shm.sender:make_sender",
    receiver="kv_transfer.transport.shm.receiver:make_receiver",
    layers=True,
)
