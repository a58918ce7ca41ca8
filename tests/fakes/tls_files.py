"""Certificates for tests, valid for a century: one authority, a server (localhost, 127.0.0.1, ::1) and a client."""

from __future__ import annotations

import shutil
from pathlib import Path

PLACE = Path(__file__).parent / "tls"
AUTHORITY = PLACE / "ca.pem"


def copy_certificates(directory: Path, name: str = "server") -> tuple[Path, Path]:
    """Copy certificate and private key; make the key readable only by its owner, because git does not keep that."""
    cert, key = directory / f"{name}.pem", directory / f"{name}.key"
    shutil.copyfile(PLACE / cert.name, cert)
    shutil.copyfile(PLACE / key.name, key)
    key.chmod(0o600)
    return cert, key
