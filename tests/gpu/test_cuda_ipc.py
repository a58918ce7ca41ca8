"""Page transfers between real processes over CUDA IPC: on one GPU, and on two if there are two."""

from __future__ import annotations

import json
import secrets
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import pytest
import torch

from kv_transfer.events import Arrived, PagesFree, RoomFailed
from kv_transfer.pair_plan import Side, pair_plan
from kv_transfer.transport.base import DeviceMemory, PageList, Region, Target, WriteState
from kv_transfer.transport.cuda.blocks import move_parts
from kv_transfer.transport.cuda.cudart import CudaError, CudaRuntime
from kv_transfer.transport.cuda.pages import PagedMemory, move_pages, page_list
from kv_transfer.transport.cuda.pool_memory import as_memory
from kv_transfer.transport.cuda_ipc.kind import CudaIpcDescription
from kv_transfer.transport.cuda_ipc.receiver import CudaIpcReceiver
from kv_transfer.transport.cuda_ipc.sender import CudaIpcSender
from kv_transfer.transport.page_digest import as_digests
from tests.fakes.part_pools import SIZES, noisy_pool, pairs
from tests.fakes.transfer_child import build_layout, pattern
from tests.fakes.transfer_rig import SEED, Rig, start_child

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("default"),
]
TWO = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
PAIRS = [("cuda:0", "cuda:0"), pytest.param(("cuda:0", "cuda:1"), marks=TWO)]
LAYERS = [(8, 128), (8, 128), (2, 96)]  # the last one has pages of another size


@pytest.fixture(params=PAIRS, ids=lambda pair: "-".join(pair))
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    made = Rig("cuda_ipc", request.param, layers=LAYERS)
    yield made
    made.close()


def pages_of(memory: torch.Tensor, layout: object, page: int) -> torch.Tensor:
    planes = layout.planes  # type: ignore[attr-defined]
    parts = [memory[p.offset + page * p.page_bytes : p.offset + (page + 1) * p.page_bytes] for p in planes]
    return torch.cat(parts).cpu()


def test_bytes_arrive_where_they_belong_and_nowhere_else(rig: Rig) -> None:
    source = pattern(rig.src.total_bytes, SEED, "cpu")
    src, dst = [5, 6, 7, 63, 1, 30], [90, 91, 95, 2, 40, 3]
    reply = rig.send_room(src, dst)
    assert reply["lost"] == ""
    (arrived,) = [event for event in rig.events if isinstance(event, Arrived)]
    assert len(arrived.record.checksums) == 8 * len(src)
    torch.cuda.synchronize()
    for a, b in zip(src, dst, strict=True):
        assert torch.equal(pages_of(rig.storage, rig.dst, b), pages_of(source, rig.src, a))
    for page in set(range(rig.dst.num_pages)) - set(dst):
        assert not pages_of(rig.storage, rig.dst, page).any()


@pytest.mark.parametrize(("told", "queued"), [(1, False), (2, False), (3, False), (0, True), (1, True)])
def test_pages_leave_while_a_forward_computes_them(rig: Rig, told: int, queued: bool) -> None:
    """Every copy waits for the event of its layers: until the compute stream gets there, the pool holds zeros."""
    source = pattern(rig.src.total_bytes, SEED, "cpu")
    src, dst = [5, 6, 7, 63, 1, 30], [90, 91, 95, 2, 40, 3]
    reply = rig.send_room(src, dst, told=told, queued=queued)
    assert (reply["lost"], len(rig.arrived)) == ("", 1)  # with the checksums of all planes
    torch.cuda.synchronize()
    for a, b in zip(src, dst, strict=True):
        assert torch.equal(pages_of(rig.storage, rig.dst, b), pages_of(source, rig.src, a))
    for page in set(range(rig.dst.num_pages)) - set(dst):
        assert not pages_of(rig.storage, rig.dst, page).any()


def test_many_rooms_one_after_another(rig: Rig) -> None:
    source = pattern(rig.src.total_bytes, SEED, "cpu")
    for turn in range(20):
        src = [1 + (turn * 7 + i) % 63 for i in range(30)]
        dst = [1 + (turn * 11 + i * 3) % 95 for i in range(30)]
        reply = rig.send_room(src, dst)
        assert (reply["lost"], len(rig.arrived)) == ("", turn + 1)
        assert torch.equal(pages_of(rig.storage, rig.dst, dst[-1]), pages_of(source, rig.src, src[-1]))


def test_a_page_overwritten_on_arrival_is_found(rig: Rig) -> None:
    """If a page is damaged between the last page and the record, the receiving GPU's sum differs from the sender's."""
    digests = rig.endpoint.page_digests

    def damaged(side: Side, pages: Sequence[int]) -> list[int]:
        plane = rig.dst.planes[-1]
        rig.storage[plane.offset + pages[1] * plane.page_bytes + 17] ^= 4
        torch.cuda.synchronize()
        return digests(side, pages)

    rig.endpoint.page_digests = damaged  # type: ignore[method-assign]
    rig.receiver.open(1, (rig.config["sender"],), [4, 9, 6], 0)
    rig.ask("room", room=1, src=[1, 2, 3])
    until = time.monotonic() + 10
    while len(rig.events) < 2 and time.monotonic() < until:
        rig.turn()
    failed, free = rig.events
    assert isinstance(failed, RoomFailed)
    assert "page 1 of room 1 differs" in failed.reason
    assert free == PagesFree(1, (4, 9, 6))


@pytest.mark.parametrize("damaged", [False, True])
@pytest.mark.parametrize("devices", PAIRS)
def test_pages_are_compared_after_the_record(devices: tuple[str, str], damaged: bool) -> None:
    """What the computing stream is given once the record has arrived changes pages only after they were compared."""
    rig = Rig("cuda_ipc", devices, layers=LAYERS, checks_later=True)
    try:
        plane, digests = rig.dst.planes[-1], rig.endpoint.start_digests

        def start(side: Side, pages: Sequence[int], slot: int) -> object:
            if damaged:
                rig.storage[plane.offset + pages[1] * plane.page_bytes + 17] ^= 4
                torch.cuda.synchronize()
            found = digests(side, pages, slot)
            rig.storage.zero_()  # as the next step writes
            return found

        rig.endpoint.start_digests = start  # type: ignore[method-assign,assignment]
        for room in range(1, 6):
            rig.events.clear()
            rig.receiver.open(room, (rig.config["sender"],), [4, 9, 6], 0)
            rig.ask("room", room=room, src=[1, 2, 3])
            until = time.monotonic() + 10
            while not rig.events and time.monotonic() < until:
                rig.turn()
            (arrived,) = rig.events
            assert isinstance(arrived, Arrived)
            (check,) = arrived.checks
            failure = check.failure()
            assert (failure is not None) is damaged
            rig.receiver.close(room)
        assert rig.receiver.counters.checksum_failures == (5 if damaged else 0)
    finally:
        rig.close()


def test_the_sums_of_both_gpus_and_the_reference_agree(rig: Rig) -> None:
    rig.send_room([1, 2, 3], [4, 5, 6])
    cpu = torch.device("cpu")
    sums = torch.zeros(3, dtype=torch.int64)
    source = PagedMemory(rig.src, pattern(rig.src.total_bytes, SEED, "cpu"), cpu)
    move_pages(source, None, page_list([1, 2, 3], device=cpu), sums, range(len(rig.src.planes)), 8)
    assert rig.endpoint.page_digests(pair_plan(rig.src, rig.dst).dst, [4, 5, 6]) == as_digests(sums.tolist())


@pytest.mark.parametrize(("src_size", "dst_size"), SIZES)
def test_parts_of_pages_and_states_equal_the_reference(src_size: int, dst_size: int) -> None:
    torch.cuda.set_device(0)  # earlier tests may have left another one current
    for plan in pairs(src_size, dst_size):
        pages = [part for plane in plan.planes for part in plane]
        for parts, items in ((pages, ([3, 1, 6], [8, 2, 5])), (plan.state, ([2], [3]))):
            found = []
            for device in (torch.device("cpu"), torch.device("cuda:0")):
                a, b = (
                    noisy_pool(side.layout, 1 + n).to(device) for n, side in enumerate((plan.src, plan.dst))
                )
                index = page_list(*items, device=device)
                sums, only = (torch.zeros(len(items[0]), dtype=torch.int64, device=device) for _ in range(2))
                move_parts(a, b, parts, index, sums, 264)
                move_parts(a, None, parts, index, only, 8)
                assert torch.equal(sums, only)
                found.append((b.cpu(), sums.cpu()))
            assert torch.equal(found[0][0], found[1][0])
            assert torch.equal(found[0][1], found[1][1])


def test_an_abort_frees_pages_once_the_sender_acknowledges(rig: Rig) -> None:
    rig.send_room([1], [1])
    rig.events.clear()
    rig.receiver.open(1, (rig.config["sender"],), [4, 9], 0)
    rig.turn()
    rig.receiver.abort(1, "the client went away")
    assert rig.receiver.quarantined_pages == 2
    until = time.monotonic() + 10
    while not rig.events and time.monotonic() < until:
        rig.turn()
    assert rig.events == [PagesFree(1, (4, 9))]


@pytest.mark.parametrize("devices", PAIRS, ids=lambda pair: "-".join(pair))
def test_a_killed_sender_is_proved_dead_and_writes_no_more(devices: tuple[str, str]) -> None:
    """It dies with seconds of writes queued on its GPU; once the pidfd reports its death, nothing changes any more."""
    rig = Rig("cuda_ipc", devices, layers=[(8, 128)] * 16, pages=(513, 513))
    try:
        many = list(range(1, 513))
        rig.send_room([1], [1])
        rig.receiver.open(7, (rig.config["sender"],), [3, 4], 0)
        rig.turn()
        rig.ask("flood", src=many, dst=many)
        time.sleep(0.3)
        sender = rig.config["sender"]
        assert not rig.endpoint.peer_is_dead(sender)
        rig.child.send_signal(signal.SIGSTOP)
        time.sleep(0.05)
        assert not rig.endpoint.peer_is_dead(sender)
        killed = time.monotonic()
        rig.child.send_signal(signal.SIGKILL)
        while not rig.endpoint.peer_is_dead(sender):
            assert time.monotonic() - killed < 30
        print(f"proved dead {1000 * (time.monotonic() - killed):.1f} ms after SIGKILL")
        rig.storage.fill_(0xAB)
        torch.cuda.synchronize()
        for _ in range(10):
            assert bool((rig.storage.view(torch.int64) == rig.storage.view(torch.int64)[0]).all())
            time.sleep(0.1)
        until = time.monotonic() + 10
        while len(rig.events) < 3 and time.monotonic() < until:
            for event in rig.receiver.poll():
                rig.events.append(event)
        assert [type(event) for event in rig.events] == [Arrived, RoomFailed, PagesFree]
    finally:
        rig.child.kill()
        rig.child.wait()
        rig.close()


@pytest.mark.parametrize("devices", PAIRS, ids=lambda pair: "-".join(pair))
def test_a_killed_receiver_leaves_the_sender_alive(devices: tuple[str, str]) -> None:
    """Its memory stays mapped until this process unmaps it; this process's CUDA context must survive meanwhile."""
    config: dict[str, Any] = {
        "role": "receive",
        "device": devices[1],
        "receiver": secrets.token_hex(16),
        "dtype": "bfloat16",
        "page_size": 16,
        "layers": [list(layer) for layer in LAYERS],
        "dst_pages": 96,
    }
    child = start_child(config, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert child.stdin is not None
        assert child.stdout is not None
        described = msgspec.json.decode(child.stdout.readline(), type=CudaIpcDescription)
        torch.cuda.set_device(devices[0])
        layout, dst = build_layout(config, 64), build_layout(config, 96)
        plan = pair_plan(layout, dst)
        storage = pattern(layout.total_bytes, SEED, devices[0])
        sender = CudaIpcSender()
        sender.register(layout, as_memory(storage))
        peer = sender.attach(Target(config["receiver"], described, dst.total_bytes, 4096))
        write = sender.write_pages(peer, plan, PageList([1, 2], [5, 6], 1), checksums=True)
        while sender.poll(write.ticket) is WriteState.PENDING:
            pass
        assert sender.poll(write.ticket) is WriteState.DONE
        child.stdin.write("[5, 6]\n")
        child.stdin.flush()
        assert json.loads(child.stdout.readline()) == list(write.digests)
        tickets = [
            sender.write_pages(peer, plan, PageList(range(1, 60), range(1, 60), 1), False) for _ in range(200)
        ]
        child.kill()
        child.wait()
        tickets += [sender.write_pages(peer, plan, PageList([1, 2], [5, 6], 1), False) for _ in range(20)]
        until = time.monotonic() + 20
        states = {sender.poll(each.ticket) for each in tickets}
        while WriteState.PENDING in states and time.monotonic() < until:
            states = {sender.poll(each.ticket) for each in tickets}
        print(f"writes to memory of a dead process: {states} {sender.last_error(peer)}")
        assert WriteState.PENDING not in states
        sender.detach(peer)
        assert int(torch.ones(100, device=devices[0]).sum().item()) == 100
        assert sender.page_digests(plan.src, [1]) == list(write.digests)[:1]
    finally:
        child.kill()
        child.communicate()


def test_a_handle_is_not_opened_where_it_was_made() -> None:
    incarnation = secrets.token_hex(16)
    layout = build_layout({"layers": LAYERS, "dtype": "bfloat16", "page_size": 16}, 8)
    receiver = CudaIpcReceiver(incarnation, 0)
    memory = receiver.allocate(Region.KV, layout.total_bytes)
    assert isinstance(memory, DeviceMemory)
    cuda = CudaRuntime()
    assert cuda.span(memory.address) >= layout.total_bytes
    assert cuda.find(cuda.uuid(0)) == 0
    with pytest.raises(CudaError, match="cudaIpcOpenMemHandle: .*CUDA error"):
        cuda.open(0, b"?" * 64)
    assert int(torch.ones(3, device="cuda:0").sum().item()) == 3  # the error was cleared
    receiver.close()


def test_the_kernel_equals_its_reference_for_odd_shapes() -> None:
    gpu, cpu = torch.device("cuda", 0), torch.device("cpu")
    for dtype, size, layers in (
        ("float32", 2, [(2, 4), (2, 4), (1, 12)]),
        ("uint8", 1, [(1, 3)]),
        ("bfloat16", 16, [(8, 128), (1, 72)]),
        ("bfloat16", 1, [(1, 3), (3, 5)]),
    ):
        config = {"layers": layers, "dtype": dtype, "page_size": size}
        src, dst = build_layout(config, 40), build_layout(config, 50)
        a, found = pattern(src.total_bytes, 3, cpu), []
        from_pages, to_pages = list(range(1, 38)), list(range(49, 12, -1))
        for device in (cpu, gpu):
            b = torch.zeros(dst.total_bytes, dtype=torch.uint8, device=device)
            sums = torch.zeros(len(from_pages), dtype=torch.int64, device=device)
            pages = page_list(from_pages, to_pages, device=device)
            source, target = PagedMemory(src, a.to(device), device), PagedMemory(dst, b, device)
            for planes in (range(1), range(1, len(src.planes))):
                move_pages(source, target, pages, sums, planes, 7)
            found.append((b.cpu(), sums.cpu()))
        assert torch.equal(found[0][0], found[1][0]), dtype
        assert torch.equal(found[0][1], found[1][1]), dtype
