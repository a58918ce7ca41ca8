"""Snapshots of states in the prefix cache: which one is reused, replaced and dropped."""

from __future__ import annotations

import pytest

from common.kv_cache.page_space import PageSpace, as_keys
from common.kv_cache.radix_cache import Keys, RadixCache
from common.kv_cache.snapshots import Snapshots

PAGE, GRID = 2, 4


def space(pages: int = 20, snapshots: int = 2, slots: int = 4) -> PageSpace:
    """Slots 1 to `slots` are for requests, those after them for snapshots."""
    kept = Snapshots(range(slots + 1, slots + 1 + snapshots))
    return PageSpace(PAGE, pages + 1, RadixCache(PAGE, kept), num_slots=slots + 1, grid=GRID)


def text(*tokens: int) -> Keys:
    return as_keys(tokens)


def serve(pages: PageSpace, keys: Keys) -> tuple[int, list[tuple[int, int]]]:
    """Compute and commit a prompt; return how many tokens were cached, and where states were saved."""
    lease = pages.lease(keys, pages.pages_for(len(keys)), len(keys) - 1)
    assert lease is not None
    cached, saves = lease.cached_tokens, lease.state.saves
    assert (lease.state.restore > 0) == (cached > 0)
    lease.state.restored()
    lease.commit(keys)
    lease.release()
    pages.check_integrity()
    assert pages.cache.snapshots.writing == 0
    return cached, saves


def test_a_prompt_saves_its_last_border_and_later_ones_continue_there() -> None:
    pages = space()
    assert serve(pages, text(*range(9))) == (0, [(8, 5)])
    assert serve(pages, text(*range(9))) == (8, [])
    assert serve(pages, text(*range(14))) == (8, [(12, 6)])
    assert serve(pages, text(*range(12))) == (8, []), "the last token is always computed"


def test_a_branch_point_is_saved_by_the_second_prompt_and_used_by_the_third() -> None:
    """Pages alone would have matched further: up to the last border in them."""
    pages = space(snapshots=4)
    assert serve(pages, text(*range(20))) == (0, [(16, 5)])
    assert serve(pages, text(*range(11), *range(50, 55))) == (0, [(8, 6), (12, 7)])
    assert serve(pages, text(*range(10), *range(70, 73))) == (8, [(12, 8)])
    assert serve(pages, text(*range(19))) == (16, [])


def test_slots_of_skipped_saves_are_given_back_once() -> None:
    """Another request computed a part of the prompt meanwhile."""
    pages = space(snapshots=2)
    lease = pages.lease(text(*range(13)), pages.pages_for(13), 12)
    assert lease is not None
    lease.state.set_aside([4])
    assert [tokens for tokens, _ in lease.state.saves] == [12, 4]
    lease.state.skip(4)
    assert [tokens for tokens, _ in lease.state.saves] == [12]
    assert pages.cache.snapshots.writing == 1
    lease.release()
    assert pages.cache.snapshots.writing == 0
    pages.check_integrity()


def test_short_prompts_save_nothing() -> None:
    assert serve(space(), text(1, 2, 3, 4)) == (0, [])


def test_a_duplicate_is_freed() -> None:
    """Two prompts save the same border at once; the tree keeps one state."""
    pages, keys = space(), text(*range(9))
    first, second = (pages.lease(keys, 5, 8) for _ in range(2))
    assert first is not None
    assert second is not None
    assert (first.state.saves, second.state.saves) == ([(8, 5)], [(8, 6)])
    for lease in (first, second):
        lease.commit(keys)
        lease.release()
    assert (pages.cache.snapshots.attached, pages.cache.snapshots.writing) == (1, 0)
    pages.check_integrity()


def test_the_least_recently_used_snapshot_is_replaced_but_never_one_in_use() -> None:
    pages = space(snapshots=2)
    first, second, third = (text(*range(at, at + 5)) for at in (0, 100, 200))
    serve(pages, first)
    serve(pages, second)
    assert serve(pages, first)[0] == 4
    serve(pages, third)
    assert [serve(pages, each)[0] for each in (first, third)] == [4, 4]
    pinned = [pages.lease(each, 3, 4) for each in (first, third)]
    assert serve(pages, second) == (0, []), "both are about to be copied"
    for lease in pinned:
        assert lease is not None
        lease.state.restored()
        lease.state.restored()
    assert serve(pages, second)[1] != []
    for lease in pinned:
        assert lease is not None
        lease.release()
    pages.check_integrity()


def test_a_prompt_that_ends_early_gives_back_its_slots() -> None:
    pages, keys = space(snapshots=1), text(*range(9))
    lease = pages.lease(keys, 5, 8)
    assert lease is not None
    assert pages.cache.snapshots.writing == 1
    lease.release()
    assert pages.cache.snapshots.writing == 0
    assert serve(pages, keys) == (0, [(8, 5)])


@pytest.mark.parametrize("skips", [False, True], ids=["released", "skipped"])
def test_a_state_that_is_not_restored_after_all_may_be_replaced(skips: bool) -> None:
    """The prompt is aborted before its first forward, or its state comes from elsewhere."""
    pages, keys = space(snapshots=1), text(*range(9))
    serve(pages, keys)
    lease = pages.lease(keys, 5, 8)
    assert lease is not None
    assert lease.state.restore > 0
    if skips:
        lease.state.skip(8)
        assert lease.state.restore == 0
        assert serve(pages, text(*range(50, 59))) == (0, [(8, 5)])
    lease.release()
    pages.check_integrity()
    assert serve(pages, text(*range(70, 79))) == (0, [(8, 5)])


def test_a_state_goes_with_the_last_page_before_it() -> None:
    """Evicting the tail of an edge drops the state at its end; the border of the pages that stay is saved again."""
    pages, keys = space(pages=6), text(*range(9))
    serve(pages, keys)
    taken = pages.allocate(3)
    assert taken is not None
    assert (pages.cache.cached_pages, pages.cache.snapshots.attached) == (3, 0)
    pages.free(taken)
    assert serve(pages, keys) == (0, [(4, 6), (8, 5)])


def test_a_split_edge_keeps_its_state_at_the_end() -> None:
    pages = space(snapshots=3)
    serve(pages, text(*range(9)))
    serve(pages, text(0, 1, 2, 3, 4, 5, 99, 99, 99))
    assert serve(pages, text(*range(9)))[0] == 8
    assert serve(pages, text(0, 1, 2, 3, 77))[0] == 4


def test_flushing_drops_all_states() -> None:
    pages = space()
    serve(pages, text(*range(9)))
    pages.flush()
    assert pages.cache.snapshots.attached == 0
    assert serve(pages, text(*range(9)))[0] == 0


def test_states_are_named_by_the_tokens_that_they_follow() -> None:
    tree, keys = RadixCache(PAGE, Snapshots(range(1, 4))), text(*range(8))
    tree.insert(keys, [1, 2, 3, 4])
    saved = {tokens: tree.snapshots.allocate() for tokens in (2, 6)}
    for tokens, slot in saved.items():
        tree.save(keys[:tokens], slot)
    tree.match(keys[:4])  # a node without a state
    assert {tokens: each.slot for tokens, each in tree.states(keys).items()} == saved
    assert list(tree.states(keys[:5])) == [2]
    assert tree.states(keys, b"salt") == {}


def test_a_state_of_pages_that_are_not_cached_is_given_up() -> None:
    """They were evicted since, or another prompt took their place."""
    tree, keys = RadixCache(PAGE, Snapshots((1, 2))), text(*range(4))
    tree.insert(keys[:2], [1])
    tree.save(keys, tree.snapshots.allocate())
    assert (tree.snapshots.attached, tree.snapshots.writing) == (0, 0)
    tree.save(keys[:2], tree.snapshots.allocate())
    tree.save(keys, tree.snapshots.allocate())
    assert (tree.snapshots.attached, tree.snapshots.writing) == (1, 0)
    assert list(tree.states(keys)) == [2]


def test_a_state_that_is_saved_again_counts_as_used() -> None:
    tree, first, second = RadixCache(PAGE, Snapshots((1, 2, 3))), text(1, 1), text(2, 2)
    for page, keys in enumerate((first, second), 1):
        tree.insert(keys, [page])
        tree.save(keys, tree.snapshots.allocate())
    tree.save(first, tree.snapshots.allocate())
    assert [tree.snapshots.allocate(), tree.snapshots.allocate()] == [3, 2]
    assert (list(tree.states(first)), list(tree.states(second))) == ([2], [])


def test_mistakes_are_refused() -> None:
    kept = Snapshots((5,))
    made = kept.attach(kept.allocate())
    kept.pin(made)
    assert kept.allocate() == 0
    with pytest.raises(ValueError, match="slot 5 is dropped while it is pinned"):
        kept.drop(made)
    kept.unpin(made)
    with pytest.raises(ValueError, match="unpin without pin"):
        kept.unpin(made)
    with pytest.raises(ValueError, match="add snapshots"):
        PageSpace(2, 5, RadixCache(2), num_slots=3)
