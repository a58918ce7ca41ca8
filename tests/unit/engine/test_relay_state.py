"""The relay row: written as a whole, and unaffected by other batches."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import torch
from msgspec.structs import replace
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from common.engine.forward.draft_inputs import DraftInput
from common.engine.state.draft_row import DraftRow, DraftShape
from common.engine.state.relay_state import RelayState
from common.engine.state.state_rows import WindowShape
from common.messages.generation import SamplingParams

SHAPE = DraftShape(topk=2, hidden=3, vocab=64)
HIDDEN = torch.tensor([1.5, -2.25, 1e-3])
DRAFT = DraftRow((0.5, 0.25), (7, 8), HIDDEN.view(torch.uint8).numpy().tobytes())
SAMPLING = SamplingParams(max_tokens=9, temperature=0.5, top_p=0.75, top_k=11, min_p=0.125, seed=77)
JUNK = 9


def columns(relay: RelayState) -> dict[str, Tensor]:
    own = {name: getattr(relay, name) for name in ("last_token", "seq_len", "rope_delta")}
    parts = (relay.sampling, relay.draft)
    return own | {field.name: getattr(part, field.name) for part in parts for field in fields(part)}


def junk() -> RelayState:
    relay = RelayState.allocate(2, 64, torch.device("cpu"), SHAPE)
    for column in columns(relay).values():
        column.fill_(JUNK)
    return relay


def test_a_row_is_set_whole() -> None:
    """Hand-over, resume and migration rely on it, whoever had the row before. Other rows are unchanged."""
    relay = junk()
    relay.write_row(1, [3, 4, 5, 6], 1, replace(SAMPLING, logprob_ids=(5, 6)), DRAFT, rope_delta=-2)
    row = {name: column[1].tolist() for name, column in columns(relay).items()}
    # Only as many are read as the request has: the others stay.
    assert row.pop("logprob_ids")[:2] == [5, 6]
    assert row == {
        "last_token": 6,
        "seq_len": 3,
        "rope_delta": -2,
        "temperature": 0.5,
        "top_p": 0.75,
        "top_k": 11,
        "min_p": 0.125,
        "seed": 77,
        "draft_topk_probs": [0.5, 0.25],
        "draft_topk_ids": [7, 8],
        "hidden": HIDDEN.tolist(),
    }
    for column in columns(relay).values():
        assert (column[[0, 2]] == JUNK).all()


class _Copies(TorchDispatchMode):
    """Keeps the dimensions of every source that is copied."""

    def __init__(self) -> None:
        super().__init__()
        self.dims: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket is torch.ops.aten.copy_:
            self.dims.append(args[1].dim())
        return func(*args, **(kwargs or {}))


def test_a_row_is_set_without_waiting_for_the_device() -> None:
    """On a GPU `column[row] = number` copies the number from pageable memory, which waits for the running step."""
    window = WindowShape({0: 4}, 2, torch.float32)
    relay = RelayState.allocate(2, 64, torch.device("cpu"), SHAPE, window)
    bias = ((3, 0.5),)
    adjusted = replace(
        SAMPLING, presence_penalty=0.5, frequency_penalty=0.5, repetition_penalty=1.5, logit_bias=bias
    )
    for sampling in (SAMPLING, adjusted, SAMPLING):
        with _Copies() as copies:
            relay.write_row(1, [3, 4, 5, 6], 1, sampling, DRAFT, slot=1)
        assert copies.dims
        assert 0 not in copies.dims


def test_a_row_without_images_has_no_rotary_delta() -> None:
    relay = junk()
    relay.write_row(2, [3, 4], 1, SAMPLING, DRAFT)
    assert relay.rope_delta.tolist() == [JUNK, JUNK, 0]


def test_padding_rows_stay_zero_whatever_a_batch_has_for_them() -> None:
    """Row 0 is gathered as a request without tokens, so what a padded batch computes for it must not be stored."""
    relay = RelayState.allocate(2, 64, torch.device("cpu"), SHAPE)
    state = DraftInput.zeros(2, 2, 3, torch.float32, torch.device("cpu"))
    for column in (state.draft_topk_probs, state.draft_topk_ids, state.hidden):
        column.fill_(5)
    relay.write_draft(torch.tensor([2, 0]), state)
    for column in (relay.draft.draft_topk_probs, relay.draft.draft_topk_ids, relay.draft.hidden):
        assert not column[0].any()
        assert not column[1].any()
        assert (column[2] == 5).all()
