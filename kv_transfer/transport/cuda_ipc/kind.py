"""The record of the `cuda_ipc` transport: one host, pools on GPUs."""

from __future__ import annotations

from typing import Annotated

import msgspec

from common.config.transport_kind import Topology, TransportKind, TransportOptions
from kv_transfer.transport.description import Description, Name
from kv_transfer.transport.one_host.process import ProcessIdentity


class CudaIpcDescription(Description, frozen=True, tag="cuda_ipc"):
    """Describes one allocation on a GPU of the same host, and a shared memory segment for the records."""

    handle: Annotated[bytes, msgspec.Meta(min_length=64, max_length=64)]  # cudaIpcMemHandle_t of the pool
    device: Name  # UUID of its GPU: ordinals differ between processes
    records: Name  # name in /dev/shm
    owner: ProcessIdentity


def _refusal(topology: Topology) -> str:
    if not topology.gpu:
        return "cuda_ipc moves pages between GPUs, and these nodes are on the CPU"
    return "" if topology.one_host else "cuda_ipc connects GPUs of one host"


KIND = TransportKind(
    name="cuda_ipc",
    refusal=_refusal,
    options=TransportOptions,
    sender="kv_transfer.transport.cuda_ipc.sender:make_sender",
    receiver="kv_transfer.transport.cuda_ipc.receiver:make_receiver",
    layers=True,
)
