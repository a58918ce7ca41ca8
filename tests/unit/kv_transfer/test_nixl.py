"""NIXL: what is posted and when it counts as settled, against a library whose transfers end as the test says."""

from __future__ import annotations

import errno
import mmap
import os
import secrets
from collections.abc import Callable, Iterator

import msgspec
import numpy as np
import pytest

from common.errors import ConfigError, DeadlineExceeded, HandshakeRefused
from common.kv_cache.pool_layout import PoolLayout
from kv_transfer import messages
from kv_transfer.copy_plan import Copy
from kv_transfer.events import Arrived, PagesFree, RoomFailed, SlotsGranted, TransferLost
from kv_transfer.messages import AbortAck
from kv_transfer.pair_plan import pair_plan
from kv_transfer.transport.base import DeviceMemory, PageList, PeerMemory, Region, Target, WriteState
from kv_transfer.transport.nixl import agent as nixl_agent
from kv_transfer.transport.nixl.kind import NixlDescription
from kv_transfer.transport.nixl.liveness import GRACE
from kv_transfer.transport.nixl.receiver import NixlReceiver
from kv_transfer.transport.nixl.sender import SETTLE_SECONDS, NixlSender
from kv_transfer.transport.nixl.writes import cuts
from tests.fakes.fake_cuda import FakeCuda, FakeHost
from tests.fakes.fake_nixl import FakeNixl
from tests.fakes.pools import layers_layout
from tests.fakes.waiting import until
from tests.unit.kv_transfer.rig import LIMITS, Clock, Decode, Prefill, noise, page_bytes, same_pages, send_all

LAYOUT = layers_layout("m", "float32", 2, 8, [(2, 4), (1, 4)])  # planes of two sizes
OTHER = layers_layout("m", "float32", 2, 12, [(2, 4), (1, 4)])  # another pool size, so other offsets
PLAN = pair_plan(LAYOUT, OTHER)
SMALL = msgspec.structs.replace(LIMITS, max_frame_bytes=64, max_inflight_bytes=200)
DECODE = "0b" * 16


class Ends:
    """Both endpoints over one fake network."""

    def __init__(self, receiving: PoolLayout = OTHER) -> None:
        self.net = FakeNixl()
        self.clock = Clock()
        self.sender = NixlSender("0a" * 16, "lo", SMALL, library=self.net, clock=self.clock)
        self.kv = memoryview(noise(LAYOUT.total_bytes))
        self.sender.register(LAYOUT, self.kv)
        self.receiver = NixlReceiver(DECODE, "lo", library=self.net, clock=self.clock)
        self.receiver.allocate(Region.KV, receiving.total_bytes)
        self.receiver.allocate(Region.RECORDS, 4 * 64)
        self.receiver.open(receiving, 64)
        self.layout = receiving

    @property
    def description(self) -> NixlDescription:
        made = self.receiver.describe("p")
        assert isinstance(made, NixlDescription)
        return made

    def attach(self, **changes: object) -> PeerMemory:
        description = msgspec.structs.replace(self.description, **changes)
        return self.sender.attach(Target(DECODE, description, self.layout.total_bytes, 256))

    def landed(self, page: int) -> bytes:
        assert isinstance(self.receiver.kv, memoryview)
        return page_bytes(self.receiver.kv, self.layout, page)

    def close(self) -> None:
        self.net.held, self.net.fault = False, ""
        self.clock.now += SETTLE_SECONDS
        self.sender.close()
        self.receiver.close()


@pytest.fixture
def ends() -> Iterator[Ends]:
    made = Ends()
    yield made
    made.close()


def test_pages_land_in_pieces_that_show_progress(ends: Ends) -> None:
    """Pools of different sizes; a transfer has at most max_inflight_bytes; lists are made once and released."""
    peer = ends.attach()
    write = ends.sender.write_pages(peer, PLAN, PageList([1, 5, 2], [11, 3, 4], 1), True)
    assert ends.sender.poll(write.ticket) is WriteState.DONE
    for a, b in ((1, 11), (5, 3), (2, 4)):
        assert ends.landed(b) == page_bytes(ends.kv, LAYOUT, a)
    assert not any(ends.landed(5))
    assert write.nbytes == ends.sender.progress(peer) == 3 * LAYOUT.page_bytes
    assert list(write.digests) == ends.receiver.page_digests(PLAN.dst, [11, 3, 4])
    sizes = [sum(nbytes for _, _, nbytes in each.pieces) for each in ends.net.transfers]
    assert max(sizes) <= 200
    assert sum(sizes) == write.nbytes
    assert len(ends.net.lists) == 2
    record = ends.sender.write_record(peer, 64, b"r" * 40, 1)
    assert ends.sender.poll(record) is WriteState.DONE
    assert ends.receiver.record(1) == b"r" * 40 + bytes(24)
    assert len(ends.net.lists) == 2
    assert not ends.net.under_way
    ends.sender.close()
    assert not ends.net.lists


def test_copies_of_any_shape(ends: Ends) -> None:
    peer = ends.attach()
    copies = [Copy(3, 1000, 5), Copy(100, 7, 300)]
    assert ends.sender.poll(ends.sender.write(peer, copies, 1)) is WriteState.DONE
    assert isinstance(ends.receiver.kv, memoryview)
    assert ends.receiver.kv[1000:1005] == ends.kv[3:8]
    assert ends.receiver.kv[7:307] == ends.kv[100:400]
    assert ends.sender.poll(ends.sender.write(peer, [], 1)) is WriteState.DONE
    assert (
        ends.sender.poll(ends.sender.write_pages(peer, PLAN, PageList([], [], 1), True).ticket)
        is WriteState.DONE
    )


def test_a_write_is_pending_until_its_last_transfer_has_landed(ends: Ends) -> None:
    peer = ends.attach()
    ends.net.held = True
    write = ends.sender.write_pages(peer, PLAN, PageList([1, 2, 3], [1, 2, 3], 1), False)
    assert ends.sender.poll(write.ticket) is WriteState.PENDING
    assert ends.sender.progress(peer) == 0
    ends.net.held = False
    assert ends.sender.poll(write.ticket) is WriteState.DONE


def test_a_fault_settles_only_when_posted_transfers_must_have_landed(ends: Ends) -> None:
    """NIXL reports an error while other pieces may be in transfer; meanwhile nothing new is posted."""
    peer = ends.attach()
    ends.net.held = True
    write = ends.sender.write_pages(peer, PLAN, PageList([1, 2, 3], [1, 2, 3], 1), False)
    ends.net.fault, ends.net.held = "NIXL_ERR_REMOTE_DISCONNECT", False
    assert ends.sender.poll(write.ticket) is WriteState.PENDING
    posted = len(ends.net.transfers)
    refused = ends.sender.write_record(peer, 0, b"x", 1)
    assert ends.sender.poll(refused) is WriteState.FAILED
    assert len(ends.net.transfers) == posted
    ends.clock.now += SETTLE_SECONDS - 0.1
    assert ends.sender.poll(write.ticket) is WriteState.PENDING
    ends.clock.now += 0.2
    assert ends.sender.poll(write.ticket) is WriteState.FAILED
    assert ends.sender.last_error(peer) == "NIXL_ERR_REMOTE_DISCONNECT"
    assert not ends.net.under_way
    ends.net.fault = ""  # the next write connects to the peer again
    write = ends.sender.write_pages(peer, PLAN, PageList([4], [4], 2), False)
    assert ends.sender.poll(write.ticket) is WriteState.DONE
    assert ends.landed(4) == page_bytes(ends.kv, LAYOUT, 4)


def test_a_transfer_that_nixl_refuses_fails_and_is_never_raised(ends: Ends) -> None:
    peer = ends.attach()
    ends.net.refuse = "NIXL_ERR_INVALID_PARAM"
    write = ends.sender.write_pages(peer, PLAN, PageList([1], [1], 1), True)
    assert ends.sender.poll(write.ticket) is WriteState.FAILED
    assert ends.sender.last_error(peer) == "NIXL_ERR_INVALID_PARAM"
    del ends.net.agents[DECODE]  # it cannot be connected to again either
    write = ends.sender.write_pages(peer, PLAN, PageList([1], [1], 1), True)
    assert ends.sender.poll(write.ticket) is WriteState.FAILED
    too_long = ends.sender.write_record(peer, 0, bytes(LIMITS.record_bytes + 1), 1)
    assert ends.sender.poll(too_long) is WriteState.FAILED


def test_what_detach_could_not_stop_keeps_the_peer_out_until_it_has_ended(ends: Ends) -> None:
    peer = ends.attach()
    ends.net.held = True
    write = ends.sender.write_pages(peer, PLAN, PageList([1], [1], 1), False)
    ends.sender.detach(peer)
    assert ends.sender.poll(write.ticket) is WriteState.FAILED
    assert not ends.sender.writes_ended(DECODE)
    assert ends.sender.writes_ended("ff" * 16)
    with pytest.raises(HandshakeRefused, match="have not ended yet"):
        ends.attach()
    ends.net.held = False
    assert ends.sender.writes_ended(DECODE)
    assert not ends.net.under_way
    assert ends.sender.poll(write.ticket) is WriteState.FAILED
    late = ends.sender.write_pages(peer, PLAN, PageList([1], [1], 1), False)
    assert ends.sender.poll(late.ticket) is WriteState.FAILED
    ends.sender.detach(peer)
    ends.attach()


def test_close_with_a_stuck_transfer_leaves_the_liveness_connection_to_the_process(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end of that connection would claim that nothing is written any more."""
    monkeypatch.setattr("kv_transfer.transport.nixl.sender.CLOSE_SECONDS", 0.01)
    peer = ends.attach()
    keeper = ends.receiver.liveness

    def dead() -> bool:
        return ends.receiver.peer_is_dead("p")

    until(lambda: dead() or keeper.connected("p"))
    ends.net.held = True
    ends.sender.write_pages(peer, PLAN, PageList([1], [1], 1), False)
    ends.sender.close()
    assert not dead()
    assert keeper.connected("p")
    ends.net.held = False
    ends.sender.close()
    until(lambda: dead() or keeper.ended("p"))
    assert not dead()  # GRACE is not over
    ends.clock.now += GRACE
    assert dead()


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"metadata": b"\xff\xff"}, "NIXL cannot reach it .*nixl_devices of both must name one network"),
        ({"metadata": msgspec.msgpack.encode("0a" * 16)}, "not what it registered .*agent '0a0a"),
        ({"kv": 4096}, "not what it registered with NIXL"),
        ({"records": 4096}, "not what it registered with NIXL"),
        ({"device": 0}, "on a CPU and this node.s on a GPU, or the other way round"),
    ],
)
def test_refused_descriptions(ends: Ends, changes: dict[str, object], says: str) -> None:
    with pytest.raises(HandshakeRefused, match=says):
        ends.attach(**changes)
    assert not ends.net.lists[1:]


def test_metadata_of_another_peer_does_not_cut_that_one_off(ends: Ends) -> None:
    peer = ends.attach()
    liar = Target("0c" * 16, ends.receiver.describe("q"), OTHER.total_bytes, 256)
    with pytest.raises(HandshakeRefused, match="agent '0b0b"):
        ends.sender.attach(liar)
    write = ends.sender.write_pages(peer, PLAN, PageList([1], [1], 1), False)
    assert ends.sender.poll(write.ticket) is WriteState.DONE


def test_a_liveness_address_that_leads_nowhere_is_refused(ends: Ends) -> None:
    nowhere = msgspec.structs.replace(ends.description.liveness, port=1)
    with pytest.raises(HandshakeRefused, match="bulk_port.*cannot be reached"):
        ends.attach(liveness=nowhere)


def test_hello_is_stable_and_has_its_own_key_for_each_peer(ends: Ends) -> None:
    assert ends.receiver.describe("p") == ends.receiver.describe("p")
    assert ends.receiver.describe("p") != ends.receiver.describe("q")
    assert ends.receiver.revoke(1) is False


def test_progress_is_made_often_only_while_something_is_under_way(ends: Ends) -> None:
    agents = [ends.net.agents["0a" * 16], ends.net.agents[DECODE]]
    peer = ends.attach()
    ends.net.held = True
    ends.sender.write_pages(peer, PLAN, PageList([1], [1], 1), False)
    assert ends.sender.busy
    ends.net.held = False
    assert ends.sender.progress(peer)
    assert not ends.sender.busy
    until(lambda: all(agent.rounds for agent in agents))
    assert agents[0].options["enable_listen_thread"] is False
    assert agents[0].options["enable_prog_thread"] is False


def test_records_take_more_registered_memory_when_all_of_it_is_in_use(ends: Ends) -> None:
    peer = ends.attach()
    ends.net.held = True
    regions = len(ends.net.agents["0a" * 16].regions)
    tickets = [ends.sender.write_record(peer, 0, bytes([i]), 1) for i in range(65)]
    assert len(ends.net.agents["0a" * 16].regions) == regions + 1
    ends.net.held = False
    assert all(ends.sender.poll(ticket) is WriteState.DONE for ticket in tickets)
    assert len(ends.net.lists) == 1


def test_a_record_for_which_there_is_no_memory_fails_and_the_node_goes_on(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    def exhausted(*arguments: object) -> mmap.mmap:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    peer = ends.attach()
    ends.net.held = True
    tickets = [ends.sender.write_record(peer, 0, b"r", 1) for _ in range(64)]
    with monkeypatch.context() as patch:
        patch.setattr(mmap, "mmap", exhausted)
        refused = ends.sender.write_record(peer, 0, b"r", 1)
    assert ends.sender.poll(refused) is WriteState.FAILED
    assert "Cannot allocate memory" in ends.sender.last_error(peer)
    tickets.append(ends.sender.write_record(peer, 0, b"r", 1))
    ends.net.held = False
    assert all(ends.sender.poll(ticket) is WriteState.DONE for ticket in tickets)


@pytest.mark.parametrize("most", [1, 7, 8, 15, 16, 1000])
def test_cuts(most: int) -> None:
    lengths = np.array([8, 8, 4, 4, 4, 9, 1], dtype=np.int64)
    found = list(cuts(lengths, most))
    assert [start for start, _, _ in found] == [0, *(end for _, end, _ in found[:-1])]
    assert found[-1][1] == len(lengths)
    for start, end, nbytes in found:
        assert nbytes == lengths[start:end].sum()
        assert nbytes <= most or end == start + 1
    assert not list(cuts(np.array([], dtype=np.int64), most))


# ---- GPUs


def gpu_ends(monkeypatch: pytest.MonkeyPatch) -> tuple[FakeNixl, NixlSender, NixlReceiver, FakeCuda]:
    """Pools that are really host memory; checksums are computed by the kernel's reference."""
    monkeypatch.setattr("torch.cuda.set_device", lambda device: None)
    net, cuda = FakeNixl(), FakeCuda(FakeHost())
    receiver = NixlReceiver(DECODE, "lo", device=1, cuda=cuda, library=net)  # type: ignore[arg-type]
    receiver.allocate(Region.KV, LAYOUT.total_bytes)
    receiver.allocate(Region.RECORDS, 256)
    receiver.open(LAYOUT, 64)
    sender = NixlSender("0a" * 16, "lo", SMALL, cuda=cuda, library=net)  # type: ignore[arg-type]
    address = cuda.malloc(0, LAYOUT.total_bytes)
    cuda.tensor(address, LAYOUT.total_bytes).numpy()[:] = np.frombuffer(noise(LAYOUT.total_bytes), np.uint8)
    sender.register(LAYOUT, DeviceMemory(address, LAYOUT.total_bytes, 0))
    return net, sender, receiver, cuda


def test_pools_on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pools are registered as memory of their GPUs; a write is done only when its checksums are on the host, too."""
    net, sender, receiver, cuda = gpu_ends(monkeypatch)
    assert [region[2:] for region in net.agents[DECODE].regions] == [(1, "VRAM"), (0, "DRAM")]
    target = Target(DECODE, receiver.describe("p"), LAYOUT.total_bytes, 256)
    peer = sender.attach(target)
    for lane in cuda.lanes:
        lane.held = True
    plan = pair_plan(LAYOUT, LAYOUT)
    write = sender.write_pages(peer, plan, PageList([1, 2], [5, 6], 1), True)
    assert sender.poll(write.ticket) is WriteState.PENDING  # landed, but its checksums are not readable yet
    for lane in cuda.lanes:
        lane.held = False
    assert sender.poll(write.ticket) is WriteState.DONE
    assert list(write.digests) == sender.page_digests(plan.src, [1, 2])
    assert list(write.digests) == receiver.page_digests(plan.dst, [5, 6])
    record = sender.write_record(peer, 0, b"r", 1)
    assert sender.poll(record) is WriteState.DONE
    assert receiver.record(0)[:1] == b"r"
    assert cuda.flushed == [1]
    cuda.lanes[-1].fault = "CUDA error: an illegal memory access"
    write = sender.write_pages(peer, plan, PageList([1], [5], 1), True)
    assert sender.poll(write.ticket) is WriteState.FAILED
    assert "illegal memory access" in sender.last_error(peer)
    cuda.lanes[-1].fault = ""
    sender.close()
    receiver.close()


def test_a_gpu_that_cannot_show_what_a_network_card_wrote_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda(FakeHost())
    cuda.ordered, cuda.flushes = False, False
    receiver = NixlReceiver(DECODE, "lo", device=1, cuda=cuda, library=FakeNixl())  # type: ignore[arg-type]
    receiver.allocate(Region.KV, LAYOUT.total_bytes)
    receiver.allocate(Region.RECORDS, 256)
    with pytest.raises(ConfigError, match="nixl cannot write here: .*cannot flush"):
        receiver.open(LAYOUT, 64)
    receiver.close()
    cuda.full = True
    receiver = NixlReceiver(DECODE, "lo", device=1, cuda=cuda, library=FakeNixl())  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"cannot be allocated on cuda:1.*lower decode\.pool_tokens"):
        receiver.allocate(Region.KV, LAYOUT.total_bytes)
    receiver.close()


# ---- with the state machines of kv_transfer


def pair(clock: Clock) -> tuple[FakeNixl, Prefill, Decode]:
    net = FakeNixl()
    sending, receiving = secrets.token_hex(16), secrets.token_hex(16)
    endpoint = NixlSender(sending, "lo", LIMITS, library=net, clock=clock)
    prefill = Prefill(clock, endpoint, incarnation=sending)
    decode = Decode(clock, NixlReceiver(receiving, "lo", library=net), incarnation=receiving)
    decode.connect(prefill)
    decode.pump()
    return net, prefill, decode


def granted(prefill: Prefill, decode: Decode, room: int, pages: list[int]) -> None:
    decode.receiver.open(room, (prefill.incarnation,), pages, 0)
    prefill.sender.expect(room)
    assert SlotsGranted(room) in prefill.poll()


def test_an_abort_is_answered_only_when_nothing_can_land_any_more() -> None:
    """Even if the prefill node has meanwhile dropped the decode node: until then pages stay in quarantine."""
    clock = Clock()
    net, prefill, decode = pair(clock)
    granted(prefill, decode, 1, [1, 2])
    net.held = True
    send_all(prefill, 1, [3, 4])
    decode.poll()
    prefill.sender.peer_lost(decode.incarnation)
    assert isinstance(prefill.poll()[0], TransferLost)
    decode.receiver.abort(1, "given up")
    clock.now += LIMITS.abort_retry
    assert decode.poll() == []
    assert decode.receiver.quarantined_pages == 2
    net.held = False
    clock.now += LIMITS.abort_retry
    decode.poll()
    assert decode.poll() == [PagesFree(1, (1, 2))]
    acks = [messages.decode_for_receiver(frame)[1] for _, frame in prefill.sent]
    assert sum(isinstance(each, AbortAck) for each in acks) == 1
    assert same_pages(prefill, [3, 4], decode, [1, 2])  # landed late, where nobody reads
    prefill.sender.close()
    decode.receiver.shutdown()


def test_a_write_that_never_ends_lets_go_of_its_room_and_keeps_the_other_node_s_pages_in_quarantine() -> None:
    """The request ends soon after its deadline; the decode node is told only once nothing can land any more."""
    clock = Clock()
    net, prefill, decode = pair(clock)
    decode.receiver.open(1, (prefill.incarnation,), [1, 2], 0)
    prefill.sender.expect(1, deadline=clock.now + 1.0)
    assert SlotsGranted(1) in prefill.poll()
    net.held = True
    send_all(prefill, 1, [3, 4])
    clock.now += 1.0
    assert (prefill.poll(), prefill.sender.draining) == ([], 1)
    decode.receiver.abort(1, "given up")
    clock.now += LIMITS.stall_timeout
    (lost,) = prefill.poll()
    assert isinstance(lost, TransferLost)
    assert lost.code == DeadlineExceeded.code
    assert prefill.sender.active == prefill.sender.draining == 0
    assert prefill.sender.poll_interval is None
    assert isinstance(prefill.endpoint, NixlSender)
    assert not prefill.endpoint.busy
    decode.poll()  # asks again
    assert decode.poll() == []
    assert decode.receiver.quarantined_pages == 2
    net.held = False
    clock.now += LIMITS.abort_retry
    decode.poll()
    assert decode.poll() == [PagesFree(1, (1, 2))]
    assert not net.under_way
    prefill.sender.close()
    decode.receiver.shutdown()


def test_other_rooms_of_a_peer_are_answered_while_a_write_to_it_does_not_end() -> None:
    clock = Clock()
    net, prefill, decode = pair(clock)
    granted(prefill, decode, 1, [1])
    net.held = True
    send_all(prefill, 1, [3])
    prefill.sender.cancel(1, "client_gone", "the client went away")
    prefill.poll()
    clock.now += LIMITS.stall_timeout
    assert isinstance(prefill.poll()[0], TransferLost)
    granted(prefill, decode, 2, [2])
    decode.receiver.abort(2, "given up")
    prefill.poll()
    assert PagesFree(2, (2,)) in decode.poll()
    net.held = False
    decode.receiver.shutdown()
    prefill.sender.close()


def test_a_fault_ends_the_room_and_the_next_one_arrives() -> None:
    clock = Clock()
    net, prefill, decode = pair(clock)
    granted(prefill, decode, 1, [1])
    net.fault = "NIXL_ERR_REMOTE_DISCONNECT"
    send_all(prefill, 1, [3])
    assert prefill.poll() == []
    clock.now += SETTLE_SECONDS
    (lost,) = prefill.poll()
    assert isinstance(lost, TransferLost)
    assert "NIXL_ERR_REMOTE_DISCONNECT" in lost.reason
    failed, free = decode.poll()
    assert isinstance(failed, RoomFailed)
    assert free == PagesFree(1, (1,))
    net.fault = ""
    granted(prefill, decode, 2, [1])
    send_all(prefill, 2, [4])
    prefill.poll()
    (arrived,) = decode.poll()
    assert isinstance(arrived, Arrived)
    assert same_pages(prefill, [4], decode, [1])
    prefill.sender.close()
    decode.receiver.shutdown()


# ---- the library


def test_start_up_refuses_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Callable[[], object]:
        def load() -> object:
            raise ImportError(f"No module named {name!r}")

        return load

    monkeypatch.setattr(nixl_agent, "load_cu13", missing("nixl_cu13"))
    monkeypatch.setattr(nixl_agent, "load_cu12", missing("nixl_cu12"))
    with pytest.raises(
        ConfigError, match=r"nixl is not installed here: run `pip install -e '.\[nixl\]'.*nixl_cu12"
    ):
        NixlSender("0a" * 16, "lo", LIMITS)
    with pytest.raises(ConfigError, match="nixl is not installed here"):
        NixlReceiver(DECODE, "lo")
    net = FakeNixl()
    monkeypatch.setattr(nixl_agent, "load_cu12", lambda: net)
    NixlSender("0a" * 16, "lo", LIMITS)  # the other CUDA version is better than none
    with pytest.raises(ConfigError, match="NIXL does not start over UCX on 'lo': NIXL_ERR_NOT_ALLOWED"):
        NixlSender("0a" * 16, "lo", LIMITS)
    net.plugins = []
    with pytest.raises(ConfigError, match="has no UCX plugin"):
        NixlReceiver(DECODE, "lo", library=net)
