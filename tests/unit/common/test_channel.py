"""Real sockets over ipc and over TCP on loopback: bounds, lost peers, identities, binding."""

from __future__ import annotations

import errno
import socket
import stat
import tempfile
from collections.abc import Iterator
from contextlib import closing, suppress
from itertools import pairwise
from pathlib import Path

import pytest
import zmq

from common.errors import ConfigError
from common.ipc import Dealer, RouterSocket, channel, check_bind
from common.ipc.channel import DRAIN_LIMIT, HIGH_WATER_MARK, MAX_MESSAGE_BYTES
from common.ipc.curve import Curve, Plain
from common.ipc.session import SMALL, FrameKind, frame
from tests.fakes.disks import FullDisk, small_disk
from tests.fakes.held_context import Context
from tests.fakes.ipv6 import needs_ipv6
from tests.fakes.keyless import Keyless
from tests.fakes.waiting import PATIENCE, until
from tests.fakes.wire import Wire

NOBODY = "nobody accepts a connection there"

__all__ = ["small_disk"]


@pytest.fixture
def directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="td") as path:  # short, because it holds sockets
        yield Path(path)


@pytest.fixture
def context() -> Iterator[Context]:
    """A context destroyed with all its sockets, so that a failing test does not hang in term()."""
    made = Context()
    yield made
    made.destroy(linger=0)


@pytest.fixture(params=["ipc", "tcp"])
def address(request: pytest.FixtureRequest, directory: Path) -> str:
    return f"ipc://{directory}/r.sock" if request.param == "ipc" else "tcp://127.0.0.1:0"


def pair(context: Context, address: str, identity: bytes = b"peer") -> tuple[RouterSocket, Dealer]:
    """Connect a router and a dealer that know each other."""
    router = RouterSocket(context, address, Keyless())
    dealer = Dealer(context, router.address, identity, security=Keyless())
    assert dealer.send(b"hello")
    assert until(router.drain) == [(identity, b"hello")]
    return router, dealer


def test_a_socket_that_cannot_be_watched_is_closed(
    context: Context, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when descriptors run out after its own: the node refuses the link and tries again later."""
    opened: list[zmq.Socket[bytes]] = []

    def exhausted(self: zmq.Socket[bytes], *arguments: object) -> object:
        opened.append(self)
        raise zmq.ZMQError(errno.EMFILE)

    monkeypatch.setattr(zmq.Socket, "get_monitor_socket", exhausted)
    with pytest.raises(zmq.ZMQError, match="Too many open files"):
        Dealer(context, f"ipc://{directory}/r.sock", b"peer", security=Keyless())
    assert [each.closed for each in opened] == [True]


def test_nothing_is_read_in_vain(context: Context, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a read raises an exception, in every turn of a node's loop and while a client waits for a first token."""
    router, dealer = pair(context, f"ipc://{directory}/r.sock")
    failed: list[int] = []
    made = zmq.Again.__init__

    def note(error: zmq.Again, *arguments: object, **named: object) -> None:
        failed.append(1)
        made(error, *arguments, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(zmq.Again, "__init__", note)
    assert dealer.drain() == []
    assert router.send(b"peer", b"one")
    assert until(dealer.drain) == [b"one"]
    assert not failed


def test_a_flood_of_bad_frames_does_not_keep_the_loop(context: Context, address: str) -> None:
    router, dealer = pair(context, address)
    peer = routing_id(router, dealer)
    for _ in range(100):
        router.socket.send_multipart([peer, b"no header", b"garbage"])
        router.socket.send_multipart([peer, b"a", b"b", b"c"])
    counts = [0]

    def all_counted() -> bool:
        assert dealer.drain(10) == []
        counts.append(dealer.damaged)
        return dealer.damaged == 200

    until(all_counted)
    # Less if the frames arrive a few at a time.
    assert max(after - before for before, after in pairwise(counts)) <= 10


def routing_id(router: RouterSocket, dealer: Dealer) -> bytes:
    """Return the routing id of the dealer's connection."""
    dealer.datagram(b"who am I")
    found: list[bytes] = []

    def received() -> bool:
        if router.socket.poll(100):
            *found[:], payload = router.socket.recv_multipart()
            return payload == b"who am I"
        return False

    until(received)
    return found[0]


def test_messages_pass_both_ways(context: Context, address: str) -> None:
    router, dealer = pair(context, address)
    assert router.send(b"peer", b"answer")
    assert until(dealer.drain) == [b"answer"]
    assert dealer.drain() == []
    assert router.drain() == []


def test_messages_sent_together_arrive_one_by_one(context: Context, address: str) -> None:
    router, dealer = pair(context, address)
    assert router.send(b"peer", b"before")
    assert router.send_all(b"peer", [b"one", b"two"])
    assert router.send(b"peer", b"after")
    got: list[bytes] = []
    until(lambda: got.extend(dealer.drain()) or len(got) == 4)
    assert got == [b"before", b"one", b"two", b"after"]
    assert not router.send_all(b"stranger", [b"one"])


def test_a_frame_that_packs_no_messages_is_refused(
    context: Context, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both ends count it; what follows it arrives."""
    router, dealer = pair(context, address)
    monkeypatch.setattr(channel, "pack", lambda messages: b"no pack")
    assert router.send_all(b"peer", [b"one", b"two"])
    assert router.send(b"peer", b"later")
    assert until(dealer.drain) == [b"later"]
    assert dealer.damaged == 1
    stranger = context.socket(zmq.DEALER)
    stranger.setsockopt(zmq.IDENTITY, b"stranger")
    stranger.connect(router.address)
    frames = [frame(FrameKind.OPEN, 7, 0, 0), frame(FrameKind.PACK, 7, 1, 0, b"no pack")]
    for each in (*frames, frame(FrameKind.DATA, 7, 2, 0, b"later")):
        stranger.send_multipart(each)
    assert until(router.drain) == [(b"stranger", b"later")]
    assert router.bad.total == 1


def test_peers_are_distinguished(context: Context, address: str) -> None:
    router, first = pair(context, address, b"first")
    second = Dealer(context, router.address, b"second", security=Keyless())
    second.send(b"2")
    first.send(b"1")
    got: list[tuple[bytes, bytes]] = []
    until(lambda: (got.extend(router.drain()), len(got) == 2)[1])
    assert sorted(got) == [(b"first", b"1"), (b"second", b"2")]
    assert router.send(b"second", b"for the second")
    assert until(second.drain) == [b"for the second"]
    assert first.drain() == []


def test_drain_is_bounded(context: Context, address: str) -> None:
    """A flood cannot keep the loop from its other work."""
    router, dealer = pair(context, address)
    total = DRAIN_LIMIT * 2 + 10
    for number in range(total):
        assert dealer.send(str(number).encode())
    sizes: list[int] = []
    got: list[bytes] = []

    def read() -> bool:
        batch = router.drain()
        sizes.append(len(batch))
        got.extend(frame for _, frame in batch)
        return len(got) == total

    until(read)
    assert max(sizes) <= DRAIN_LIMIT
    assert got == [str(number).encode() for number in range(total)]  # in order


def test_a_signal_without_a_message_is_harmless(context: Context, address: str) -> None:
    router, dealer = pair(context, address)
    assert router.drain(signalled=True) == []
    assert dealer.send(b"more")
    assert until(lambda: router.drain(signalled=True)) == [(b"peer", b"more")]


def test_sending_to_an_unknown_peer_fails(context: Context, address: str) -> None:
    router = RouterSocket(context, address, Keyless())
    assert router.send(b"nobody", b"x") is False


def test_sending_to_a_closed_peer_fails(context: Context, address: str) -> None:
    router, dealer = pair(context, address)
    dealer.close()
    until(lambda: not router.send(b"peer", b"x"))


def test_bytes_that_wait_for_a_stalled_peer_are_bounded(context: Context, directory: Path) -> None:
    """Without a bound in bytes 10,000 queued messages with images would take 100 GB."""
    mib = 1 << 20
    router = RouterSocket(context, f"ipc://{directory}/r.sock", queued_bytes=4 * mib)
    stalled, other = (Dealer(context, router.address, name, received=1) for name in (b"stalled", b"other"))
    for dealer in (stalled, other):
        assert dealer.send(b"hello")
        until(router.drain)
    images = [bytes([number]) * mib for number in range(4)]
    assert [router.post(b"stalled", image) for image in [*images, images[0]]] == [True] * 4 + [False]
    assert router.post(b"stalled", b"x" * (SMALL - 1))  # a small control message still fits
    assert router.send(b"other", images[0])  # and other peers are served
    assert until(lambda: router.drain() or other.drain()) == [images[0]]
    got: list[bytes] = []
    until(lambda: router.drain() or got.extend(stalled.drain()) or len(got) == 5)
    assert got == [*images, b"x" * (SMALL - 1)]
    until(lambda: router.drain() or stalled.drain() or router.send(b"stalled", images[0]))


def test_frames_lost_by_a_broken_connection_are_sent_again(context: Context) -> None:
    """Connections are reset again and again with frames in transit: each message arrives once and in order."""
    router = RouterSocket(context, "tcp://127.0.0.1:0", Keyless())
    with closing(Wire(int(router.address.rpartition(":")[2]))) as wire:
        dealer = Dealer(context, f"tcp://127.0.0.1:{wire.port}", b"peer", security=Keyless())
        there: list[bytes] = []
        back: list[bytes] = []
        # Until then the router can post nothing, and a slow handshake might not end between two resets.
        assert dealer.send(b"hello")
        assert until(router.drain) == [(b"peer", b"hello")]

        def exchange() -> bool:
            number = len(said)
            if number < 300:
                said.append(b"%d" % number)
                assert dealer.send(said[-1])
                if router.post(b"peer", b"answer %d" % number):
                    answered.append(b"answer %d" % number)
                if number % 25 == 24:
                    wire.reset()
            there.extend(frame for _, frame in router.drain())
            back.extend(dealer.drain())
            return len(there) == 300 and len(back) == len(answered)

        said: list[bytes] = []
        answered: list[bytes] = []
        until(exchange)
        assert there == said
        assert back == answered
        assert len(answered) > 200
        assert dealer.resets == 0


def test_a_damaged_frame_is_dropped_counted_and_sent_again(context: Context) -> None:
    router = RouterSocket(context, "tcp://127.0.0.1:0", Keyless())
    with closing(Wire(int(router.address.rpartition(":")[2]))) as wire:
        dealer = Dealer(context, f"tcp://127.0.0.1:{wire.port}", b"peer", security=Keyless())
        dealer.send(b"hello")
        until(router.drain)
        wire.replace(b"the bill is 100", b"the bill is 900")
        dealer.send(b"the bill is 100")
        until(lambda: router.drain() or router.damaged)
        wire.replace(b"", b"")
        got: list[bytes] = []
        until(lambda: got.extend(frame for _, frame in router.drain()) or dealer.drain() or got)
        assert got == [b"the bill is 100"]


def test_another_process_at_the_address_is_noticed(context: Context, directory: Path) -> None:
    """It does not know the session: queued messages are dropped, and the owner is notified."""
    router, dealer = pair(context, f"ipc://{directory}/r.sock")
    until(lambda: router.drain() or dealer.drain() or dealer.idle)
    router.close()
    assert dealer.send(b"for the process that is gone")
    router = RouterSocket(context, f"ipc://{directory}/r.sock")
    got: list[tuple[bytes, bytes]] = []
    until(lambda: got.extend(router.drain()) or dealer.drain() or dealer.resets)
    assert dealer.resets == 1
    assert dealer.send(b"for the new one")
    until(lambda: got.extend(router.drain()) or dealer.drain() or got)
    assert got == [(b"peer", b"for the new one")]


def test_a_dealer_knows_whether_it_is_connected(context: Context, address: str) -> None:
    router, dealer = pair(context, address)
    assert until(lambda: dealer.disconnected_for() == 0.0)
    assert dealer.trouble() == ""
    router.close()
    assert until(lambda: dealer.disconnected_for() > 0.0)
    until(lambda: dealer.trouble() == NOBODY)


def test_a_listener_that_ends_each_handshake_is_told_from_none(context: Context, directory: Path) -> None:
    dealer = Dealer(context, f"ipc://{directory}/other.sock", b"peer")
    until(lambda: dealer.trouble() == NOBODY)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{directory}/other.sock")
        listener.listen()
        listener.setblocking(False)

        def refused() -> bool:
            with suppress(BlockingIOError):
                listener.accept()[0].close()
            return "ended before their handshake" in dealer.trouble()

        until(refused)
    until(lambda: dealer.trouble() == NOBODY)


def test_a_full_queue_is_false_and_does_not_block(context: Context, directory: Path) -> None:
    dealer = Dealer(context, f"ipc://{directory}/nobody.sock", b"peer")
    sent = [dealer.send(b"x") for _ in range(HIGH_WATER_MARK + 5)]
    assert sent == [True] * HIGH_WATER_MARK + [False] * 5


def test_a_new_process_takes_over_its_identity(context: Context, address: str) -> None:
    """It does so before the death of the old process is noticed."""
    router = RouterSocket(context, address, Keyless())
    old = context.socket(zmq.DEALER)
    old.setsockopt(zmq.IDENTITY, b"peer")
    old.setsockopt(zmq.RECONNECT_IVL, -1)  # a dead process does not reconnect with its identity
    old.connect(router.address)
    old.send(b"hello")
    assert until(router.drain) == [(b"peer", b"hello")]
    new = Dealer(context, router.address, b"peer", security=Keyless())
    new.send(b"I am back")
    assert until(router.drain) == [(b"peer", b"I am back")]
    assert router.send(b"peer", b"welcome")
    assert until(new.drain) == [b"welcome"]
    assert not old.poll(0)


def test_a_dealer_finds_a_router_that_starts_later(context: Context, directory: Path) -> None:
    dealer = Dealer(context, f"ipc://{directory}/late.sock", b"peer")
    assert dealer.send(b"waiting")
    router = RouterSocket(context, f"ipc://{directory}/late.sock")
    assert until(router.drain) == [(b"peer", b"waiting")]


def test_messages_sent_just_before_closing_arrive(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A draining node sends its last tokens and Goodbye, closes and exits: none of it may be dropped."""
    assert channel.LINGER_MS >= 500
    for attempt in range(10):
        receiving, sending = Context(), Context()
        router = RouterSocket(receiving, f"ipc://{directory}/{attempt}.sock")
        # Even if this machine is busy for a while. The router does not wait so long: at the end of its context, ZMQ may
        # still try to send an acknowledgement to the dealer, which has left.
        with monkeypatch.context() as patched:
            patched.setattr(channel, "LINGER_MS", 60_000)
            dealer = Dealer(sending, router.address, b"peer")
        try:
            dealer.send(b"hello")
            until(router.drain)
            for _ in range(100):
                dealer.send(b"tokens" * 500)
            dealer.send(b"goodbye")
            dealer.close()
            sending.term()
            got: list[bytes] = []
            while b"goodbye" not in got:
                got += [frame for _, frame in until(router.drain)]
            assert len(got) == 101
        finally:
            sending.destroy(linger=0)
            receiving.destroy(linger=0)


def test_closing_does_not_wait_long_without_a_peer(directory: Path) -> None:
    context = Context()
    dealer = Dealer(context, f"ipc://{directory}/nobody.sock", b"peer")
    dealer.send(b"goodbye")
    assert dealer.socket.getsockopt(zmq.LINGER) == channel.LINGER_MS <= 1000
    dealer.close()
    context.term()  # must return


def test_a_message_that_is_too_large_to_send_is_refused(context: Context, address: str) -> None:
    """The peer would close the connection because of it, so sending fails here, where it can be handled."""
    router, dealer = pair(context, address)
    huge = bytes(MAX_MESSAGE_BYTES + 1)
    assert dealer.send(huge) is False
    assert router.send(b"peer", huge) is False
    assert dealer.send(b"still here")
    assert until(router.drain) == [(b"peer", b"still here")]


def test_a_message_that_is_too_large_to_receive_is_refused(context: Context, address: str) -> None:
    """A foreign peer's message is refused before it is in memory, and other peers are served."""
    router, dealer = pair(context, address)
    stranger = context.socket(zmq.DEALER)
    stranger.setsockopt(zmq.IDENTITY, b"stranger")
    stranger.connect(router.address)
    stranger.send(bytes(MAX_MESSAGE_BYTES + 1))
    stranger.send(b"after")
    dealer.send(b"mine")
    got: list[tuple[bytes, bytes]] = []
    until(lambda: (got.extend(router.drain()), (b"peer", b"mine") in got)[1])
    assert all(len(frame) < 100 for _, frame in got)


def test_messages_of_several_parts_are_dropped(context: Context, address: str) -> None:
    router, dealer = pair(context, address)
    dealer.socket.send_multipart([b"a", b"b"])
    dealer.send(b"whole")
    assert until(router.drain) == [(b"peer", b"whole")]
    router.socket.send_multipart([routing_id(router, dealer), b"a", b"b"])
    router.send(b"peer", b"whole")
    assert until(dealer.drain) == [b"whole"]


def test_an_event_loop_can_wait_for_it(context: Context, address: str) -> None:
    router, dealer = pair(context, address)
    assert router.fileno() > 2
    assert router.fileno() != dealer.fileno()
    poller = zmq.Poller()
    poller.register(router.socket, zmq.POLLIN)
    dealer.send(b"x")
    assert poller.poll(int(PATIENCE * 1000))


# -- binding ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "address",
    [
        "ipc:///run/x.sock",
        "inproc://x",
        "tcp://127.0.0.1:7100",
        "tcp://127.9.9.9:7100",
        "tcp://[::1]:7100",
        "tcp://localhost:7100",
    ],
)
def test_addresses_of_this_host_may_be_bound(address: str) -> None:
    check_bind(address, "router.control_address", Plain())


@pytest.mark.parametrize(
    "address",
    [
        "tcp://0.0.0.0:7100",
        "tcp://*:7100",
        "tcp://[::]:7100",
        "tcp://10.0.0.1:7100",
        "tcp://eth0:7100",
        "tcp://example.com:7100",
        "tcp://127.0.0.1;0.0.0.0:7100",
        "tcp://127.0.0.1.example.com:7100",
        "tcp://:7100",
        "ws://127.0.0.1:7100",
        "udp://127.0.0.1:7100",
        "0.0.0.0:7100",
        "",
    ],
)
def test_addresses_that_others_reach_need_keys(address: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_bind(address, "router.control_address", Plain())
    assert caught.value.path == "router.control_address"
    check_bind(address, "router.control_address", Keyless())


@pytest.mark.parametrize("address", ["ipc://@tandem", "ipc://*"])
@pytest.mark.parametrize("security", [Plain(), Keyless()])
def test_sockets_without_a_file_are_refused(address: str, security: Plain) -> None:
    """The abstract namespace has no permissions: every user of the host could connect."""
    with pytest.raises(ConfigError, match="without a file"):
        check_bind(address, "router.control_address", security)


def test_only_its_owner_can_open_an_ipc_socket(context: Context, directory: Path) -> None:
    file = directory / "r.sock"
    router = RouterSocket(context, f"ipc://{file}")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    router.close()
    assert not file.exists()


def test_the_socket_of_a_killed_process_is_replaced(context: Context, directory: Path) -> None:
    file = directory / "r.sock"
    dead = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    dead.bind(str(file))
    dead.close()  # the file remains but nobody listens
    assert file.is_socket()
    router = RouterSocket(context, f"ipc://{file}")
    dealer = Dealer(context, router.address, b"peer")
    dealer.send(b"x")
    assert until(router.drain) == [(b"peer", b"x")]


def test_the_socket_of_a_living_process_is_not_taken(context: Context, directory: Path) -> None:
    """If two routers are started from one cluster file, the second must not disconnect the first."""
    router, dealer = pair(context, f"ipc://{directory}/r.sock")
    with pytest.raises(ConfigError, match="another process serves"):
        RouterSocket(context, f"ipc://{directory}/r.sock")
    late = Dealer(context, router.address, b"late")  # the first router's file still exists
    late.send(b"x")
    assert until(router.drain) == [(b"late", b"x")]
    assert dealer.send(b"y")


def test_the_socket_of_a_stopped_process_is_not_taken(context: Context, directory: Path) -> None:
    """It accepts nobody any longer, so one more connection would have to wait for it."""
    file = directory / "r.sock"
    with closing(socket.socket(socket.AF_UNIX)) as stopped, closing(socket.socket(socket.AF_UNIX)) as waiting:
        stopped.bind(str(file))
        stopped.listen(0)
        waiting.connect(str(file))
        with pytest.raises(ConfigError, match="another process serves"):
            RouterSocket(context, f"ipc://{file}")
    assert file.exists()


@needs_ipv6
def test_links_over_ipv6(context: Context) -> None:
    router, dealer = pair(context, "tcp://[::1]:*")
    assert router.address.startswith("tcp://[::1]:")
    assert router.send(b"peer", b"back")
    assert until(dealer.drain) == [b"back"]


def test_a_directory_that_cannot_be_written_to_is_one_sentence(
    context: Context, small_disk: FullDisk
) -> None:
    small_disk.make_read_only()
    with pytest.raises(ConfigError, match=r"r\.sock: Read-only file system.* set process\.run_dir"):
        RouterSocket(context, f"ipc://{small_disk.path}/r.sock")


def test_closing_on_a_disk_that_has_become_read_only(context: Context, small_disk: FullDisk) -> None:
    """A node that drains there still exits with 0."""
    router = RouterSocket(context, f"ipc://{small_disk.path}/r.sock")
    small_disk.make_read_only()
    router.close()
    assert (small_disk.path / "r.sock").is_socket()


def test_a_file_that_is_no_socket_is_not_deleted(context: Context, directory: Path) -> None:
    file = directory / "thesis.txt"
    file.write_text("years of work")
    with pytest.raises(ConfigError, match="not a socket"):
        RouterSocket(context, f"ipc://{file}")
    assert file.read_text() == "years of work"


@pytest.mark.parametrize(
    "address", ["ipc:///nowhere/r.sock", "ipc:///tmp/" + "n" * 120, "tcp://127.0.0.1", "x"]
)
def test_what_cannot_be_bound_is_a_config_error(address: str) -> None:
    context = Context()
    with pytest.raises(ConfigError, match="cannot bind"):
        RouterSocket(context, address, Keyless())
    context.term()  # hangs if the socket of the failed attempt is still open


def test_a_port_that_is_taken_is_refused(context: Context) -> None:
    router = RouterSocket(context, "tcp://127.0.0.1:0", Keyless())
    with pytest.raises(ConfigError, match="in use"):
        RouterSocket(context, router.address, Keyless())


def test_what_cannot_be_connected_to_is_a_config_error() -> None:
    context = Context()
    with pytest.raises(ConfigError, match="cannot connect"):
        Dealer(context, "nonsense", b"peer", security=Keyless())
    context.term()


# -- keys ------------------------------------------------------------------------------------------------------


def make_keys(directory: Path, *names: str) -> Path:
    directory.mkdir(mode=0o700)
    for name in names:
        zmq.auth.create_certificates(directory, name)
        (directory / f"{name}.key_secret").chmod(0o600)
    return directory


def test_keys_that_are_missing_open_or_broken(directory: Path, context: Context) -> None:
    keys = make_keys(directory / "keys", "router")
    with pytest.raises(ConfigError, match=r"node\.key_secret is missing"):
        Curve(context, keys, "node", ())
    (keys / "router.key_secret").chmod(0o640)
    with pytest.raises(ConfigError, match="chmod 600"):
        Curve(context, keys, "router", ())
    (keys / "router.key_secret").write_text("nothing")
    (keys / "router.key_secret").chmod(0o600)
    with pytest.raises(ConfigError, match="not a key file"):
        Curve(context, keys, "router", ())
    (keys / "router.key_secret").write_bytes((keys / "router.key").read_bytes())
    with pytest.raises(ConfigError, match="not a key file"):
        Curve(context, keys, "router", ())


def test_a_server_whose_key_is_not_known(directory: Path, context: Context) -> None:
    security = Curve(context, make_keys(directory / "keys", "node"), "node", ())
    try:
        with pytest.raises(ConfigError, match=r"router\.key is missing"):
            Dealer(context, "tcp://127.0.0.1:1", b"node", "router", security)
    finally:
        security.close()
