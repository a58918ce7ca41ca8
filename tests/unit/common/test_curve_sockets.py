"""Keys on the links: who has one of the cluster's keys is heard, nobody else, and nothing changes for them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq
import zmq.auth

from common.errors import ConfigError
from common.ipc import Dealer, LoopbackOnly, RouterSocket, check_bind, link_security
from tests.fakes.waiting import until


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    directory = tmp_path / "keys"
    directory.mkdir(mode=0o700)
    for name in ("router", "prefill-0", "decode-0"):
        zmq.auth.create_certificates(directory, name)
    for secret in directory.glob("*.key_secret"):
        secret.chmod(0o600)
    return directory


@pytest.fixture
def contexts() -> Iterator[list[zmq.Context[zmq.Socket[bytes]]]]:
    made = [zmq.Context[zmq.Socket[bytes]]() for _ in range(2)]
    yield made
    for context in made:
        context.destroy(linger=0)


def test_a_node_with_a_key_of_the_cluster_is_heard(
    keys: Path, contexts: list[zmq.Context[zmq.Socket[bytes]]]
) -> None:
    ours, theirs = link_security(contexts[0], keys, "router"), link_security(contexts[1], keys, "prefill-0")
    try:
        server = RouterSocket(contexts[0], "tcp://127.0.0.1:*", ours)
        client = Dealer(contexts[1], server.address, b"node", "router", theirs)
        assert client.send(b"hello")
        assert until(server.drain) == [(b"node", b"hello")]
        client.close()
        server.close()
    finally:
        ours.close()
        theirs.close()


def test_a_stranger_is_not_heard(
    keys: Path, tmp_path: Path, contexts: list[zmq.Context[zmq.Socket[bytes]]]
) -> None:
    """Without a key, and with a key pair that the cluster does not know."""
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    zmq.auth.create_certificates(foreign, "prefill-0")
    (foreign / "prefill-0.key_secret").chmod(0o600)
    (foreign / "router.key").write_bytes((keys / "router.key").read_bytes())
    ours, theirs = (
        link_security(contexts[0], keys, "router"),
        link_security(contexts[1], foreign, "prefill-0"),
    )
    try:
        server = RouterSocket(contexts[0], "tcp://127.0.0.1:*", ours)
        bare = Dealer(contexts[1], server.address, b"bare", "router", LoopbackOnly())
        wrong = Dealer(contexts[1], server.address, b"wrong", "router", theirs)
        bare.send(b"x")
        wrong.send(b"x")
        time.sleep(0.3)
        assert server.drain() == []
        for socket in (bare, wrong, server):
            socket.close()
    finally:
        ours.close()
        theirs.close()


def test_missing_or_readable_keys_are_refused_by_name(
    keys: Path, contexts: list[zmq.Context[zmq.Socket[bytes]]]
) -> None:
    with pytest.raises(ConfigError, match=r"security\.keys: .*decode-9\.key_secret is missing"):
        link_security(contexts[0], keys, "decode-9")
    (keys / "decode-0.key_secret").chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        link_security(contexts[0], keys, "decode-0")


def test_addresses_off_loopback_need_keys(keys: Path, contexts: list[zmq.Context[zmq.Socket[bytes]]]) -> None:
    with pytest.raises(ConfigError, match=r"router\.control_address: .*deploy/keygen"):
        check_bind("tcp://0.0.0.0:7100", "router.control_address", LoopbackOnly())
    check_bind("tcp://127.0.0.1:7100", "router.control_address", LoopbackOnly())
    security = link_security(contexts[0], keys, "router")
    try:
        check_bind("tcp://0.0.0.0:7100", "router.control_address", security)
    finally:
        security.close()
