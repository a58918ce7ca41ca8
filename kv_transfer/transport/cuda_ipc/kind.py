"""The record of `cuda_ipc`: one host, pools on GPUs."""

from __future__ import annotations

from typing import Annotated

import msgspec

from kv_transfer.transport.description import Description, Name
from kv_transfer.transport.one_host.process import ProcessIdentity


class CudaIpcDescription(Description, frozen=True, tag="cuda_ipc"):
    """One allocation on a GPU of the same host, and a shared memory segment for the records."""

    handle: Annotated[bytes, msgspec.Meta(min_length=64, max_length=64)]  # cudaIpcMemHandle_t of the pool
    device: Name  # UUID of its GPU: ordinals differ between processes
    records: Name  # name in /dev/shm
    owner: ProcessIdentity
