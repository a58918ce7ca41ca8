"""Trains the vision model: tower, projector and language model together, on answers only."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from transformers import LlavaForConditionalGeneration

from deploy.tiny_models.training_loop import (
    Outcome,
    Settings,
    autocast,
    optimizers,
    train_for,
    weighted_loss,
)
from deploy.tiny_models.vision.batches import Batch, merged_embeddings
from deploy.tiny_models.vision.checkpoint import language_model


def train(model: LlavaForConditionalGeneration, batches: Iterator[Batch], settings: Settings) -> Outcome:
    """Train in place for `settings.seconds`. The clock starts after one untimed pass."""
    model.to(settings.device).train()
    opts = vision_optimizers(model, settings.lr)

    def loss_of(batch: Batch) -> Tensor:
        with autocast(settings.device):
            embeds = merged_embeddings(model, batch.ids, batch.pixels)
            logits = language_model(model)(inputs_embeds=embeds[:, :-1], use_cache=False).logits
        return weighted_loss(logits, batch.ids, batch.weights)

    loss_of(next(batches)).backward()  # type: ignore[no-untyped-call]
    return train_for(model, opts, batches, loss_of, lambda batch: batch.ids.numel(), settings)


def vision_optimizers(model: LlavaForConditionalGeneration, lr: float) -> list[torch.optim.Optimizer]:
    """Return Muon for the matrices inside the layers of both towers, AdamW for everything else."""
    return optimizers(model, lr, lambda name: ".layers." in name)
