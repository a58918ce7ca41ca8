"""The catalog of real clients and its scripts belong together."""

from __future__ import annotations

from tests.clients.catalog import CLIENTS
from tests.cluster.harness import ROOT


def test_every_script_drives_one_client() -> None:
    folder = ROOT / "tests" / "clients"
    files = [
        *folder.glob("python/*.py"),
        *folder.glob("programs/*.py"),
        *folder.glob("javascript/*.mjs"),
    ]
    shared = {"__init__", "features", "command", "routers"}
    scripts = {str(file.relative_to(folder)) for file in files if file.stem not in shared}
    assert scripts == {client.script for client in CLIENTS}
    names = [client.name for client in CLIENTS]
    assert len(set(names)) == len(names)
