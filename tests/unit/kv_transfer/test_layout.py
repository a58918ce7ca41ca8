"""Layouts: shape, alignment, consistency checks, and the sentences of incompatible pairs."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_transfer.layout import ITEM_BYTES, PLANE_ALIGN, KvLayout, compatible
from tests.unit.kv_transfer.rig import layout


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
    shape = KvLayout.build("m", dtype, page_size, num_pages, layers, *tp)
    assert [(p.layer, p.kind) for p in shape.planes] == [
        (i, k) for i in range(len(layers)) for k in ("k", "v")
    ]
    end = 0
    for plane in shape.planes:
        assert plane.offset >= end
        assert plane.offset % PLANE_ALIGN == 0
        pages, tokens, heads, dim = shape.shape(plane)
        assert pages * tokens * heads * dim * shape.item_bytes == shape.plane_bytes(plane)
        assert len(shape.heads(plane)) == heads
        end = plane.offset + shape.plane_bytes(plane)
    assert shape.total_bytes >= end
    wire = msgspec.msgpack.encode(shape)
    assert msgspec.msgpack.decode(wire, type=KvLayout) == shape


def test_build_refuses_what_cannot_be_split() -> None:
    with pytest.raises(ValueError, match="cannot be split over 3 ranks"):
        KvLayout.build("m", "float32", 2, 4, [(8, 4)], 0, 3)
    with pytest.raises(ValueError, match="dtype 'int3'"):
        KvLayout.build("m", "int3", 2, 4, [(8, 4)])


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("kv_heads", 3, "cannot hold 3 heads"),
        ("page_bytes", 1, "not the size of a page"),
        ("offset", 64, "overlaps or is not aligned"),
        ("offset", 0, None),
    ],
)
def test_a_layout_from_the_wire_must_agree_with_itself(field: str, value: int, says: str | None) -> None:
    shape = layout()
    plane = msgspec.structs.replace(shape.planes[0], **{field: value})
    raw = msgspec.msgpack.encode(
        {**msgspec.structs.asdict(shape), "planes": [plane, *shape.planes[1:]]},
    )
    if says is None:
        assert msgspec.msgpack.decode(raw, type=KvLayout) == shape
    else:
        with pytest.raises(msgspec.ValidationError, match=says):
            msgspec.msgpack.decode(raw, type=KvLayout)


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (layout(fingerprint="large"), ["model", "tiny", "large", "same weights"]),
        (
            layout(fingerprint="tiny+abc"),
            ["draft model", "has none", "has abc", "steps and topk of speculation"],
        ),
        (layout(dtype="bfloat16"), ["KV dtype", "float32", "bfloat16", "model.dtype"]),
        (layout(page_size=4), ["page size", "2", "4", "kv.page_size"]),
        (layout(heads=4), ["layer 0", "'k', 2, 4", "'k', 4, 4", "same model"]),
        (
            KvLayout.build("tiny", "float32", 2, 16, [(2, 4)] * 3),
            ["number of KV layers", "2", "3", "drafter"],
        ),
    ],
)
def test_incompatible_pairs_get_a_sentence_with_both_values(other: KvLayout, words: list[str]) -> None:
    sentence = compatible(layout(), other)
    assert sentence is not None
    for word in words:
        assert word in sentence


def test_a_long_fingerprint_is_compared_whole_and_shown_in_part() -> None:
    """Two nodes that draft otherwise serve the same target: the sentence says so, and fits on a screen."""
    ours, theirs = (layout(fingerprint=f"{'a' * 64}+{'b' * 63}{end}") for end in "cd")
    sentence = compatible(ours, theirs)
    assert sentence is not None
    assert sentence.startswith("draft model")
    assert "model.path" not in sentence
    assert "b" * 12 in sentence
    assert "b" * 13 not in sentence
    assert compatible(ours, ours) is None


def test_pool_sizes_and_ranks_may_differ() -> None:
    assert compatible(layout(num_pages=5), layout(num_pages=99)) is None
    four = KvLayout.build("tiny", "float32", 2, 16, [(2, 4), (2, 4)], 1, 4)
    assert compatible(layout(), four) is None
