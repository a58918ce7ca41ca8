"""Retracted requests are saved on a stream of their own: the host does not wait, steps go on, the bytes are right."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from common.engine.state.draft_row import DraftShape
from common.engine.state.relay_state import RelayState
from common.node.host_lane import host_lane
from decode_node.backups import Backups
from decode_node.step_plan import Load, Save
from tests.fakes.pools import plain_pool
from tests.fakes.waiting import until

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
PAGES = list(range(1, 41))
BUSY = 4_000_000_000  # cycles, some seconds


def test_a_save_waits_for_the_steps_before_it_and_not_for_those_after_it() -> None:
    device = torch.device("cuda", 0)
    pool = plain_pool(4, 2, 64, 16, 100, torch.bfloat16, device)
    relay = RelayState.allocate(3, 64, device, DraftShape(2, 8, "bfloat16", 64))
    backups = Backups([pool], relay, host_lane(device))
    index = torch.tensor(PAGES, device=device)
    probabilities = torch.tensor([0.5, 0.25], device=device)

    def step_before() -> None:
        for layer in range(4):
            pool.key(layer)[1:41] = layer + 1
            pool.value(layer)[1:41] = index[:, None, None, None].to(torch.bfloat16)
        relay.draft.draft_topk_probs[1] = probabilities

    # Loads all kernels, which waits for the device the first time that each is called, and pins memory.
    step_before()
    backups.save(Save(9, 1, tuple(PAGES)))
    until(lambda: not backups.unsaved())
    backups.load(Load(9, 2, 2, tuple(range(52, 90))))
    backups.forget([9])
    torch.cuda.synchronize()
    for layer in range(4):
        pool.key(layer)[:] = 0
        pool.value(layer)[:] = 0

    torch.cuda._sleep(BUSY)
    step_before()
    backups.save(Save(7, 1, tuple(PAGES)))
    assert backups.unsaved() == {7}, "the host waited for the step before"
    torch.cuda._sleep(4 * BUSY)
    step = torch.cuda.Event()
    step.record()
    until(lambda: not backups.unsaved())
    assert not step.query(), "the save waited for the step after it"
    for layer in range(4):
        pool.key(layer)[1:41] = -1
        pool.value(layer)[1:41] = -1
    backups.load(Load(7, 2, 2, tuple(range(52, 90))))
    backups.forget([7])
    assert not step.query(), "the host waited to load"
    torch.cuda.synchronize()
    for layer in range(4):
        assert (pool.key(layer)[52:90] == layer + 1).all()
        assert (pool.value(layer)[52:90] == index[2:, None, None, None]).all()
    assert relay.draft.draft_topk_probs[2].tolist() == [0.5, 0.25]


def test_a_load_follows_its_save_on_the_device() -> None:
    device = torch.device("cuda", 0)
    pool = plain_pool(2, 2, 64, 16, 100, torch.bfloat16, device)
    relay = RelayState.allocate(3, 64, device)
    backups = Backups([pool], relay, host_lane(device))
    torch.cuda._sleep(BUSY)
    pool.key(1)[1:41] = 3
    backups.save(Save(7, 1, tuple(PAGES)))
    backups.load(Load(7, 2, 0, tuple(range(50, 90))))
    assert backups.unsaved() == {7}
    torch.cuda.synchronize()
    assert (pool.key(1)[50:90] == 3).all()


def test_a_save_needs_no_pinned_memory_where_none_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda", 0)
    pool = plain_pool(2, 2, 64, 16, 100, torch.bfloat16, device)
    relay = RelayState.allocate(3, 64, device)
    backups = Backups([pool], relay, host_lane(device))
    empty = torch.empty

    def unpinned(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        if pin_memory:
            raise RuntimeError("CUDA error: out of memory")
        return empty(*args, **kwargs)

    torch.cuda._sleep(BUSY)
    pool.key(1)[1:41] = 3
    with monkeypatch.context() as patched:
        patched.setattr(torch, "empty", unpinned)
        backups.save(Save(7, 1, tuple(PAGES)))
    pool.key(1)[1:41] = -1
    until(lambda: not backups.unsaved())
    backups.load(Load(7, 2, 0, tuple(range(50, 90))))
    torch.cuda.synchronize()
    assert (pool.key(1)[50:90] == 3).all()
