"""Pools of tensor-parallel ranks, each filled with its share of pools that no rank holds as a whole."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from common.checkpoint.gated_delta_config import GatedDeltaConfig
from common.config.transports import transport_kind
from common.kv_cache.gated_delta import GATED_DELTA
from common.kv_cache.plane import HeadGroup, Kept, Plane
from common.kv_cache.pool_layout import PlacedPlane, PoolLayout
from common.kv_cache.pool_spec import PoolSpec
from kv_transfer.transport.base import Memory, ReceiverEndpoint, ReceiverSetup, SenderEndpoint, SenderSetup
from kv_transfer.transport.transport_registry import make_receiver, make_sender
from tests.fakes.loopback import Fabric
from tests.fakes.pools import attention_planes
from tests.fakes.tiny_model import CONFIG
from tests.unit.kv_transfer.rig import LIMITS

SIZES = (1, 2, 4)
PAIRS = [(a, b) for a, b in itertools.product(SIZES, SIZES)]
HYBRID = replace(CONFIG, gated_delta=GatedDeltaConfig(2, 12, 4, 2, grouped_rows=False))
CONVOLUTION = (HeadGroup(4, 2), HeadGroup(4, 2), HeadGroup(8, 2))
FAMILIES = {
    "gqa": attention_planes("target", 2, 8, 4, "bfloat16"),
    "replicated": attention_planes("target", 2, 2, 4, "float32"),
    "latent": (Plane("target", 0, "latent", Kept.PAGED, (18,), "bfloat16"),),
    "state": (
        Plane("target", 0, "conv", Kept.PER_REQUEST, (32, 3), "bfloat16", 0, CONVOLUTION),
        Plane("target", 0, "recurrent", Kept.PER_REQUEST, (8, 4, 2), "float32", 0, (HeadGroup(8, 1),)),
        *attention_planes("target", 1, 4, 4, "bfloat16"),
    ),
    # Twelve value heads of two key heads: with four ranks each key head is on two of them.
    "gated delta": (
        *GATED_DELTA.planes("target", HYBRID, 1, "bfloat16"),
        *attention_planes("target", 1, 4, 4, "bfloat16"),
    ),
    "draft": (
        *attention_planes("target", 2, 4, 4, "bfloat16"),
        *attention_planes("draft", 1, 1, 6, "float32"),
    ),
    "inner axis": (Plane("target", 0, "k", Kept.PAGED, (3, 8), "float32", 1, (HeadGroup(8, 1),)),),
}
TOKENS, SRC_PAGES, DST_PAGES, SRC_SLOTS, DST_SLOTS = 3, 12, 9, 4, 5
SRC, DST = [3, 4, 5, 9, 1], [2, 3, 7, 6, 1]
SRC_SLOT, DST_SLOT = 2, 3
Pools = list[npt.NDArray[np.uint8]]


def layout(spec: PoolSpec, sending: bool, rank: int, size: int) -> PoolLayout:
    stateful = any(plane.kept is Kept.PER_REQUEST for plane in spec.planes)
    slots = (SRC_SLOTS if sending else DST_SLOTS) if stateful else 0
    pages = SRC_PAGES if sending else DST_PAGES
    return PoolLayout(
        fingerprint="m", spec=spec, num_pages=pages, num_slots=slots, tp_rank=rank, tp_size=size
    )


def whole_planes(spec: PoolSpec, sending: bool, seed: int) -> Pools:
    """Each plane as a node with one rank would hold it: [items, tokens, *entry, bytes of a value]."""
    rng = np.random.default_rng(seed)
    shapes = [
        (each.items, _tokens(each), *each.entry, each.plane.item_bytes)
        for each in layout(spec, sending, 0, 1).placed
    ]
    return [rng.integers(0, 256, shape, dtype=np.uint8) for shape in shapes]


def _tokens(placed: PlacedPlane) -> int:
    return TOKENS if placed.plane.kept is Kept.PAGED else 1


def view(memory: memoryview, placed: PlacedPlane) -> npt.NDArray[np.uint8]:
    flat = np.frombuffer(memory, np.uint8)[placed.offset : placed.offset + placed.nbytes]
    return flat.reshape(placed.items, _tokens(placed), *placed.entry, placed.plane.item_bytes)


def share(plane: Plane, whole: npt.NDArray[np.uint8], rank: int, size: int) -> npt.NDArray[np.uint8]:
    """Return what a rank holds of a plane by definition: its own heads of each group."""
    if not plane.groups:
        return whole
    index: list[int] = []
    base = 0
    for group in plane.groups:
        first = rank * group.heads // size
        last = first + max(1, group.heads // size)
        index += range(base + first * group.width, base + last * group.width)
        base += group.heads * group.width
    return whole.take(index, axis=2 + plane.axis)


def sender_of(transport: str, fabric: Fabric | None, name: str) -> SenderEndpoint:
    if fabric is not None:
        return fabric.sender(name)
    kind = transport_kind(transport)
    return make_sender(kind.sender, SenderSetup(name, kind.options(), LIMITS))


def receiver_of(transport: str, fabric: Fabric | None, name: str) -> ReceiverEndpoint:
    if fabric is not None:
        return fabric.receiver(name)
    kind = transport_kind(transport)
    setup = ReceiverSetup(name, kind.options(), LIMITS, "127.0.0.1", 0, None)
    return make_receiver(kind.receiver, setup)


def fill_shares(memory: Memory, layout: PoolLayout, whole: Pools) -> None:
    """Write a rank's share of whole planes into its pool."""
    assert isinstance(memory, memoryview)
    for placed, plane in zip(layout.placed, whole, strict=True):
        view(memory, placed)[:] = share(placed.plane, plane, layout.tp_rank, layout.tp_size)


def expect_shares(
    pools: Iterable[tuple[Memory, PoolLayout]], source: Pools, before: Pools, sent: bool
) -> None:
    """Expect that every decode rank holds its share of the source where it was sent, and is unchanged elsewhere."""
    for memory, shape in pools:
        assert isinstance(memory, memoryview)
        rank, size = shape.tp_rank, shape.tp_size
        for number, placed in enumerate(shape.placed):
            wanted = share(placed.plane, before[number], rank, size).copy()
            theirs = share(placed.plane, source[number], rank, size)
            if sent and placed.plane.kept is Kept.PAGED:
                wanted[DST] = theirs[SRC]
            elif sent:
                wanted[DST_SLOT] = theirs[SRC_SLOT]
            np.testing.assert_array_equal(view(memory, placed), wanted, placed.plane.where)
