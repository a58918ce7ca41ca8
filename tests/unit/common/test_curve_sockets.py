"""A link's key authenticates only its own name, on sockets that admit that name; nobody else is heard."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq
import zmq.auth
from zmq.utils import z85

from common.errors import ConfigError
from common.ipc import Dealer, LinkSecurity, RouterSocket, allow_list, check_bind
from common.ipc.bad_frames import LIMIT
from common.ipc.curve import Curve, PerRunCurve, Plain
from common.ipc.key_files import make_key_pairs
from common.node_names import NO_NAMES, NodeNames
from tests.fakes.disks import FullDisk, small_disk
from tests.fakes.held_context import Context
from tests.fakes.keyless import Keyless
from tests.fakes.no_threads import allow_no_threads
from tests.fakes.waiting import PATIENCE, until

__all__ = ["small_disk"]
NAMES = ("router", "prefill-0", "decode-0", "decode-1")
TCP = "tcp://127.0.0.1:*"


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    make_key_pairs(tmp_path / "keys", NAMES)
    return tmp_path / "keys"


class Wire:
    """A listening socket of the router, and clients with contexts of their own, as separate processes have."""

    def __init__(
        self,
        keys: Path,
        admitted: tuple[str, ...] = NAMES[1:],
        name: str = "router",
        names: NodeNames = NO_NAMES,
    ) -> None:
        self._opened: list[tuple[Context, LinkSecurity]] = []
        context = Context()
        self.security = Curve(context, keys, name, admitted, names=names)
        self._opened.append((context, self.security))
        self.server = RouterSocket(context, TCP, self.security)
        self._keys = keys
        self._name = name

    def client(self, identity: str, key: str, keys: Path | None = None) -> Dealer:
        """Return a socket that claims to be `identity` and uses the key pair `key`."""
        context = Context()
        security = Curve(context, keys or self._keys, key, ())
        self._opened.append((context, security))
        return Dealer(context, self.server.address, identity.encode(), self._name, security)

    def bare(self, identity: str) -> zmq.Socket[bytes]:
        """Return a socket without security; the caller chooses a mechanism."""
        context = Context()
        self._opened.append((context, Plain()))
        socket = context.socket(zmq.DEALER)
        socket.setsockopt(zmq.IDENTITY, identity.encode())
        return socket

    def hears_only(self, honest: str, key: str) -> None:
        """Expect that a message from `honest` arrives and nothing arrived before it."""
        dealer = self.client(honest, key)
        assert dealer.send(b"fine")
        assert until(self.server.drain) == [(honest.encode(), b"fine")]

    def close(self) -> None:
        for context, security in self._opened:
            security.close()
            context.destroy(linger=0)


@pytest.fixture
def wire(keys: Path) -> Iterator[Wire]:
    made = Wire(keys)
    yield made
    made.close()


def test_a_node_with_its_own_key_is_served(wire: Wire) -> None:
    dealer = wire.client("prefill-0/abc", "prefill-0")
    assert dealer.send(b"hello")
    assert until(wire.server.drain) == [(b"prefill-0/abc", b"hello")]
    assert wire.server.send(b"prefill-0/abc", b"welcome")
    assert until(dealer.drain) == [b"welcome"]
    assert wire.server.bad.total == 0


@pytest.mark.parametrize(
    "claimed", ["prefill-0/abc", "decode-1/abc", "router/abc", "abc", "decode-0-x/abc", "/decode-0/abc"]
)
def test_a_key_cannot_speak_under_another_name(wire: Wire, claimed: str) -> None:
    """A decode node's key cannot pose as a prefill node, as another decode node, or without a name."""
    forger = wire.client(claimed, "decode-0")
    assert forger.send(b"I am somebody else")
    until(lambda: wire.server.drain() or wire.server.bad.total)
    assert wire.server.bad.total
    wire.hears_only("decode-0/abc", "decode-0")


def test_a_node_whose_connection_is_made_anew_before_it_was_read_is_not_blamed(wire: Wire) -> None:
    """libzmq assigns a routing id to the older connection: its unread frames are not forgeries."""
    events = wire.server.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED)
    earlier = wire.client("decode-0/abc", "decode-0")
    earlier.send(b"first")
    assert until(wire.server.drain) == [(b"decode-0/abc", b"first")]
    for _ in range(2 * LIMIT):
        assert earlier.datagram(b"not read in time")
    earlier.close()
    later = wire.client("decode-0/abc", "decode-0")
    later.send(b"second")
    for _ in ("earlier connected", "earlier ended", "later connected"):
        assert events.poll(int(PATIENCE * 1000))
        events.recv_multipart()

    def heard() -> bool:
        later.drain()
        return (b"decode-0/abc", b"second") in wire.server.drain()

    until(heard)
    assert wire.server.take_cut_off() == []
    assert wire.server.bad.total == 0
    assert wire.server.send(b"decode-0/abc", b"still welcome")
    assert until(later.drain) == [b"still welcome"]
    wire.server.socket.disable_monitor()
    events.close(linger=0)


def test_a_key_that_this_socket_does_not_admit_is_refused(keys: Path) -> None:
    """A prefill node's peer socket admits only decode nodes, not itself and not the router."""
    wire = Wire(keys, ("decode-0", "decode-1"), "prefill-0")
    try:
        for name in ("router", "prefill-0"):
            wire.client(f"{name}/abc", name).send(b"x")
        wire.hears_only("decode-1/abc", "decode-1")
        assert wire.server.bad.total == 0, "they never got as far as a message"
        assert not wire.server.send(b"prefill-0/abc", b"x")
    finally:
        wire.close()


def test_strangers_get_nothing(wire: Wire, tmp_path: Path, keys: Path) -> None:
    """No answer goes to clients without a key, with NULL or PLAIN security, or with a key pair that is unknown."""
    foreign = tmp_path / "foreign"
    make_key_pairs(foreign, ["prefill-0"])
    shutil.copy(keys / "router.key", foreign)
    unknown = wire.client("prefill-0/stranger", "prefill-0", foreign)
    null, plain = wire.bare("prefill-0/null"), wire.bare("prefill-0/plain")
    plain.setsockopt(zmq.PLAIN_USERNAME, b"prefill-0")
    plain.setsockopt(zmq.PLAIN_PASSWORD, b"password")
    for socket in (null, plain):
        socket.connect(wire.server.address)
        socket.send(b"let me in", zmq.NOBLOCK)
    unknown.send(b"let me in")
    wire.hears_only("prefill-0/abc", "prefill-0")
    for identity in (b"prefill-0/stranger", b"prefill-0/null", b"prefill-0/plain"):
        assert not wire.server.send(identity, b"secret")


def public_key(keys: Path, name: str) -> str:
    return zmq.auth.load_certificate(keys / f"{name}.key")[0].decode()


def test_a_revoked_key_is_no_longer_accepted(wire: Wire, keys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is heard neither on its existing connection nor on a new one, until its file is back."""
    monkeypatch.setattr(allow_list, "CHECK_SECONDS", 0.0)
    dealer = wire.client("decode-0/abc", "decode-0")
    dealer.send(b"before")
    assert until(wire.server.drain) == [(b"decode-0/abc", b"before")]
    key = public_key(keys, "decode-0")
    (keys / "decode-0.key").rename(keys / "decode-0.gone")
    assert wire.security.allowed.name_of(key) is None
    dealer.send(b"after")
    wire.client("decode-0/new", "decode-0").send(b"after")
    until(lambda: wire.server.drain() or wire.server.bad.total)
    wire.hears_only("decode-1/abc", "decode-1")
    (keys / "decode-0.gone").rename(keys / "decode-0.key")
    dealer.send(b"again")

    def heard() -> bool:
        dealer.drain()  # messages refused meanwhile count as lost and are sent again
        return b"again" in [frame for _, frame in wire.server.drain()]

    until(heard)


def test_a_key_in_two_files_belongs_to_nobody(wire: Wire, keys: Path) -> None:
    replaced = public_key(keys, "prefill-0")
    shutil.copy(keys / "decode-0.key", keys / "prefill-0.key")
    for key in (replaced, public_key(keys, "decode-0")):
        assert wire.security.allowed.name_of(key) is None
    assert wire.security.allowed.name_of(public_key(keys, "decode-1")) == "decode-1"


def test_a_key_that_could_not_be_read_is_read_again(keys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when descriptors have run out while an operator exchanges it."""
    now = 100.0
    allowed = allow_list.AllowList(keys, ["decode-0"], lambda: now)
    key = public_key(keys, "decode-0")

    def exhausted(file: Path) -> tuple[bytes, bytes | None]:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with monkeypatch.context() as patch:
        patch.setattr(zmq.auth, "load_certificate", exhausted)
        assert allowed.name_of(key) is None
    now += allow_list.CHECK_SECONDS
    assert allowed.name_of(key) == "decode-0"


def test_keys_are_checked_again_after_a_defect_in_a_check(
    wire: Wire, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """If the thread that answers ended, nobody could connect to this process any longer, and nobody would know why."""
    failures: list[bytes] = []

    def fail(key: bytes) -> bytes:
        failures.append(key)
        raise RuntimeError("a defect")

    dealer = wire.client("prefill-0/abc", "prefill-0")
    assert dealer.send(b"hello")
    with monkeypatch.context() as patch:
        patch.setattr(z85, "encode", fail)
        until(lambda: dealer.drain() or failures)
    assert until(lambda: dealer.drain() or wire.server.drain()) == [(b"prefill-0/abc", b"hello")]
    reasons = [vars(record)["fields"]["reason"] for record in caplog.records]
    assert "the key could not be checked: RuntimeError('a defect')" in reasons


def test_a_banned_key_comes_back_after_the_ban(keys: Path) -> None:
    now = 100.0
    allowed = allow_list.AllowList(keys, ["decode-0"], lambda: now)
    key = public_key(keys, "decode-0")
    assert allowed.name_of(key) == "decode-0"
    allowed.ban("decode-0", 10.0)
    assert allowed.name_of(key) is None
    now += 10.1
    assert allowed.name_of(key) == "decode-0"


# -- keys of patterns --------------------------------------------------------------------------------------------

ENTRIES = ("prefill-0", "prefill-*", "decode-0", "decode-*")


@pytest.fixture
def shared(tmp_path: Path) -> Iterator[Wire]:
    """A router of a cluster file with the patterns decode-* and prefill-*, and with one listed node of each role."""
    keys = tmp_path / "keys"
    make_key_pairs(keys, ("router", *ENTRIES))
    made = Wire(keys, ENTRIES, names=NodeNames.of(ENTRIES))
    yield made
    made.close()


def test_several_nodes_speak_with_the_key_of_their_pattern(shared: Wire) -> None:
    for name in ("decode-1", "decode-2", "decode-6d4cf56db6-x2k9p"):
        dealer = shared.client(f"{name}/abc/secret", "decode-*")
        assert dealer.send(b"hello")
        assert until(shared.server.drain) == [(f"{name}/abc/secret".encode(), b"hello")]
        assert shared.server.send(f"{name}/abc/secret".encode(), b"welcome")
        assert until(dealer.drain) == [b"welcome"]
    assert shared.server.bad.total == 0


@pytest.mark.parametrize(
    "claimed",
    ["decode-0", "prefill-1", "prefill-0", "router", "decode-", "decode-*", "decode-A", "encode-1", ""],
)
def test_the_key_of_a_pattern_cannot_speak_under_a_listed_or_other_name(shared: Wire, claimed: str) -> None:
    """A listed node has its own key, whatever pattern its name matches."""
    forger = shared.client(f"{claimed}/abc", "decode-*")
    assert forger.send(b"I am somebody else")
    until(lambda: shared.server.drain() or shared.server.bad.total)
    assert shared.server.bad.total
    shared.hears_only("decode-9/abc", "decode-*")


def test_the_key_of_a_node_does_not_stand_for_its_pattern(shared: Wire) -> None:
    assert shared.client("decode-1/abc", "decode-0").send(b"I join")
    until(lambda: shared.server.drain() or shared.server.bad.total)
    shared.hears_only("decode-0/abc", "decode-0")


def test_bad_frames_of_one_node_cost_no_other_node_of_its_pattern_the_link(shared: Wire) -> None:
    """Neither those under a foreign name nor those under the name, and even the incarnation, of a living node."""
    honest = shared.client("decode-1/abc/secret", "decode-*")
    honest.send(b"first")
    assert until(shared.server.drain) == [(b"decode-1/abc/secret", b"first")]
    for claimed in ("decode-0/abc/x", "decode-1/abc/guessed"):
        forger = shared.client(claimed, "decode-*")
        refused = shared.server.bad.total
        for _ in range(LIMIT):
            assert forger.datagram(b"bad")

        def read(refused: int = refused) -> bool:
            for peer, _ in shared.server.drain():
                shared.server.refuse(peer, "not a message of tandem")
            return shared.server.bad.total >= refused + LIMIT

        until(read)
    assert shared.server.take_cut_off() == ["decode-*/decode-0/abc/x", "decode-1/abc/guessed"]
    honest.send(b"second")
    assert until(shared.server.drain) == [(b"decode-1/abc/secret", b"second")]
    shared.hears_only("decode-2/abc", "decode-*")


def test_a_client_pins_the_key_of_the_pattern_of_its_server(tmp_path: Path) -> None:
    """A decode node connects to prefill nodes that no file lists, and to nobody else at their addresses."""
    keys, foreign = tmp_path / "keys", tmp_path / "foreign"
    for directory in (keys, foreign):
        make_key_pairs(directory, ("router", *ENTRIES))
    shutil.copy(keys / "decode-ANY.key", foreign)
    names = NodeNames.of(ENTRIES)
    for directory, heard in ((foreign, False), (keys, True)):
        wire = Wire(directory, ("decode-*",), "prefill-5", names)
        context = Context()
        security = Curve(context, keys, "decode-3", (), names=names)
        dealer = Dealer(context, wire.server.address, b"decode-3/abc", "prefill-5", security)
        dealer.send(b"hello")
        if heard:
            assert until(wire.server.drain) == [(b"decode-3/abc", b"hello")]
        else:
            until(lambda dealer=dealer: "the keys of one cluster" in dealer.trouble())  # type: ignore[misc]
            assert wire.server.drain() == []
        security.close()
        context.destroy(linger=0)
        wire.close()


# -- keys of one run ---------------------------------------------------------------------------------------------


def test_loopback_tcp_without_configured_keys_uses_keys_of_the_run(tmp_path: Path) -> None:
    """Another user of the host cannot read them and so gets nothing; ipc sockets stay plain."""
    keys = tmp_path / "keys"
    contexts = [Context() for _ in range(3)]

    def security(context: Context, name: str) -> PerRunCurve:
        def make() -> Curve:
            make_key_pairs(keys, NAMES)
            return Curve(context, keys, name, NAMES[1:])

        return PerRunCurve(make)

    ours, theirs = security(contexts[0], "router"), security(contexts[1], "decode-0")
    try:
        plain = RouterSocket(contexts[0], f"ipc://{tmp_path}/r.sock", ours)
        Dealer(contexts[1], plain.address, b"decode-0/abc", "router", theirs).send(b"ipc")
        assert until(plain.drain) == [(b"decode-0/abc", b"ipc")]
        assert not keys.exists(), "ipc sockets need no keys"
        server = RouterSocket(contexts[0], TCP, ours)
        stranger = Dealer(contexts[2], server.address, b"decode-0/stranger", "router", Keyless())
        stranger.send(b"x")
        Dealer(contexts[1], server.address, b"decode-0/abc", "router", theirs).send(b"tcp")
        assert until(server.drain) == [(b"decode-0/abc", b"tcp")]
        assert not server.send(b"decode-0/stranger", b"secret")
        assert keys.stat().st_mode & 0o777 == 0o700
        assert {file.stat().st_mode & 0o777 for file in keys.glob("*.key_secret")} == {0o600}
        with pytest.raises(ConfigError, match=r"security\.keys: tcp://192\.0\.2\.1:7000 is on another host"):
            Dealer(contexts[1], "tcp://192.0.2.1:7000", b"decode-0/abc", "router", theirs)
        with pytest.raises(ConfigError, match="deploy/keygen"):
            check_bind("tcp://0.0.0.0:7100", "router.control_address", ours)
    finally:
        for each in (ours, theirs):
            each.close()
        for context in contexts:
            context.destroy(linger=0)


def test_without_a_free_thread_a_link_is_refused_until_there_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process whose other links need no keys makes them for its first link over TCP, which may be late."""
    context = Context()

    def make() -> Curve:
        make_key_pairs(tmp_path, NAMES)
        return Curve(context, tmp_path, "decode-0", ())

    security = PerRunCurve(make)
    with monkeypatch.context() as patch:
        allow_no_threads(patch)
        with pytest.raises(ConfigError, match="keys cannot be checked: can't start new thread"):
            Dealer(context, "tcp://127.0.0.1:1", b"decode-0/abc", "router", security)
    Dealer(context, "tcp://127.0.0.1:1", b"decode-0/abc", "router", security).close()
    security.close()
    context.term()


def test_no_socket_over_tcp_is_without_keys() -> None:
    context = Context()
    for make in (lambda: RouterSocket(context, TCP), lambda: Dealer(context, "tcp://127.0.0.1:1", b"x")):
        with pytest.raises(ConfigError, match="it needs keys"):
            make()
    context.term()


def test_pairs_are_made_once_whoever_comes_first(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    children = []
    for _ in range(6):
        child = os.fork()
        if child == 0:
            make_key_pairs(keys, NAMES)
            os._exit(0)
        children.append(child)
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * 6
    before = {file.name: file.read_bytes() for file in keys.iterdir()}
    assert make_key_pairs(keys, [*NAMES, "decode-2"]) == ["decode-2"], "a node that was added to the file"
    assert before.items() <= {file.name: file.read_bytes() for file in keys.iterdir()}.items()
    for name in NAMES:
        pair = zmq.auth.load_certificate(keys / f"{name}.key_secret")
        assert pair[0] == zmq.auth.load_certificate(keys / f"{name}.key")[0]


def test_a_node_starts_again_on_a_disk_that_has_become_read_only(small_disk: FullDisk) -> None:
    """Its keys already exist, so nothing has to be written, not even a lock."""
    keys = small_disk.path / "keys"
    make_key_pairs(keys, NAMES)
    (keys / ".lock").unlink()  # a copied directory has none
    small_disk.make_read_only()
    assert make_key_pairs(keys, NAMES) == []
    with pytest.raises(ConfigError, match="cannot make keys in .*: Read-only file system; make it writable"):
        make_key_pairs(keys, [*NAMES, "decode-2"])


def test_a_keys_directory_that_others_write_to_is_refused(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    for name in ("open", "link"):
        with pytest.raises(ConfigError, match="others can write"):
            make_key_pairs(tmp_path / name, ["router"])
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot make keys"):
        make_key_pairs(tmp_path / "file" / "keys", ["router"])
