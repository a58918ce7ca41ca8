"""Placement by what nodes say that they hold, with a registry and without sockets."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from common.kv_cache.block_hashes import chain_start, token_bytes
from common.kv_events.wire import CPU, GPU
from router.nodes.history import UNCONFIRMED_SECONDS
from router.nodes.registry import Node
from tests.fakes.placement_rules import DEFAULT_RULES
from tests.unit.router.nodes.test_cache_aware import PROMPT, Fleet

SIZE = DEFAULT_RULES.block_tokens
BLOCKS = chain_start().extended(token_bytes(PROMPT), SIZE).hashes


def fleet_of(nodes: int = 4) -> Fleet:
    fleet = Fleet("cache_events", nodes)
    fleet.placer.history.reported.following.update(node.incarnation for node in fleet.registry)
    return fleet


def expected(fleet: Fleet, node: Node, tokens: Sequence[int] = PROMPT) -> int:
    history, prompt = fleet.placer.history, fleet.prompt([*tokens, 1])
    return history.cached_tokens(history.matches(node.role, prompt), node, prompt)


def test_a_prompt_goes_where_a_node_says_that_it_is() -> None:
    fleet = fleet_of()
    holder = fleet.node("p002")
    fleet.placer.history.reported.stored(holder, GPU, BLOCKS)
    assert expected(fleet, holder) == len(PROMPT)
    assert fleet.place(PROMPT)[0] is holder
    fleet.placer.history.reported.removed(holder, GPU, BLOCKS[8:])
    other = fleet.node("p003")
    fleet.placer.history.reported.stored(other, GPU, BLOCKS[:9])
    assert expected(fleet, holder) == 8 * SIZE
    assert fleet.place(PROMPT)[0] is other


def test_salted_prompts_are_known_by_their_own_hashes() -> None:
    fleet = fleet_of()
    holder, salted = fleet.node("p001"), fleet.prompt(PROMPT, salt=b"tenant")
    fleet.placer.history.reported.stored(holder, GPU, salted.blocks.hashes)
    assert expected(fleet, holder) == 0
    assert fleet.place(PROMPT, salt=b"tenant")[0] is holder


def test_host_memory_counts_until_the_block_is_gone_from_both() -> None:
    fleet = fleet_of()
    told, holder = fleet.placer.history.reported, fleet.node("p002")
    told.stored(holder, GPU, BLOCKS)
    told.stored(holder, CPU, BLOCKS[:4])
    told.removed(holder, GPU, BLOCKS)
    assert expected(fleet, holder) == 4 * SIZE
    told.stored(holder, "FS", BLOCKS)
    assert expected(fleet, holder) == 4 * SIZE, "blocks on other media are not there yet"
    told.removed(holder, CPU, BLOCKS)
    assert expected(fleet, holder) == 0


def test_no_more_blocks_are_kept_of_a_node_than_it_has_room_for() -> None:
    """Whatever it says. A node that names no medium means its device; host memory may be larger than that."""
    fleet = fleet_of()
    told, holder = fleet.placer.history.reported, fleet.node("p002")
    holder.register = replace(holder.register, total_pages=8 * SIZE // holder.register.page_size)
    told.stored(holder, None, BLOCKS)
    assert expected(fleet, holder) == 9 * SIZE
    told.removed(holder, GPU, BLOCKS)
    assert expected(fleet, holder) == 0
    told.stored(holder, CPU, BLOCKS)
    assert expected(fleet, holder) == 9 * SIZE
    holder.load = replace(holder.load, host_total_tokens=12 * SIZE)
    told.stored(holder, CPU, BLOCKS)
    assert expected(fleet, holder) == 13 * SIZE
    told.cleared(holder)
    assert expected(fleet, holder) == 0


def test_what_was_placed_counts_until_the_node_could_have_said_so() -> None:
    fleet = fleet_of()
    prefill, _ = fleet.place(PROMPT)
    assert expected(fleet, prefill) == len(PROMPT), "a sibling of this prompt follows it"
    fleet.clock.now += UNCONFIRMED_SECONDS + 1
    assert expected(fleet, prefill) == 0


def test_a_node_of_which_nothing_is_heard_is_estimated_as_by_cache_aware() -> None:
    fleet = fleet_of()
    prefill, _ = fleet.place(PROMPT)
    fleet.placer.history.reported.following.clear()
    fleet.place(PROMPT)
    fleet.clock.now += UNCONFIRMED_SECONDS + 1
    assert expected(fleet, prefill) == len(PROMPT)


def test_a_stored_block_is_no_longer_a_guess() -> None:
    fleet = fleet_of()
    prefill, _ = fleet.place(PROMPT)
    fleet.placer.history.reported.stored(prefill, GPU, BLOCKS)
    fleet.placer.history.reported.removed(prefill, GPU, BLOCKS)
    assert expected(fleet, prefill) == 0


def test_a_node_that_clears_leaves_or_is_lost_is_forgotten() -> None:
    fleet = fleet_of()
    history, holder = fleet.placer.history, fleet.node("p000")
    history.reported.stored(holder, GPU, BLOCKS)
    history.reported.stored(holder, CPU, BLOCKS)
    history.reported.cleared(holder)
    assert history.blocks == 0
    history.reported.stored(holder, GPU, BLOCKS)
    history.lost(holder)
    assert history.blocks == 0
    assert holder.incarnation not in history.reported.following


def test_a_flush_forgets_guesses_only() -> None:
    fleet = fleet_of()
    history, holder = fleet.placer.history, fleet.node("p000")
    history.reported.stored(holder, GPU, BLOCKS)
    fleet.place([number + 5000 for number in PROMPT])
    history.flushed()
    assert history.blocks == len(BLOCKS), "the node itself says what a flush has left"


def test_of_too_many_blocks_those_of_unused_prompts_are_forgotten() -> None:
    fleet = fleet_of(2)
    holder = fleet.node("p000")
    holder.register = replace(holder.register, total_pages=64, page_size=SIZE)
    told = fleet.placer.history.reported
    told.stored(holder, GPU, BLOCKS)
    for start in (10_000, 20_000, 30_000, 40_000):
        told.used(holder, BLOCKS)
        other = [number + start for number in PROMPT]
        told.stored(holder, GPU, chain_start().extended(token_bytes(other), SIZE).hashes)
    assert expected(fleet, holder) == len(PROMPT)
