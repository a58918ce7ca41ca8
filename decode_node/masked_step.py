"""A step whose draws wait for the masks of grammars, which the host computes while the forward runs."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from common.engine.sampling.logit_masks import LogitMasks
from common.node.overlap import Completion
from decode_node.step_plan import Masks
from decode_node.step_result import Launched, StepResult, Trees


class MaskedStep:
    """Launched up to the logits. `draw` launches the rest; nothing else may be launched before it."""

    def __init__(
        self,
        num_rows: int,
        device: torch.device,
        trees: Callable[[], Trees],
        finish: Callable[[LogitMasks], Launched],
    ) -> None:
        """`num_rows`: rows of logits; `finish` draws with the masks and launches what follows."""
        self._num_rows = num_rows
        self._device = device
        self._trees = trees
        self._finish = finish
        self._drawn: Launched | None = None

    def trees(self) -> Trees:
        return self._trees()

    def draw(self, masks: Masks) -> None:
        assert self._drawn is None, "a step draws once"
        words = np.frombuffer(masks.words, dtype=np.int32).reshape(len(masks.rows), -1)
        self._drawn = self._finish(LogitMasks.on_device(words, masks.rows, self._num_rows, self._device))

    @property
    def completion(self) -> Completion:
        return self._after_draw().completion

    def read(self) -> StepResult:
        return self._after_draw().read()

    def _after_draw(self) -> Launched:
        assert self._drawn is not None, "a masked step is drawn before its results are read"
        return self._drawn
