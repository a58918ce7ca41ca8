"""The table of transports: each row is a record, and only the chosen transport is imported."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from common.config import transports
from common.config.cluster_schema import cluster_schema
from common.config.schema import Model
from common.config.transport_kind import Topology, TransportKind, TransportOptions
from common.config.transports import TRANSPORTS, transport_kind, transport_kinds
from common.named import named
from kv_transfer.transport.base import ReceiverEndpoint, SenderEndpoint
from kv_transfer.transport.description import transport_of
from kv_transfer.transport.layers import LayerEndpoint

ROOT = Path(__file__).parents[3]
EVERYWHERE = [Topology(gpu, one_host) for gpu in (False, True) for one_host in (False, True)]


@pytest.mark.parametrize("name", TRANSPORTS)
def test_rows_endpoints_and_records_agree(name: str) -> None:
    kind = transport_kind(name)
    assert kind.name == name
    sender, receiver = (
        named(function).__annotations__["return"] for function in (kind.sender, kind.receiver)
    )
    sending = named(f"{kind.sender.partition(':')[0]}:{sender}")
    receiving = named(f"{kind.receiver.partition(':')[0]}:{receiver}")
    assert issubclass(sending, SenderEndpoint)
    assert issubclass(receiving, ReceiverEndpoint)
    assert transport_of(sending.takes) == name
    assert issubclass(sending, LayerEndpoint) == kind.layers


def test_auto_finds_a_transport_for_every_topology() -> None:
    first = {
        (topology.gpu, topology.one_host): next(
            kind.name for kind in transport_kinds() if not kind.refusal(topology)
        )
        for topology in EVERYWHERE
    }
    assert first == {
        (False, True): "shm",
        (False, False): "tcp",
        (True, True): "cuda_ipc",
        (True, False): "nixl",
    }


def test_a_key_that_two_transports_read_is_declared_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """For example `transfer.max_inflight_mib` of tcp and nixl."""
    transfer = cluster_schema()(model=Model(path="m")).transfer
    assert [transport_kind(name).read(transfer).max_inflight_mib for name in ("tcp", "nixl")] == [64, 64]

    class Clashing(TransportOptions, frozen=True, kw_only=True):
        max_inflight_mib: str = "64"

    clash = TransportKind(name="clash", refusal=lambda _: "", options=Clashing, sender="", receiver="")
    monkeypatch.setattr(sys.modules[__name__], "CLASH", clash, raising=False)
    monkeypatch.setitem(transports.TRANSPORTS, "clash", f"{__name__}:CLASH")
    with pytest.raises(TypeError, match=r"declare transfer\.max_inflight_mib in different ways"):
        cluster_schema()


def test_a_section_made_without_the_loader_has_the_defaults() -> None:
    section = cluster_schema().__base__.__struct_defaults__  # type: ignore[union-attr]
    transfer = next(each for each in section if type(each).__name__ == "Transfer")
    assert "nixl_devices" not in transfer.__struct_fields__
    assert transport_kind("nixl").read(transfer).nixl_devices == "lo"
    with pytest.raises(msgspec.ValidationError, match="unknown field"):
        msgspec.convert({"nixl_devices": "lo"}, type(transfer))


@pytest.mark.parametrize(
    ("call", "imported"),
    [
        ("common.config.cluster_schema:cluster_schema", set()),
        ("kv_transfer.transport.tcp.sender:make_sender", {"tcp.sender"}),
        ("kv_transfer.transport.shm.receiver:make_receiver", {"shm.receiver"}),
    ],
)
def test_only_what_is_chosen_is_imported(call: str, imported: set[str]) -> None:
    """The schema needs all records, which import neither torch nor an endpoint."""
    code = (
        "import sys; from common.named import named\n"
        f"function = named({call!r})\n"
        "if function.__name__ == 'cluster_schema': function()\n"
        "print([name for name in sys.modules if name.endswith(('.sender', '.receiver')) or name == 'torch'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str([f"kv_transfer.transport.{each}" for each in imported])
