"""The training loop of the target: Muon and AdamW, with a learning rate that follows the clock.

The schedule is a function of elapsed time, not of steps: the score improves only while the rate decays, so a run on a
slow or shared machine must also reach the end of the schedule.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from deploy.tiny_models.corpus import Windows
from deploy.tiny_models.language_model import LanguageModel
from deploy.tiny_models.muon import Muon, is_matrix

WARM_UP = 0.02  # share of the time
DECAY_FROM = 0.15  # share of the time, followed by a linear decay to zero
PRINT_EVERY = 5.0  # seconds
SYNC_EVERY = 10  # steps between reads of the loss, each of which waits for the device


@dataclass(frozen=True, slots=True)
class Settings:
    """The parameters of a run."""

    seconds: float
    lr: float
    device: torch.device
    compile: bool = False
    clock: Callable[[], float] = time.monotonic  # measures `seconds`


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a run."""

    seconds: float
    steps: int
    tokens: int
    loss: float
    first_loss: float


def rate_at(progress: float) -> float:
    """The learning rate relative to its peak, after a share `progress` of the time."""
    if progress < WARM_UP:
        return progress / WARM_UP
    if progress < DECAY_FROM:
        return 1.0
    return max(0.0, (1.0 - progress) / (1.0 - DECAY_FROM))


def optimizers(model: LanguageModel, lr: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the layers, AdamW for embedding, head and norms."""
    inside = [p for p in model.model.layers.parameters() if is_matrix(p)]
    chosen = {id(p) for p in inside}
    rest = [p for p in model.parameters() if id(p) not in chosen]
    on_cuda = model.device.type == "cuda"
    adamw = torch.optim.AdamW(rest, lr=lr, betas=(0.9, 0.95), weight_decay=0.0, fused=on_cuda)
    return [Muon(inside, lr=lr), adamw]


def train(model: LanguageModel, batches: Iterator[Windows], settings: Settings) -> Outcome:
    """Train in place for `settings.seconds`. The clock starts after one untimed pass per window length."""
    model.to(settings.device)  # type: ignore[arg-type]  # the stubs of transformers bind it wrongly
    model.train()
    opts = optimizers(model, settings.lr)
    forward = _Forward(model, settings)
    forward.warm_up(batches)
    start = settings.clock()
    printed, steps, tokens = start, 0, 0
    loss_value = first_loss = float("nan")
    while (progress := (settings.clock() - start) / settings.seconds) < 1.0:
        rate = rate_at(progress)
        for opt in opts:
            for group in opt.param_groups:
                group["lr"] = settings.lr * rate
        batch = next(batches)
        loss = forward(batch)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for opt in opts:
            opt.step()
            opt.zero_grad(set_to_none=True)
        steps += 1
        tokens += batch.ids.size
        if steps % SYNC_EVERY == 1 or settings.device.type == "cpu":
            loss_value = loss.item()
            first_loss = loss_value if steps == 1 else first_loss
            if loss_value != loss_value:
                raise FloatingPointError(f"the loss is not a number at step {steps}: lower --lr")
            now = settings.clock()
            if now - printed >= PRINT_EVERY:
                printed = now
                line = f"{now - start:6.1f} s  step {steps:6d}  {tokens / 1e6:7.2f} M tokens"
                line += f"  {tokens / (now - start) / 1e3:6.0f} k/s  lr x{rate:.2f}  loss {loss_value:.4f}"
                print(line, flush=True)
    model.train(False)
    return Outcome(settings.clock() - start, steps, tokens, loss_value, first_loss)


class _Forward:
    """The weighted next-token loss of a batch, under bf16 autocast on CUDA."""

    def __init__(self, model: LanguageModel, settings: Settings) -> None:
        self._model = model
        self._device = settings.device
        self._logits = torch.compile(self._plain, dynamic=False) if settings.compile else self._plain

    def __call__(self, batch: Windows) -> Tensor:
        ids = torch.from_numpy(batch.ids.astype("int64")).to(self._device, non_blocking=True)
        weights = torch.from_numpy(batch.weights[:, 1:].astype("float32")).to(self._device, non_blocking=True)
        cuda = self._device.type == "cuda"
        with torch.autocast("cuda", torch.bfloat16) if cuda else nullcontext():
            logits = self._logits(ids[:, :-1])
        losses = F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
        return (losses * weights.flatten()).sum() / weights.sum()

    def _plain(self, ids: Tensor) -> Tensor:
        logits: Tensor = self._model(input_ids=ids, use_cache=False).logits
        return logits

    def warm_up(self, batches: Iterator[Windows], tries: int = 8) -> None:
        """Run one pass for each window length among the first batches; if compiling fails, continue without it."""
        seen: set[tuple[int, ...]] = set()
        for _ in range(tries):
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


class Replay:
    """Yields fresh batches while there are any (None means none is ready), otherwise repeats an earlier one."""

    def __init__(self, batches: Iterator[Windows | None], seed: int, keep: int = 4000) -> None:
        self._batches = batches
        self._rng = random.Random(seed)
        self._keep = keep
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
        if len(self._kept) < self._keep:
            self._kept.append(batch)
        else:
            self._kept[self._rng.randrange(self._keep)] = batch
        return batch
