"""Trains the target: next-token loss on windows of text, with the loop that all tiny models share."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from tokenizers import Tokenizer
from torch import Tensor

from deploy.tiny_models.corpus import DocumentSource, Source, Windows
from deploy.tiny_models.feeder import feed
from deploy.tiny_models.language_model import LanguageModel
from deploy.tiny_models.training_loop import (
    Outcome,
    Settings,
    autocast,
    optimizers,
    train_for,
    weighted_loss,
)

WARM_UP_BATCHES = 8
KEPT_BATCHES = 4000  # that may be repeated


def train(model: LanguageModel, batches: Iterator[Windows], settings: Settings) -> Outcome:
    """Train in place for `settings.seconds`. The clock starts after one untimed pass per window length."""
    model.to(settings.device)
    model.train()
    opts = optimizers(model, settings.lr, lambda name: name.startswith("model.layers."))
    forward = _Forward(model, settings)
    forward.warm_up(batches)
    return train_for(model, opts, batches, forward, lambda batch: batch.ids.size, settings)


class _Forward:
    """The weighted next-token loss of a batch, under bf16 autocast on CUDA."""

    def __init__(self, model: LanguageModel, settings: Settings) -> None:
        self._model = model
        self._device = settings.device
        self._logits = torch.compile(self._plain, dynamic=False) if settings.compile else self._plain

    def __call__(self, batch: Windows) -> Tensor:
        ids = torch.from_numpy(batch.ids.astype("int64")).to(self._device, non_blocking=True)
        weights = torch.from_numpy(batch.weights.astype("float32")).to(self._device, non_blocking=True)
        with autocast(self._device):
            logits = self._logits(ids[:, :-1])
        return weighted_loss(logits, ids, weights)

    def _plain(self, ids: Tensor) -> Tensor:
        logits: Tensor = self._model(input_ids=ids, use_cache=False).logits
        return logits

    def warm_up(self, batches: Iterator[Windows]) -> None:
        """Run one pass for each window length among the first batches; if compiling fails, continue without it."""
        seen: set[tuple[int, ...]] = set()
        for _ in range(WARM_UP_BATCHES):
            batch = next(batches)
            if batch.ids.shape in seen:
                continue
            seen.add(batch.ids.shape)
            try:
                self(batch).backward()  # type: ignore[no-untyped-call]
            except Exception as error:
                if self._logits is self._plain:
                    raise
                print(f"torch.compile failed, going on without: {type(error).__name__}: {error}", flush=True)
                self._logits = self._plain
            self._model.zero_grad(set_to_none=True)


@contextmanager
def replayed(
    tokenizer: Tokenizer,
    seed: int,
    batch_tokens: int,
    workers: int,
    source: type[Source] = DocumentSource,
) -> Iterator[Replay]:
    """Yield endless batches: those of `feed`, and earlier ones while it has none ready."""
    with feed(tokenizer, seed, batch_tokens, workers, source) as fresh:
        yield Replay(fresh, seed)


class Replay:
    """Yields fresh batches while there are any (None means none is ready), otherwise repeats an earlier one."""

    def __init__(self, batches: Iterator[Windows | None], seed: int) -> None:
        self._batches = batches
        self._rng = random.Random(seed)
        self._kept: list[Windows] = []
        self.fresh = 0
        self.again = 0

    def __iter__(self) -> Iterator[Windows]:
        return self

    def __next__(self) -> Windows:
        batch = next(self._batches)
        if batch is None:
            self.again += 1
            return self._rng.choice(self._kept)
        self.fresh += 1
        if len(self._kept) < KEPT_BATCHES:
            self._kept.append(batch)
        else:
            self._kept[self._rng.randrange(KEPT_BATCHES)] = batch
        return batch
