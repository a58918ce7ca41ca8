"""The CUDA IPC endpoints over a runtime of host memory: refusals, settling, and whole rooms with real bytes."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from typing import Any, Never

import msgspec
import pytest
import torch

from common.errors import ConfigError, HandshakeRefused, ProtocolError
from kv_transfer import messages
from kv_transfer.copy_plan import Copy
from kv_transfer.events import Arrived, Delivered, PagesFree, RoomFailed, SlotsGranted, TransferLost
from kv_transfer.pair_plan import pair_plan
from kv_transfer.receiver import Receiver
from kv_transfer.sender import Sender
from kv_transfer.transport.base import DeviceMemory, PageList, Region, Target, WriteState
from kv_transfer.transport.cuda.cudart import CudaError, CudaRuntime
from kv_transfer.transport.cuda.pool_memory import as_memory, as_storage
from kv_transfer.transport.cuda_ipc import receiver as cuda_ipc_receiver
from kv_transfer.transport.cuda_ipc.kind import CudaIpcDescription
from kv_transfer.transport.cuda_ipc.receiver import CudaIpcReceiver
from kv_transfer.transport.cuda_ipc.sender import CudaIpcSender
from kv_transfer.transport.description import Description, from_wire, to_wire
from kv_transfer.transport.one_host import process
from kv_transfer.transport.one_host import segment as shm_segment
from kv_transfer.transport.one_host.process import ProcessIdentity
from kv_transfer.transport.shm.sender import ShmSender
from tests.fakes.fake_cuda import FakeCuda, FakeHost
from tests.fakes.pools import layers_layout
from tests.unit.kv_transfer.rig import LIMITS, RECORD, Clock, layout, noise, page_bytes

SRC, DST = layout(num_pages=8), layout(num_pages=12)
PLAN = pair_plan(SRC, DST)
ELSEWHERE = ProcessIdentity(process.current().host, 1, 1)


class Pair:
    """A prefill and a decode end on one host, both in this process, so the decode node claims another pid."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        gpus: tuple[int, int] = (0, 0),
        checks_later: bool = False,
        **host: object,
    ) -> None:
        self.host = FakeHost()
        for name, value in host.items():
            setattr(self.host, name, value)
        self.cuda = FakeCuda(self.host, visible=(gpus[0], 1 - gpus[0]))
        self.other = FakeCuda(self.host, visible=(gpus[1], 1 - gpus[1]))
        self.peer = secrets.token_hex(16)
        self.clock, self.to_decode = Clock(), list[bytes]()
        self.receiving = CudaIpcReceiver(self.peer, 0, self.other)  # type: ignore[arg-type]
        pool = self.receiving.allocate(Region.KV, DST.total_bytes)
        assert isinstance(pool, DeviceMemory)
        self.pool = self.other.tensor(pool.address, pool.nbytes)
        self.receiver = Receiver(
            self.peer, "decode-0", self.receiving, DST, self.clock, LIMITS, 4, checks_later
        )
        described = self.receiving.describe
        me = process.current()

        def describe(incarnation: str) -> Description:
            found = described(incarnation)
            assert isinstance(found, CudaIpcDescription)
            return msgspec.structs.replace(found, owner=ProcessIdentity(me.host, me.pid, me.started + 1))

        monkeypatch.setattr(self.receiving, "describe", describe)
        monkeypatch.setattr(shm_segment, "is_of", lambda *_: True)
        self.sending = CudaIpcSender(self.cuda)  # type: ignore[arg-type]
        self.source_address = self.cuda.malloc(0, SRC.total_bytes)
        self.source = self.cuda.tensor(self.source_address, SRC.total_bytes)
        self.source.copy_(torch.frombuffer(noise(SRC.total_bytes), dtype=torch.uint8))
        self.sending.register(SRC, DeviceMemory(self.source_address, SRC.total_bytes, 0))
        self.own = secrets.token_hex(16)
        self.sender = Sender(
            self.own,
            "prefill-0",
            self.sending,
            SRC,
            lambda _, f: self.to_decode.append(f),
            self.clock,
            LIMITS,
        )

    def connect(self) -> None:
        self.receiver.connect(self.own, lambda frame: self.sender.handle(b"decode-0", frame))
        self.pump()

    def pump(self) -> None:
        while self.to_decode:
            self.receiver.handle(self.own, self.to_decode.pop(0))

    def start(self, room: int, src: list[int], dst: list[int]) -> None:
        self.sender.expect(room)
        self.receiver.open(room, (self.own,), dst, 0)
        assert self.sender.poll()[-1:] == [SlotsGranted(room)]
        self.sender.send_pages(room, src, 0)

    def target(self, **changes: object) -> Target:
        described = msgspec.structs.replace(self.receiving.describe("p"), **changes)
        return Target(self.peer, described, DST.total_bytes, 4 * LIMITS.record_bytes)

    def equal(self, src: int, dst: int) -> bool:
        ours, theirs = self.source.numpy().data, self.pool.numpy().data
        return page_bytes(ours, SRC, src) == page_bytes(theirs, DST, dst)

    def close(self) -> None:
        self.sender.close()
        self.receiver.shutdown()


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    made = Pair(monkeypatch)
    yield made
    made.close()


# -- the content of Hello ----------------------------------------------------------------------------------------


def test_the_description_crosses_the_wire(pair: Pair) -> None:
    hello = messages.Hello("decode-0", DST, to_wire(pair.receiving.describe("p")), 4, 1024)
    _, decoded = messages.decode_for_sender(messages.encode(hello, pair.peer))
    assert decoded == hello
    assert isinstance(decoded, messages.Hello)
    assert from_wire(decoded.transport, CudaIpcDescription) == pair.receiving.describe("p")


@pytest.mark.parametrize("handle", [b"", b"x" * 63, b"x" * 65])
def test_a_handle_of_another_length_is_no_message(pair: Pair, handle: bytes) -> None:
    wrong: Any = msgspec.structs.replace(pair.receiving.describe("p"), handle=handle)
    with pytest.raises(ProtocolError):
        messages.decode_for_sender(
            messages.encode(messages.Hello("decode-0", DST, wrong, 4, 1024), pair.peer)
        )


# -- refusals --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"owner": ProcessIdentity("elsewhere", 1, 1)}, "another host or in another pid namespace"),
        ({"handle": b"?" * 64}, r"cannot be opened \(cudaIpcOpenMemHandle: invalid argument"),
        ({"handle": b"?" * 64, "device": "GPU-elsewhere"}, "CUDA_VISIBLE_DEVICES"),
    ],
)
def test_refused_descriptions(pair: Pair, changes: dict[str, object], says: str) -> None:
    with pytest.raises(HandshakeRefused, match=says):
        pair.sending.attach(pair.target(**changes))
    assert not pair.cuda.opened


def test_a_description_of_this_process_is_refused(pair: Pair) -> None:
    with pytest.raises(HandshakeRefused, match="claims to be this process"):
        pair.sending.attach(pair.target(owner=process.current()))
    assert not pair.cuda.opened


def test_pages_move_within_a_process_without_a_mapping(pair: Pair) -> None:
    """The halves of a movable node are one process, which cannot open handles that it has made."""
    pair.cuda.exports |= pair.other.exports
    peer = pair.sending.attach(pair.target(owner=process.current()))
    write = pair.sending.write_pages(peer, PLAN, PageList([1, 2], [3, 1], 1), checksums=False)
    assert pair.sending.poll(write.ticket) is WriteState.DONE
    assert pair.equal(1, 3)
    assert pair.equal(2, 1)
    assert not pair.cuda.opened
    pair.sending.detach(peer)


def test_a_foreign_segment_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair(monkeypatch)
    monkeypatch.undo()
    with pytest.raises(HandshakeRefused, match="not the name of a segment that it created"):
        pair.sending.attach(pair.target(owner=ELSEWHERE, records="../../etc/passwd"))
    pair.close()


def test_a_pool_that_is_too_small_is_refused_and_closed(pair: Pair) -> None:
    wanted = pair.target()
    larger = Target(wanted.incarnation, wanted.description, 1 << 40, wanted.records_bytes)
    with pytest.raises(HandshakeRefused, match="its layout needs 1099511627776"):
        pair.sending.attach(larger)
    assert not pair.cuda.opened


def test_a_pool_of_this_process_that_is_too_small_is_refused(pair: Pair) -> None:
    pair.cuda.exports |= pair.other.exports
    wanted = pair.target(owner=process.current())
    larger = Target(wanted.incarnation, wanted.description, DST.total_bytes + 1, wanted.records_bytes)
    with pytest.raises(HandshakeRefused, match=f"has {DST.total_bytes} bytes, its layout needs"):
        pair.sending.attach(larger)


@pytest.mark.parametrize("call", ["span", "lane", "tensor"])
@pytest.mark.parametrize("within", [False, True], ids=["another_process", "this_process"])
def test_memory_that_cannot_be_used_is_refused_and_closed(
    pair: Pair, call: str, within: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other decode nodes are served on. The same one may connect again."""
    pair.cuda.exports |= pair.other.exports
    target = pair.target(owner=process.current()) if within else pair.target()
    with monkeypatch.context() as patched:
        patched.setattr(pair.cuda, call, refuse)
        with pytest.raises(HandshakeRefused, match=r"its GPU memory cannot be used \(out of memory"):
            pair.sending.attach(target)
    assert not pair.cuda.opened
    pair.sending.detach(pair.sending.attach(target))


def test_a_mapping_that_cannot_be_removed_either_is_refused_all_the_same(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    for call in ("span", "close"):
        monkeypatch.setattr(pair.cuda, call, refuse)
    with pytest.raises(HandshakeRefused, match="its GPU memory cannot be used"):
        pair.sending.attach(pair.target())


def test_a_gpu_of_this_node_that_has_failed_is_no_fault_of_the_peer(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The node has to end: it can compute nothing any more."""
    monkeypatch.setattr(pair.cuda, "span", refuse)
    pair.cuda.lanes[0].fault = "unspecified launch failure"
    with pytest.raises(RuntimeError, match="unspecified launch failure"):
        pair.sending.attach(pair.target())
    pair.cuda.lanes[0].fault = ""


def refuse(*_: object) -> Never:
    raise CudaError("out of memory (CUDA error 2)")


def test_pools_of_the_wrong_memory_are_refused(pair: Pair) -> None:
    host = memoryview(bytearray(SRC.total_bytes))
    with pytest.raises(TypeError, match="not from host memory"):
        pair.sending.register(SRC, host)
    with pytest.raises(TypeError, match="from host memory, not from a GPU"):
        ShmSender().register(SRC, DeviceMemory(0, SRC.total_bytes, 0))
    with pytest.raises(ValueError, match="its layout needs"):
        pair.sending.register(SRC, DeviceMemory(0, 1, 0))


def test_no_room_on_the_gpu_is_a_sentence(pair: Pair) -> None:
    pair.other.full = True
    with pytest.raises(
        ConfigError, match=r"MiB of KV pages cannot be allocated on cuda:0 .* lower decode.pool_tokens"
    ):
        CudaIpcReceiver(pair.peer, 0, pair.other).allocate(Region.KV, 1 << 30)  # type: ignore[arg-type]


def test_memory_that_cannot_be_shared_is_a_sentence(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(address: int) -> bytes:
        raise CudaError("cudaIpcGetMemHandle: not supported")

    monkeypatch.setattr(pair.other, "export", refuse)
    with pytest.raises(ConfigError, match=r"cannot share memory of cuda:0 .* choose another transport"):
        CudaIpcReceiver(pair.peer, 0, pair.other).allocate(Region.KV, 64)  # type: ignore[arg-type]


def test_a_machine_without_a_gpu_is_a_sentence() -> None:
    if not torch.cuda.is_available():
        with pytest.raises(CudaError, match="no CUDA device"):
            CudaRuntime()


def test_host_pools_as_memory() -> None:
    storage = torch.arange(64, dtype=torch.uint8)
    memory = as_memory(storage)
    assert isinstance(memory, memoryview)
    as_storage(memory)[3] = 77
    assert storage[3] == 77


# -- whole rooms -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gpus", "peer_access", "opened_for"),
    [((0, 0), True, 0), ((0, 1), True, 0), ((1, 0), True, 0), ((0, 1), False, 1)],
)
def test_a_room_arrives(
    monkeypatch: pytest.MonkeyPatch, gpus: tuple[int, int], peer_access: bool, opened_for: int
) -> None:
    """The receiving GPU is the sender's or another one; if neither can access the other, the driver copies."""
    pair = Pair(monkeypatch, gpus, peer_access=peer_access)
    pair.connect()
    assert pair.cuda.opened == [(opened_for, pair.cuda.opened[0][1])]
    pair.start(1, [3, 5, 6], [9, 2, 3])
    pair.sender.finish(1, RECORD)
    assert pair.sender.poll() == [Delivered(1)]
    pair.pump()
    (arrived,) = pair.receiver.poll()
    assert isinstance(arrived, Arrived)
    assert len(arrived.record.checksums) == 3 * 8
    assert all(pair.equal(a, b) for a, b in zip([3, 5, 6], [9, 2, 3], strict=True))
    assert (pair.cuda.copies > 0) is not peer_access
    assert pair.sender.counters.bytes_written > 3 * SRC.page_bytes
    pair.close()
    assert not pair.cuda.opened
    pair.close()


def test_a_page_that_changes_on_the_way_is_seen(pair: Pair) -> None:
    pair.connect()
    pair.start(1, [3, 5], [9, 2])
    at = DST.planes[-2].offset + 2 * DST.planes[-2].page_bytes
    pair.pool[at] ^= 1
    pair.sender.finish(1, RECORD)
    pair.sender.poll()
    pair.pump()
    failed, free = pair.receiver.poll()
    assert isinstance(failed, RoomFailed)
    assert "page 1 of room 1 differs" in failed.reason
    assert free == PagesFree(1, (9, 2))
    assert pair.receiver.counters.checksum_failures == 1


def test_nothing_is_announced_before_the_event(pair: Pair) -> None:
    pair.connect()
    lane = pair.cuda.lanes[-2]
    lane.held = True
    pair.start(1, [3, 5], [9, 2])
    pair.sender.finish(1, RECORD)
    assert pair.sender.poll() == []
    assert pair.to_decode == []
    assert pair.sender.poll_interval is not None
    lane.held = False
    assert pair.sender.poll() == [Delivered(1)]
    assert len(pair.to_decode) == 2


def test_an_abort_is_acknowledged_when_the_kernel_is_through(pair: Pair) -> None:
    pair.connect()
    lane = pair.cuda.lanes[-2]
    lane.held = True
    pair.start(1, [3], [9])
    pair.receiver.abort(1, "the client went away")
    assert pair.receiver.quarantined_pages == 1
    assert pair.sender.poll() == []
    pair.pump()
    assert pair.receiver.poll() == []
    lane.held = False
    (lost,) = pair.sender.poll()
    assert isinstance(lost, TransferLost)
    pair.pump()
    assert pair.receiver.poll() == [PagesFree(1, (9,))]


def test_a_lost_peer_is_detached_after_its_kernel(pair: Pair) -> None:
    pair.connect()
    lane = pair.cuda.lanes[-2]
    lane.held = True
    pair.start(1, [3], [9])
    pair.sender.peer_lost(pair.peer)
    assert lane.waited == 1
    assert not pair.cuda.opened
    assert [type(event) for event in pair.sender.poll()] == [TransferLost]


@pytest.mark.parametrize("where", ["launch", "event"])
def test_a_gpu_that_fails_is_a_failed_ticket(pair: Pair, where: str) -> None:
    pair.connect()
    lane = pair.cuda.lanes[-2]
    if where == "launch":
        lane.launch_fault = "CUDA error: unspecified launch failure"
        pair.start(1, [3], [9])
    else:
        lane.held = True
        pair.start(1, [3], [9])
        lane.fault = "CUDA error: an illegal memory access was encountered"
    lost = pair.sender.poll()[-1]
    assert isinstance(lost, TransferLost)
    assert "CUDA error" in lost.reason
    lane.fault = lane.launch_fault = ""
    assert pair.sender.draining == 0


def test_tickets_of_a_detached_peer_fail_and_bytes_are_counted_once(pair: Pair) -> None:
    peer = pair.sending.attach(pair.target())
    lane = pair.cuda.lanes[-2]
    lane.held = True
    write = pair.sending.write_pages(peer, PLAN, PageList([1, 2], [3, 4], 1), checksums=True)
    assert write.nbytes == 2 * SRC.page_bytes
    assert pair.sending.progress(peer) == 0
    lane.held = False
    assert pair.sending.progress(peer) == write.nbytes
    assert pair.sending.poll(write.ticket) is WriteState.DONE
    assert pair.sending.progress(peer) == write.nbytes
    assert list(write.digests) == pair.sending.page_digests(PLAN.src, [1, 2])
    assert list(write.digests) == pair.receiving.page_digests(PLAN.dst, [3, 4])
    assert (write.digests[0], len(write.digests)) == (next(iter(write.digests)), 2)
    pair.sending.detach(peer)
    for ticket in (
        pair.sending.write_pages(peer, PLAN, PageList([1], [3], 1), checksums=False).ticket,
        pair.sending.write(peer, [], 1),
        pair.sending.write_record(peer, 0, b"x", 1),
    ):
        assert pair.sending.poll(ticket) is WriteState.FAILED


def test_any_copies_by_the_driver(pair: Pair) -> None:
    peer = pair.sending.attach(pair.target())
    copies = [Copy(5, 7, 100), Copy(1000, 400, 3)]
    assert pair.sending.poll(pair.sending.write(peer, copies, 1)) is WriteState.DONE
    assert torch.equal(pair.pool[7:107], pair.source[5:105])
    assert torch.equal(pair.pool[400:403], pair.source[1000:1003])


# -- proof of death ----------------------------------------------------------------------------------------------


def test_under_mps_the_death_of_a_client_proves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    me = process.current()
    gone = ProcessIdentity(me.host, me.pid, me.started - 1)
    for mps in (False, True):
        monkeypatch.setattr(cuda_ipc_receiver, "mps_is_used", lambda mps=mps: mps)
        receiver = CudaIpcReceiver("ab" * 16, 0, FakeCuda(FakeHost()))  # type: ignore[arg-type]
        receiver.admit("p", gone)
        assert receiver.peer_is_dead("p") is not mps
        receiver.forget("p")
        assert not receiver.peer_is_dead("p")
        assert receiver.revoke(1) is False


def test_layouts_with_pages_of_several_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair(monkeypatch)
    peer = pair.sending.attach(pair.target())
    other = layers_layout("tiny", "float32", 2, 6, [(2, 4), (2, 4)])
    # The smaller destination pool has other offsets.
    write = pair.sending.write_pages(peer, pair_plan(SRC, other), PageList([1], [5], 1), checksums=False)
    assert pair.sending.poll(write.ticket) is WriteState.DONE
    assert len(write.digests) == 0
    assert page_bytes(pair.pool.numpy().data, other, 5) == page_bytes(pair.source.numpy().data, SRC, 1)
    pair.close()
