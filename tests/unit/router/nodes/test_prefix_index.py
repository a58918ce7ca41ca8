"""The estimate of cached prefixes: longest prefixes per node, bounds, and what is forgotten first."""

from __future__ import annotations

import math
import tracemalloc
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from router.nodes.prefix_index import BLOCK_BYTES, PLACED, PrefixIndex
from tests.fakes.clock import Clock

MANY = 1000


def index(clock: Clock | None = None, blocks: int = 1000, ttl: float = 100.0) -> PrefixIndex:
    return PrefixIndex(blocks * BLOCK_BYTES, ttl, clock or Clock())


def held(known: PrefixIndex, prompt: list[int], *nodes: str) -> list[int]:
    matches = known.match(prompt)
    return [matches.blocks(node) for node in nodes]


def test_every_node_has_its_own_longest_prefix() -> None:
    known = index()
    known.add("a", [1, 2, 3, 4], MANY)
    known.add("b", [1, 2], MANY)
    known.add("c", [9, 2, 3], MANY)
    assert held(known, [1, 2, 3, 7], "a", "b", "c", "unknown") == [3, 2, 0, 0]
    assert held(known, [], "a") == held(known, [7], "a") == [0]


@given(
    st.lists(st.tuples(st.integers(0, 7), st.lists(st.integers(0, 2), max_size=5)), max_size=20),
    st.lists(st.integers(0, 2), max_size=5),
)
def test_the_matches_are_those_of_the_prompts(placed: list[tuple[int, list[int]]], asked: list[int]) -> None:
    """Compares with sets of prefixes, where a block is named by all tokens before it."""
    known, model = index(), dict[str, set[tuple[int, ...]]]()
    for number, prompt in placed:
        prefixes = [tuple(prompt[: end + 1]) for end in range(len(prompt))]
        known.add(f"n{number}", [hash(each) for each in prefixes], MANY)
        model.setdefault(f"n{number}", set()).update(prefixes)
    matches = known.match([hash(tuple(asked[: end + 1])) for end in range(len(asked))])
    for node, prefixes_of in model.items():
        assert matches.blocks(node) == sum(
            tuple(asked[: end + 1]) in prefixes_of for end in range(len(asked))
        )


def test_the_end_of_the_oldest_prompt_is_forgotten_first() -> None:
    known = index()
    known.add("a", [1, 2, 3], 5)
    known.add("a", [7, 8, 9], 5)
    assert held(known, [1, 2, 3], "a") == [2]
    assert held(known, [7, 8, 9], "a") == [3]
    known.add("a", [1, 2], 5)
    known.add("a", [4, 5], 5)
    assert held(known, [1, 2], "a") == [2], "used again, so newer"
    assert held(known, [7, 8, 9], "a") == [1]


def test_old_blocks_are_forgotten_on_all_nodes() -> None:
    clock = Clock()
    known = index(clock, ttl=10.0)
    for node in "abc":
        known.add(node, [1, 2], MANY)
    clock.now += 5
    known.add("b", [1], MANY)
    clock.now += 6
    for _ in "abc":
        known.match([1])
    assert held(known, [1, 2], "a", "b", "c") == [0, 1, 0]
    assert len(known) == 1


def test_all_nodes_together_stay_within_the_bound() -> None:
    known, rng = index(blocks=100), Random(1)
    for _ in range(500):
        known.add(f"n{rng.randrange(8)}", [rng.randrange(10**9) for _ in range(rng.randrange(40))], MANY)
        assert len(known) <= 100
    assert len(known) > 50


def test_a_source_may_have_more_than_its_share_while_there_is_room() -> None:
    known, large, small = index(blocks=100), list(range(10, 80)), list(range(200, 240))
    known.add("a", [1], MANY)
    known.add("a", [2], MANY, "CPU", math.inf)
    known.add("a", large, MANY, "GPU", math.inf)
    assert held(known, large, "a") == [70], "its other sources left room"
    known.add("b", small, MANY)
    assert held(known, small, "b") == [28], "there was room for more than a quarter"
    known.add("c", small, MANY)
    assert held(known, small, "c") == [20], "a fifth, for which others make room"
    assert len(known) == 100


def test_a_lost_node_and_a_flush_leave_nothing() -> None:
    known = index()
    known.add("a", [1, 2], MANY)
    known.add("b", [1], MANY)
    known.forget("a")
    assert held(known, [1, 2], "a", "b") == [0, 1]
    known.add("c", [1, 2], MANY)
    assert held(known, [1, 2], "a", "b", "c") == [0, 1, 2], "the bit of a lost node is free again"
    known.remove("c", [2, 5], PLACED)
    assert held(known, [1, 2], "c") == [1]
    known.add("c", [7], MANY, "GPU")
    known.clear(PLACED)
    assert held(known, [7], "c") == [1], "another source knows it"
    known.clear("GPU")
    assert len(known) == 0
    assert held(known, [1], "b") == [0]


def test_a_block_takes_no_more_memory_than_is_counted() -> None:
    known, rng = index(blocks=1 << 20), Random(1)
    prompts = [[rng.getrandbits(64) for _ in range(100)] for _ in range(200)]
    tracemalloc.start()
    for number, prompt in enumerate(prompts):
        # Hashes are new objects for each prompt.
        known.add(f"n{number % 4}", [block + 0 for block in prompt], 1 << 20)
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert 0.4 * BLOCK_BYTES < taken / len(known) < BLOCK_BYTES


def test_of_several_sources_the_longest_prefix_counts() -> None:
    known = index()
    known.add("a", [1, 2, 3], MANY)
    known.add("a", [1, 2], MANY, "GPU")
    known.add("b", [1], MANY, "CPU")
    assert held(known, [1, 2, 3], "a", "b") == [3, 1]
    known.remove("a", [1, 2, 3], PLACED)
    assert held(known, [1, 2, 3], "a") == [2]
    known.forget("a", "GPU")
    assert held(known, [1, 2, 3], "a", "b") == [0, 1]
    known.forget("b")
    assert len(known) == 0


def test_a_source_may_keep_its_blocks_for_ever() -> None:
    clock = Clock()
    known = index(clock, ttl=10.0)
    known.add("a", [1], MANY, "GPU", ttl=math.inf)
    known.add("a", [1, 2], MANY)
    clock.now += 1e6
    for _ in range(4):
        known.match([1])
    assert held(known, [1, 2], "a") == [1]


def test_used_blocks_of_a_source_are_forgotten_last() -> None:
    known = index()
    known.add("a", [1, 2], 4, "GPU")
    known.add("a", [3, 4], 4, "GPU")
    known.touch("a", [1, 2], "GPU")
    known.touch("a", [1, 2], "CPU")
    known.add("a", [5, 6], 4, "GPU")
    assert held(known, [1, 2], "a") == [2]
    assert held(known, [3, 4], "a") == [0]
