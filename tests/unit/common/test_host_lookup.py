"""Names of hosts are looked up without holding up any connection, and again whenever a peer is dialled again."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from common.errors import ConfigError
from common.ipc import Dealer, RouterSocket
from common.ipc import dealer as dealer_module
from common.ipc.curve import Curve
from common.ipc.host_lookup import MAX_ADDRESSES, FixedHost, HostLookup, host_of, listening_address, resolve
from common.ipc.key_files import make_key_pairs
from kv_transfer.transport.tcp.listener import listening_socket
from tests.fakes.held_context import Context
from tests.fakes.ipv6 import needs_ipv6
from tests.fakes.keyless import Keyless
from tests.fakes.waiting import PATIENCE, until

Entry = tuple[int, int, int, str, tuple[str, int]]


class Names:
    """A DNS server whose answers the test sets; it can be slow, or down."""

    def __init__(self) -> None:
        self.addresses: list[str] = []
        self.answers = threading.Event()
        self.answers.set()
        self.asked = 0

    def getaddrinfo(self, name: str, *rest: object, **options: object) -> list[Entry]:
        self.asked += 1
        assert self.answers.wait(PATIENCE)
        if not self.addresses:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (each, 0)) for each in self.addresses]


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> Iterator[Names]:
    made = Names()
    monkeypatch.setattr(socket, "getaddrinfo", made.getaddrinfo)
    yield made
    made.answers.set()


def address(lookup: HostLookup) -> str:
    found = until(lookup.next)
    assert found is not None
    return found


@pytest.mark.parametrize(
    "given",
    [
        "tcp://10.0.0.7:5600",
        "tcp://[fd00::7]:5600",
        "tcp://localhost:5600",
        "ipc:///run/x.sock",
        "inproc://x",
    ],
)
def test_what_is_no_name_is_not_looked_up(names: Names, given: str) -> None:
    host = host_of(given)
    assert isinstance(host, FixedHost)
    assert host.next() == given
    host.ask()
    assert names.asked == 0


def test_several_addresses_take_turns(names: Names) -> None:
    names.addresses = ["10.0.0.1", "10.0.0.2", "10.0.0.1", "fd00::3"]
    lookup = host_of("tcp://tandem-router:5600")
    assert isinstance(lookup, HostLookup)
    first = address(lookup)
    following = [lookup.next() for _ in range(3)]
    assert [first, *following] == [
        "tcp://10.0.0.1:5600",
        "tcp://10.0.0.2:5600",
        "tcp://[fd00::3]:5600",
        "tcp://10.0.0.1:5600",
    ]


def test_an_address_that_is_gone_is_not_dialled_again(names: Names) -> None:
    names.addresses = ["10.0.0.1"]
    lookup = HostLookup("tandem-router", "5600")
    assert address(lookup) == "tcp://10.0.0.1:5600"
    names.addresses = ["10.0.0.9"]
    # The thread of the first lookup may not have ended yet.
    until(lambda: (lookup.ask(), lookup.next() == "tcp://10.0.0.9:5600")[1])


def test_a_dns_server_that_is_down_takes_nothing_away(names: Names) -> None:
    names.addresses = ["10.0.0.1"]
    lookup = HostLookup("tandem-router", "5600")
    assert address(lookup) == "tcp://10.0.0.1:5600"
    names.addresses = []
    asked = names.asked
    until(lambda: (lookup.ask(), names.asked >= asked + 2)[1])
    assert lookup.next() == "tcp://10.0.0.1:5600"


def test_why_there_is_no_address(names: Names) -> None:
    names.answers.clear()
    lookup = HostLookup("tandem-router", "5600")
    assert lookup.problem == "the addresses of tandem-router are not known yet"
    names.answers.set()
    until(lambda: "are not found: [Errno -2] Name or service not known" in lookup.problem)


def test_one_lookup_runs_at_a_time_and_holds_nobody_up(names: Names) -> None:
    names.answers.clear()
    lookup = HostLookup("tandem-router", "5600")
    until(lambda: names.asked)
    for _ in range(5):
        lookup.ask()
        assert lookup.next() is None
    assert names.asked == 1


def test_a_name_has_a_bounded_number_of_addresses() -> None:
    lookup = HostLookup(
        "x", "1", lambda name: [f"10.0.{number // 256}.{number % 256}" for number in range(1000)]
    )
    first = address(lookup)
    seen = {first}
    while (found := lookup.next()) not in seen:
        assert found is not None
        seen.add(found)
    assert len(seen) == MAX_ADDRESSES


@pytest.mark.parametrize("error", [OSError("no network"), UnicodeError("label too long")])
def test_a_name_that_cannot_be_asked_for_is_not_known(error: Exception) -> None:
    asked: list[str] = []

    def refuse(name: str) -> list[str]:
        asked.append(name)
        raise error

    lookup = HostLookup("x" * 300, "1", refuse)
    until(lambda: (lookup.ask(), len(asked) > 1)[1])
    assert lookup.next() is None


def test_a_lookup_for_which_there_is_no_thread_is_made_later(
    names: Names, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit of a container counts the threads of all its processes. The thread of the socket goes on."""

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    names.addresses = ["10.0.0.1"]
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        lookup = HostLookup("tandem-router", "5600")
        assert lookup.next() is None
    lookup.ask()
    assert address(lookup) == "tcp://10.0.0.1:5600"


def test_this_host_is_found() -> None:
    assert "127.0.0.1" in resolve("localhost")


def test_a_router_is_found_again_where_its_name_leads_now(
    names: Names, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The name leads nowhere at first, then to an address where nobody listens, then to the router."""
    monkeypatch.setattr(dealer_module, "REDIAL_SECONDS", 0.1)
    keys = tmp_path / "keys"
    make_key_pairs(keys, ["router", "decode-0"])
    contexts = Context(), Context()
    ours, theirs = (
        Curve(context, keys, name, ["decode-0"])
        for context, name in zip(contexts, ("router", "decode-0"), strict=True)
    )
    try:
        server = RouterSocket(contexts[0], "tcp://127.0.0.1:*", ours)
        port = server.address.rpartition(":")[2]
        dealer = Dealer(contexts[1], f"tcp://tandem-router:{port}", b"decode-0/abc", "router", theirs)
        assert dealer.dials == 0
        dealer.send(b"hello")

        def heard() -> list[tuple[bytes, bytes]]:
            dealer.drain()
            return server.drain()

        until(lambda: (dealer.drain(), names.asked >= 2)[1])
        names.addresses = ["127.0.0.99"]
        until(lambda: (dealer.drain(), dealer.dials >= 2)[1])
        assert dealer.trouble() == "nobody accepts a connection there"
        assert dealer.at.startswith("tcp://tandem-router:")
        assert "127.0.0." in dealer.at
        names.addresses = ["127.0.0.1"]
        assert until(heard) == [(b"decode-0/abc", b"hello")]
    finally:
        for security in (ours, theirs):
            security.close()
        for context in contexts:
            context.destroy(linger=0)


# -- the other side: where a host listens under its own name -------------------------------------------------------


@pytest.mark.parametrize(
    ("addresses", "expected"),
    [
        (["10.0.0.1", "10.0.0.2"], "tcp://10.0.0.1:5600"),
        (["fd00::7", "10.0.0.1"], "tcp://10.0.0.1:5600"),
        (["fd00::7"], "tcp://[fd00::7]:5600"),
        ([], "tcp://tandem-router:5600"),
    ],
)
def test_a_host_listens_at_an_address_of_its_name(names: Names, addresses: list[str], expected: str) -> None:
    names.addresses = addresses
    assert listening_address("tcp://tandem-router:5600") == expected


@pytest.mark.parametrize(
    "address", ["tcp://10.0.0.7:1", "tcp://[::1]:1", "tcp://localhost:1", "tcp://*:1", "ipc:///a"]
)
def test_what_is_no_name_is_bound_to_as_it_is(names: Names, address: str) -> None:
    assert listening_address(address) == address
    assert names.asked == 0


@needs_ipv6
def test_a_router_whose_name_has_only_an_ipv6_address_is_reached(names: Names) -> None:
    names.addresses = ["::1"]
    context = Context()
    try:
        server = RouterSocket(context, "tcp://tandem-router:*", Keyless())
        assert server.address.startswith("tcp://[::1]:")
        port = server.address.rpartition(":")[2]
        dealer = Dealer(context, f"tcp://tandem-router:{port}", b"decode-0/abc", security=Keyless())
        dealer.send(b"hello")
        assert until(lambda: (dealer.drain(), server.drain())[1]) == [(b"decode-0/abc", b"hello")]
    finally:
        context.destroy(linger=0)


def test_a_name_that_is_not_found_cannot_be_bound_to(names: Names) -> None:
    context = Context()
    with pytest.raises(
        ConfigError, match="neither a host nor a network interface of this name is found; choose"
    ):
        RouterSocket(context, "tcp://tandem-router:5600", Keyless())
    context.term()


@needs_ipv6
def test_pages_come_to_a_name_that_has_only_an_ipv6_address(names: Names) -> None:
    names.addresses = ["::1"]
    with listening_socket("tandem-decode", 0) as listener:
        assert listener.getsockname()[0] == "::1"


@pytest.mark.parametrize(
    ("found", "reason"), [([], "Name or service not known"), (["192.0.2.1"], "Cannot assign")]
)
def test_where_pages_cannot_arrive_is_a_config_error(names: Names, found: list[str], reason: str) -> None:
    names.addresses = found
    with pytest.raises(
        ConfigError, match=f"at tandem-decode, port any: {reason}.*; give the node an address of"
    ):
        listening_socket("tandem-decode", 0)


def test_an_error_without_a_number_is_the_reason_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    def look_up(*_: object, **__: object) -> list[Entry]:
        raise TimeoutError("the lookup timed out")

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    with pytest.raises(ConfigError, match="port any: the lookup timed out; give"):
        listening_socket("tandem-decode", 0)
