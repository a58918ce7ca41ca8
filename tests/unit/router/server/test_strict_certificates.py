"""The certificates of the tests are taken by clients that check them strictly, as those of Python 3.13 and later do."""

from __future__ import annotations

import ssl
from pathlib import Path

from tests.fakes.tls_files import AUTHORITY, copy_certificates


def test_a_strict_client_trusts_the_server(tmp_path: Path) -> None:
    client = ssl.create_default_context(cafile=str(AUTHORITY))
    client.verify_flags |= ssl.VERIFY_X509_STRICT
    server = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(AUTHORITY))
    server.verify_flags |= ssl.VERIFY_X509_STRICT
    server.verify_mode = ssl.CERT_REQUIRED
    server.load_cert_chain(*copy_certificates(tmp_path))
    client.load_cert_chain(*copy_certificates(tmp_path, "client"))
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [
        client.wrap_bio(to_client, to_server, server_hostname="localhost"),
        server.wrap_bio(to_server, to_client, server_side=True),
    ]
    # Both ends read in each turn what the other one has written; a handshake that fails raises.
    assert any(all([_shaken(each) for each in ends]) for _ in range(10))
    assert ends[0].version() == ends[1].version() == "TLSv1.3"
    assert b"client" in (ends[1].getpeercert(binary_form=True) or b"")


def _shaken(end: ssl.SSLObject) -> bool:
    try:
        end.do_handshake()
    except ssl.SSLWantReadError:
        return False
    return True
