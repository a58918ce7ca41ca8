"""Planes, specs and layouts: shapes, recorded offsets, and what is refused."""

from __future__ import annotations

import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.kv_cache.plane import ITEM_BYTES, HeadGroup, Kept, Plane
from common.kv_cache.pool_layout import PLANE_ALIGN, PoolLayout
from common.kv_cache.pool_spec import PoolSpec, pool_spec
from tests.fakes.pools import attention_planes, layers_layout
from tests.fakes.tiny_model import CONFIG

CONVOLUTION = Plane(
    "target", 0, "conv", Kept.PER_REQUEST, (64, 3), "bfloat16", 0, (HeadGroup(4, 8), HeadGroup(8, 4))
)
LATENT = Plane("target", 1, "latent", Kept.PAGED, (24,), "float32")


@given(
    st.sampled_from(sorted(ITEM_BYTES)),
    st.integers(1, 64),
    st.integers(1, 50),
    st.lists(st.tuples(st.sampled_from([1, 2, 8]), st.integers(1, 64)), min_size=1, max_size=4),
    st.sampled_from([(0, 1), (1, 2), (3, 4)]),
)
def test_planes_are_aligned_disjoint_and_inside(
    dtype: str, page_size: int, num_pages: int, layers: list[tuple[int, int]], tp: tuple[int, int]
) -> None:
    shape = layers_layout("m", dtype, page_size, num_pages, layers, *tp)
    names = [(each.plane.layer, each.plane.name) for each in shape.planes]
    assert names == [(layer, name) for layer in range(len(layers)) for name in ("k", "v")]
    end = 0
    for each in shape.planes:
        assert each.offset >= end
        assert each.offset % PLANE_ALIGN == 0
        assert each.nbytes == num_pages * page_size * math.prod(each.entry) * ITEM_BYTES[dtype]
        end = each.offset + each.nbytes
    assert shape.total_bytes >= end
    wire = msgspec.msgpack.encode(shape)
    assert msgspec.msgpack.decode(wire, type=PoolLayout) == shape


@pytest.mark.parametrize(
    ("layout", "offsets", "sizes", "total"),
    [
        (
            layers_layout("m", "bfloat16", 16, 100, [(8, 128), (8, 128), (2, 64)]),
            [0, 3276800, 6553600, 9830400, 13107200, 13516800],
            [32768] * 4 + [4096] * 2,
            13926400,
        ),
        (
            layers_layout("m", "float32", 4, 7, [(2, 16), (2, 16), (2, 16)]),
            [0, 4096, 8192, 12288, 16384, 20480],
            [512] * 6,
            24576,
        ),
        (
            layers_layout("m", "float32", 16, 513, [(2, 32), (4, 32)], 1, 2),
            [0, 1052672, 2105344, 4206592],
            [2048, 2048, 4096, 4096],
            6307840,
        ),
    ],
)
def test_bytes_lie_where_they_did_before_planes_were_values(
    layout: PoolLayout, offsets: list[int], sizes: list[int], total: int
) -> None:
    assert [each.offset for each in layout.planes] == offsets
    assert [each.page_bytes for each in layout.planes] == sizes
    assert layout.total_bytes == total
    assert layout.page_bytes == sum(sizes)


def test_a_spec_is_a_function_of_the_configs() -> None:
    spec = pool_spec(CONFIG, CONFIG, 4, "float32")
    half = len(spec.planes) // 2
    assert [each.owner for each in spec.planes] == ["target"] * half + ["draft"] * half
    assert spec.token_bytes == 2 * 2 * CONFIG.num_layers * CONFIG.num_kv_heads * CONFIG.head_dim * 4
    assert spec.page_bytes == 4 * spec.token_bytes
    layout = PoolLayout(fingerprint="m", spec=spec, num_pages=9)
    assert layout.page_bytes == spec.page_bytes
    assert [each.plane for each in layout.of("draft")] == list(spec.planes[half:])


def test_planes_of_a_target_layer_are_stored_with_it_and_those_of_a_draft_never() -> None:
    planes = (*attention_planes("target", 1, 2, 4, "float32"), LATENT)
    spec = PoolSpec(2, planes + attention_planes("draft", 1, 2, 4, "bfloat16"))
    layout = PoolLayout(fingerprint="m", spec=spec, num_pages=4)
    assert [layout.stored(layer) for layer in range(3)] == [2, 3, 3]


def test_planes_have_their_own_shapes_dtypes_and_number_of_entries() -> None:
    spec = PoolSpec(2, (CONVOLUTION, LATENT))
    layout = PoolLayout(fingerprint="m", spec=spec, num_pages=5, num_slots=3, tp_rank=1, tp_size=2)
    conv, latent = layout.placed
    assert (conv.items, conv.entry, conv.page_bytes) == (3, (32, 3), 32 * 3 * 2)
    assert (latent.items, latent.entry, latent.page_bytes) == (5, (24,), 2 * 24 * 4)
    assert layout.planes == (latent,)
    assert spec.token_bytes == 24 * 4  # state per request is not included


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"dtype": "int3"}, "KV dtype 'int3' is not one of"),
        ({"scale": 0.75}, "scale 0.75 is not a power of two"),
        ({"axis": 2}, "axis 2 of an entry with 2 axes"),
        ({"groups": (HeadGroup(4, 8),)}, "its groups hold 32 values, axis 0 has 64"),
    ],
)
def test_a_plane_must_agree_with_itself(changes: dict[str, object], says: str) -> None:
    fields = msgspec.structs.asdict(CONVOLUTION) | changes
    with pytest.raises(ValueError, match=f"target layer 0 conv: {says}"):
        Plane(**fields)
    wire = msgspec.msgpack.encode(list(fields.values()))
    with pytest.raises(msgspec.ValidationError, match=says):
        msgspec.msgpack.decode(wire, type=Plane)


def test_a_layout_refuses_what_cannot_be_divided_or_kept() -> None:
    with pytest.raises(ValueError, match="target layer 0 k: 8 heads cannot be split over 3 ranks"):
        layers_layout("m", "float32", 2, 4, [(8, 4)], 0, 3)
    with pytest.raises(ValueError, match="tp_rank 2 is not below tp_size 2"):
        layers_layout("m", "float32", 2, 4, [(8, 4)], 2, 2)
    with pytest.raises(ValueError, match="1 slots leave none besides padding slot 0"):
        PoolLayout(fingerprint="m", spec=PoolSpec(2, (CONVOLUTION,)), num_pages=4, num_slots=1)
    with pytest.raises(ValueError, match="names a plane twice"):
        PoolSpec(2, (LATENT, LATENT))
