"""The record of `nixl`: any hosts, pools on CPUs or on GPUs."""

from __future__ import annotations

from typing import Annotated

import msgspec

from kv_transfer.transport.description import Address, Description
from kv_transfer.transport.tcp.kind import TcpDescription

MAX_METADATA_BYTES = 256 << 10  # a NIXL agent's: addresses of its network devices and keys of two regions


class NixlDescription(Description, frozen=True, tag="nixl"):
    """Memory registered with a NIXL agent that bears the node's incarnation; addresses mean something to it alone."""

    metadata: Annotated[bytes, msgspec.Meta(min_length=1, max_length=MAX_METADATA_BYTES)]
    kv: Address
    device: Annotated[int, msgspec.Meta(ge=-1, le=1023)]  # CUDA ordinal of the pool; -1: host memory
    records: Address
    lifeline: TcpDescription
