"""What a decode node tells a prefill node about the way into its memory: one struct per transport."""

from __future__ import annotations

from typing import Annotated

import msgspec

from kv_transfer.transport.process import ProcessIdentity

Name = Annotated[str, msgspec.Meta(min_length=1, max_length=255)]


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


class LoopbackDescription(msgspec.Struct, frozen=True, tag="loopback"):
    """Memory of the same process."""

    incarnation: Name


TransportDescription = ShmDescription | TcpDescription | CudaIpcDescription | LoopbackDescription


def kind(description: TransportDescription) -> str:
    """The word for it in the config and in sentences."""
    return str(description.__struct_config__.tag)
