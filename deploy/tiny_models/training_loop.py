"""The training loop that all tiny models share: Muon and AdamW, with a learning rate that follows the clock.

The schedule is a function of elapsed time, not of steps: the score improves only while the rate decays, so a run on a
slow or shared machine must also reach the end of the schedule. A trainer supplies the batches and their loss.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deploy.tiny_models.muon import Muon, is_matrix

WARM_UP = 0.02  # share of the time
DECAY_FROM = 0.15  # share of the time, followed by a linear decay to zero
PRINT_EVERY = 5.0  # seconds
SYNC_EVERY = 10  # steps between reads of the loss, each of which waits for the device

Batch = TypeVar("Batch")


@dataclass(frozen=True, slots=True)
class Settings:
    """The parameters of a run."""

    seconds: float
    lr: float
    device: torch.device
    compile: bool = False
    clock: Callable[[], float] = time.monotonic  # measures `seconds`


@dataclass(frozen=True, slots=True)
class Training:
    """Settings with which all parts of a run are trained."""

    device: torch.device
    seed: int
    lr: float
    batch_tokens: int  # per step
    workers: int  # processes that make batches

    def settings(self, seconds: float) -> Settings:
        """Return the parameters of a part that is trained for `seconds`, but at least for one."""
        return Settings(seconds=max(1.0, seconds), lr=self.lr, device=self.device)


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a run."""

    seconds: float
    steps: int
    tokens: int
    loss: float
    first_loss: float


def device_of(name: str) -> torch.device:
    """Resolve `--device` on this machine."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def rate_at(progress: float) -> float:
    """Return the learning rate relative to its peak, after a share `progress` of the time."""
    if progress < WARM_UP:
        return progress / WARM_UP
    if progress < DECAY_FROM:
        return 1.0
    return max(0.0, (1.0 - progress) / (1.0 - DECAY_FROM))


def optimizers(model: nn.Module, lr: float, is_inside: Callable[[str], bool]) -> list[torch.optim.Optimizer]:
    """Return Muon for the matrices whose names are `is_inside` the layers, AdamW for all other parameters."""
    inside: list[nn.Parameter] = []
    rest: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        (inside if is_matrix(parameter) and is_inside(name) else rest).append(parameter)
    fused = all(parameter.is_cuda for parameter in rest)
    return [
        Muon(inside, lr=lr),
        torch.optim.AdamW(rest, lr=lr, betas=(0.9, 0.95), weight_decay=0.0, fused=fused),
    ]


def autocast(device: torch.device) -> AbstractContextManager[object]:
    """Return a bf16 autocast context on CUDA, otherwise a null context."""
    return torch.autocast("cuda", torch.bfloat16) if device.type == "cuda" else nullcontext()


def weighted_loss(logits: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """Return the mean loss: `logits[:, i]` predicts `ids[:, i + 1]`, which counts `weights[:, i + 1]` times."""
    wanted, weight = ids[:, 1:], weights[:, 1:]
    losses = F.cross_entropy(logits.float().flatten(0, 1), wanted.flatten(), reduction="none")
    return (losses * weight.flatten()).sum() / weight.sum()


def train_for(
    model: nn.Module,
    opts: list[torch.optim.Optimizer],
    batches: Iterator[Batch],
    loss_of: Callable[[Batch], Tensor],
    tokens_of: Callable[[Batch], int],
    settings: Settings,
) -> Outcome:
    """Train `model` in place for `settings.seconds`; gradients of earlier, untimed passes are dropped."""
    model.train()
    model.zero_grad(set_to_none=True)
    start = printed = settings.clock()
    steps = tokens = 0
    loss_value = first_loss = float("nan")
    while (progress := (settings.clock() - start) / settings.seconds) < 1.0:
        batch = next(batches)
        loss = loss_of(batch)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        _step(opts, settings.lr * rate_at(progress))
        steps += 1
        tokens += tokens_of(batch)
        if steps % SYNC_EVERY != 1 and settings.device.type != "cpu":
            continue
        loss_value = loss.item()
        first_loss = loss_value if steps == 1 else first_loss
        if loss_value != loss_value:
            raise FloatingPointError(f"the loss is not a number at step {steps}: lower --lr")
        now = settings.clock()
        if now - printed >= PRINT_EVERY:
            printed = now
            line = f"{now - start:6.1f} s  step {steps:6d}  {tokens / 1e6:7.2f} M tokens"
            line += f"  {tokens / (now - start) / 1e3:6.0f} k/s  lr x{rate_at(progress):.2f}  loss {loss_value:.4f}"
            print(line, flush=True)
    model.train(False)
    return Outcome(settings.clock() - start, steps, tokens, loss_value, first_loss)


def _step(opts: list[torch.optim.Optimizer], lr: float) -> None:
    for opt in opts:
        for group in opt.param_groups:
            group["lr"] = lr
        opt.step()
        opt.zero_grad(set_to_none=True)
