"""Prompt steps of four requests under graphs on a GPU, compared with eager ones: for every backend."""

from __future__ import annotations

from typing import Any

import torch

from common.engine.forward.batch import CaptureHiddenMode
from common.engine.graphs.admission import Fallback
from common.engine.graphs.backends.base import Backend
from common.engine.graphs.spec import ShapeKey
from tests.unit.engine.graphs.rig import DeviceDriver, extend_driver, model, sequences

CLOSE: dict[str, Any] = {"atol": 1e-3, "rtol": 0.0}
IDS = sequences([60, 41, 23, 9])
STEPS = [
    ([0, 1], [20, 7]),
    ([0, 2, 1], [5, 3, 8]),
    ([3], [8]),
    ([0, 1, 2], [28, 17, 20]),
    ([0], [7]),
    ([1, 3], [9, 1]),
]


def check_prompt_replays(
    backend: Backend, buckets: tuple[int, ...], poisoned: bool, aux: tuple[int, ...], unbroken: ShapeKey
) -> None:
    """Rows A1, A6, C3: below, at and above the captured maximum, shrinking and growing, free of poison."""
    gpu = torch.device("cuda")
    eager = DeviceDriver(model(aux, device=gpu), IDS, 16)
    driver, extend = extend_driver(
        IDS, backend, buckets, page_size=16, poisoned=poisoned, aux=aux, device=gpu, unbroken=unbroken
    )
    small = unbroken.tokens
    assert all(row.breaks == (0 if row.tokens <= small else 2) for row in extend.graphs.rows)
    for rows, lengths in STEPS:
        expected = eager.run(rows, lengths, hidden_mode=CaptureHiddenMode.FULL)
        actual = driver.run(rows, lengths, hidden_mode=CaptureHiddenMode.FULL)
        torch.testing.assert_close(actual.logits, expected.logits, **CLOSE)
        torch.testing.assert_close(actual.hidden, expected.hidden, **CLOSE)
        assert torch.equal(actual.logits.argmax(-1), expected.logits.argmax(-1))
    assert extend.graphs.counters.fallbacks == {Fallback.TOO_LARGE: 1}
