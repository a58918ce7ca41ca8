"""The training loop of the vision model: tower, projector and language model together, on answers only.

Optimizers and schedule are those of the target (Muon and AdamW, a learning rate that follows the clock).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlavaForConditionalGeneration

from deploy.tiny_models.muon import Muon
from deploy.tiny_models.trainer import PRINT_EVERY, SYNC_EVERY, Outcome, Settings, rate_at
from deploy.tiny_models.vision.batches import Batch, merged_embeddings
from deploy.tiny_models.vision.checkpoint import language_model


def optimizers(model: LlavaForConditionalGeneration, lr: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the layers of both towers, AdamW for everything else."""
    named = list(model.named_parameters())
    inside = [p for name, p in named if ".layers." in name and p.ndim == 2]
    chosen = {id(p) for p in inside}
    rest = [p for _, p in named if id(p) not in chosen]
    return [Muon(inside, lr=lr), torch.optim.AdamW(rest, lr=lr, betas=(0.9, 0.95), weight_decay=0.0)]


def autocast(device: torch.device) -> AbstractContextManager[object]:
    """Return a bf16 autocast context on CUDA, otherwise a null context."""
    return torch.autocast("cuda", torch.bfloat16) if device.type == "cuda" else nullcontext()


def train(model: LlavaForConditionalGeneration, batches: Iterator[Batch], settings: Settings) -> Outcome:
    """Train in place for `settings.seconds`."""
    model.to(settings.device).train()  # type: ignore[arg-type]  # the stubs of transformers bind it wrongly
    opts = optimizers(model, settings.lr)
    # untimed: warm-up
    _loss(model, next(batches), settings.device).backward()  # type: ignore[no-untyped-call]
    start = printed = settings.clock()
    steps = tokens = 0
    loss_value = first_loss = float("nan")
    while (progress := (settings.clock() - start) / settings.seconds) < 1.0:
        for opt in opts:
            opt.zero_grad(set_to_none=True)
            for group in opt.param_groups:
                group["lr"] = settings.lr * rate_at(progress)
        batch = next(batches)
        loss = _loss(model, batch, settings.device)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for opt in opts:
            opt.step()
        steps += 1
        tokens += batch.ids.numel()
        if steps % SYNC_EVERY == 1 or settings.device.type == "cpu":
            loss_value = loss.item()
            first_loss = loss_value if steps == 1 else first_loss
            if loss_value != loss_value:
                raise FloatingPointError(f"the loss is not a number at step {steps}: lower --lr")
            now = settings.clock()
            if now - printed >= PRINT_EVERY:
                printed = now
                print(f"{now - start:6.1f} s  step {steps:6d}  loss {loss_value:.4f}", flush=True)
    model.train(False)
    return Outcome(settings.clock() - start, steps, tokens, loss_value, first_loss)


def _loss(model: LlavaForConditionalGeneration, batch: Batch, device: torch.device) -> Tensor:
    with autocast(device):
        embeds = merged_embeddings(model, batch.ids, batch.pixels)
        logits = language_model(model)(inputs_embeds=embeds[:, :-1], use_cache=False).logits
    weights = batch.weights[:, 1:]
    losses = F.cross_entropy(logits.float().flatten(0, 1), batch.ids[:, 1:].flatten(), reduction="none")
    return (losses * weights.flatten()).sum() / weights.sum()
