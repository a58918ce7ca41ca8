"""Page transfers between real processes by NIXL: CPU pools (anywhere), one GPU, and two GPUs if there are two."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator, Sequence

import pytest
import torch

from common.errors import ConfigError
from kv_transfer.events import Arrived, PagesFree, RoomFailed
from kv_transfer.pair_plan import Side
from kv_transfer.transport.nixl.agent import load_library
from tests.fakes.transfer_child import pattern
from tests.fakes.transfer_rig import SEED, Rig

GPUS = torch.cuda.device_count()
LAYERS = [(8, 128), (8, 128), (2, 96)]  # the last one has pages of another size


def installed() -> bool:
    try:
        load_library()
    except ConfigError:
        return False
    return True


pytestmark = [
    pytest.mark.skipif(not installed(), reason="nixl is not installed (pip install -e '.[nixl]')"),
    pytest.mark.filterwarnings("default"),
]
ONE = [pytest.mark.gpu, pytest.mark.skipif(GPUS < 1, reason="needs a CUDA device")]
TWO = [pytest.mark.gpu, pytest.mark.skipif(GPUS < 2, reason="needs two CUDA devices")]
PAIRS = [
    ("cpu", "cpu"),
    pytest.param(("cuda:0", "cuda:0"), marks=ONE),
    pytest.param(("cuda:0", "cuda:1"), marks=TWO),
]


@pytest.fixture(params=PAIRS, ids=lambda pair: "-".join(pair))
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    made = Rig("nixl", request.param, layers=LAYERS)
    yield made
    made.close()


def pages_of(memory: torch.Tensor, layout: object, page: int) -> torch.Tensor:
    planes = layout.planes  # type: ignore[attr-defined]
    parts = [memory[p.offset + page * p.page_bytes : p.offset + (page + 1) * p.page_bytes] for p in planes]
    return torch.cat(parts).cpu()


def until(rig: Rig, done: object, seconds: float = 15) -> None:
    end = time.monotonic() + seconds
    while not done():  # type: ignore[operator]
        assert time.monotonic() < end, rig.events
        rig.turn()


def test_from_first_bytes_to_the_death_of_the_sender(rig: Rig) -> None:
    """Bytes arrive only where they belong; damage is found; a stopped sender counts as alive, a killed one does not."""
    source = pattern(rig.src.total_bytes, SEED, "cpu")
    src, dst = [5, 6, 7, 63, 1, 30], [90, 91, 95, 2, 40, 3]
    assert rig.send_room(src, dst)["lost"] == ""
    (arrived,) = [event for event in rig.events if isinstance(event, Arrived)]
    assert len(arrived.record.checksums) == 8 * len(src)
    for a, b in zip(src, dst, strict=True):
        assert torch.equal(pages_of(rig.storage, rig.dst, b), pages_of(source, rig.src, a))
    for page in set(range(rig.dst.num_pages)) - set(dst):
        assert not pages_of(rig.storage, rig.dst, page).any()
    for turn in range(10):
        src = [1 + (turn * 7 + i) % 63 for i in range(30)]
        dst = [1 + (turn * 11 + i * 3) % 95 for i in range(30)]
        assert rig.send_room(src, dst)["lost"] == ""
        assert torch.equal(pages_of(rig.storage, rig.dst, dst[-1]), pages_of(source, rig.src, src[-1]))

    # damage between the last page and the record
    digests = rig.endpoint.page_digests

    def damaged(side: Side, pages: Sequence[int]) -> list[int]:
        plane = rig.dst.planes[-1]
        rig.storage[plane.offset + pages[1] * plane.page_bytes + 17] ^= 4
        return digests(side, pages)

    rig.endpoint.page_digests = damaged  # type: ignore[method-assign]
    rig.events.clear()
    room, rig.next_room = rig.next_room, rig.next_room + 1
    rig.receiver.open(room, (rig.config["sender"],), [4, 9, 6], 0)
    rig.ask("room", room=room, src=[1, 2, 3])
    until(rig, lambda: len(rig.events) >= 2)
    failed, free = rig.events
    assert isinstance(failed, RoomFailed)
    assert "differs from what was sent" in failed.reason
    assert isinstance(free, PagesFree)
    rig.endpoint.page_digests = digests  # type: ignore[method-assign]

    # its pages wait while it is stopped, and are free soon after it was killed
    rig.events.clear()
    sender = rig.config["sender"]
    rig.receiver.open(rig.next_room, (sender,), [3, 4], 0)
    rig.turn()
    rig.child.send_signal(signal.SIGSTOP)
    rig.receiver.abort(rig.next_room, "given up")
    end = time.monotonic() + 0.3
    while time.monotonic() < end:
        rig.turn()
    assert not rig.endpoint.peer_is_dead(sender)
    assert rig.receiver.quarantined_pages == 2
    rig.child.kill()
    rig.child.wait()
    until(rig, lambda: PagesFree(rig.next_room, (3, 4)) in rig.events)
    assert rig.receiver.quarantined_pages == 0
