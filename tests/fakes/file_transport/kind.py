"""A transport for tests, added by this record only: pools are plain files, and a write is a pwrite."""

from __future__ import annotations

from common.config.transport_kind import Topology, TransportKind, TransportOptions
from kv_transfer.transport.description import Description, Name
from kv_transfer.transport.one_host.process import ProcessIdentity


class FileDescription(Description, frozen=True, tag="files"):
    """Two files on the same host."""

    kv: Name
    records: Name
    owner: ProcessIdentity


class FileOptions(TransportOptions, frozen=True, kw_only=True):
    """The keys of `transfer` that this transport reads."""

    file_directory: str = "/tmp"  # where decode nodes create their files


def _refusal(topology: Topology) -> str:
    return "files moves pages in host memory, and these nodes are on GPUs" if topology.gpu else ""


KIND = TransportKind(
    name="files",
    refusal=_refusal,
    options=FileOptions,
    sender="tests.fakes.file_transport.sender:make_sender",
    receiver="tests.fakes.file_transport.receiver:make_receiver",
    layers=True,
)
