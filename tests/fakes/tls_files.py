"""Certificates for tests: one authority, a server (localhost, 127.0.0.1, ::1) and a client, valid for a century."""

from __future__ import annotations

import shutil
from pathlib import Path

PLACE = Path(__file__).parent / "tls"
AUTHORITY = PLACE / "ca.pem"


def copy_certificates(directory: Path, name: str = "server") -> tuple[Path, Path]:
    """Certificate and private key, the key readable by its owner only: git does not keep that."""
    cert, key = directory / f"{name}.pem", directory / f"{name}.key"
    shutil.copyfile(PLACE / cert.name, cert)
    shutil.copyfile(PLACE / key.name, key)
    key.chmod(0o600)
    return cert, key
