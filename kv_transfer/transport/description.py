"""What a decode node tells a prefill node about the way into its memory: one struct per transport."""

from __future__ import annotations

from typing import Annotated

import msgspec

from kv_transfer.transport.one_host.process import ProcessIdentity

MAX_METADATA_BYTES = 256 << 10  # a NIXL agent's: addresses of its network devices and keys of two regions

Name = Annotated[str, msgspec.Meta(min_length=1, max_length=255)]
Address = Annotated[int, msgspec.Meta(ge=1, le=(1 << 63) - 1)]


class ShmDescription(msgspec.Struct, frozen=True, tag="shm"):
    """Two POSIX shared memory segments on the same host."""

    kv: Name  # names in /dev/shm
    records: Name
    owner: ProcessIdentity


class TcpDescription(msgspec.Struct, frozen=True, tag="tcp"):
    """A listening socket. The key is for one peer and proves, by HMAC over a nonce, who connects."""

    host: Name
    port: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    key: Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]


class CudaIpcDescription(msgspec.Struct, frozen=True, tag="cuda_ipc"):
    """One allocation on a GPU of the same host, and a shared memory segment for the records."""

    handle: Annotated[bytes, msgspec.Meta(min_length=64, max_length=64)]  # cudaIpcMemHandle_t of the pool
    device: Name  # UUID of its GPU: ordinals differ between processes
    records: Name  # name in /dev/shm
    owner: ProcessIdentity


class NixlDescription(msgspec.Struct, frozen=True, tag="nixl"):
    """Memory registered with a NIXL agent that bears the node's incarnation; addresses mean something to it alone."""

    metadata: Annotated[bytes, msgspec.Meta(min_length=1, max_length=MAX_METADATA_BYTES)]
    kv: Address
    device: Annotated[int, msgspec.Meta(ge=-1, le=1023)]  # CUDA ordinal of the pool; -1: host memory
    records: Address
    lifeline: TcpDescription


class LoopbackDescription(msgspec.Struct, frozen=True, tag="loopback"):
    """Memory of the same process."""

    incarnation: Name


TransportDescription = (
    ShmDescription | TcpDescription | CudaIpcDescription | NixlDescription | LoopbackDescription
)


def kind(description: TransportDescription) -> str:
    """The word for it in the config and in sentences."""
    return str(description.__struct_config__.tag)
