"""The record of `shm`: one host, pools on CPUs."""

from __future__ import annotations

from kv_transfer.transport.description import Description, Name
from kv_transfer.transport.one_host.process import ProcessIdentity


class ShmDescription(Description, frozen=True, tag="shm"):
    """Two POSIX shared memory segments on the same host."""

    kv: Name  # names in /dev/shm
    records: Name
    owner: ProcessIdentity
