"""Trains a draft: soft cross-entropy against the frozen target, averaged over the unrolled steps.

The target solves every problem, so on answers the corpus is its greedy text and nothing has to be generated.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from deploy.tiny_models.corpus import Windows
from deploy.tiny_models.drafts.features import Features, Shared, target_features
from deploy.tiny_models.drafts.heads import Eagle3Head, Head, Prediction
from deploy.tiny_models.language_model import LanguageModel
from deploy.tiny_models.training_loop import Outcome, Settings, autocast, optimizers, train_for


class Reading(NamedTuple):
    """One batch as the target reads it."""

    ids: Tensor  # [batch, tokens] int64
    weights: Tensor  # [batch, tokens] float32; weights[:, i] applies to the prediction of ids[:, i]
    embeds: Tensor | None = None  # [batch, tokens, hidden] replaces the embeddings of the ids


def readings(batches: Iterator[Windows], device: torch.device) -> Iterator[Reading]:
    """Move windows of text to the device."""
    for batch in batches:
        ids = torch.from_numpy(batch.ids[:, :-1].astype("int64")).to(device)
        yield Reading(ids, torch.from_numpy(batch.weights[:, :-1].astype("float32")).to(device))


def frequent_tokens(batches: Iterator[Windows], size: int, looked_at: int = 12) -> list[int]:
    """Return the `size` most frequent token ids of the corpus in ascending order; answers count ten times."""
    counts: Counter[int] = Counter()
    for _ in range(looked_at):
        batch = next(batches)
        for token, weight in zip(batch.ids.flatten().tolist(), batch.weights.flatten().tolist(), strict=True):
            counts[token] += weight
    if len(counts) < size:
        raise ValueError(f"only {len(counts)} different tokens occur; the draft vocabulary needs {size}")
    return sorted(token for token, _ in counts.most_common(size))


def soft_cross_entropy(
    prediction: Prediction, target_logits: Tensor, weights: Tensor, drafted: Tensor | None
) -> Tensor:
    """Return the weighted mean of the cross-entropy against the target's distribution.

    `weights[:, i]` applies to the prediction of x[i]. With `drafted` (EAGLE-3's t2d, as ids) the target's distribution
    is taken over these ids only, and rows where the target prefers another token do not count.
    """
    logits, ahead = prediction
    rows = logits.size(1) - ahead
    wanted = target_logits[:, ahead - 1 : ahead - 1 + rows].float()
    weight = weights[:, ahead : ahead + rows]
    if drafted is not None:
        weight = weight * torch.isin(wanted.argmax(-1), drafted)
        wanted = wanted[..., drafted]
    losses = F.cross_entropy(
        logits[:, :rows].float().flatten(0, 1), wanted.softmax(-1).flatten(0, 1), reduction="none"
    )
    return (losses * weight.flatten()).sum() / weight.sum().clamp(min=1e-6)


def draft_optimizers(head: Head, lr: float) -> list[torch.optim.Optimizer]:
    """Return Muon for the inner matrices, AdamW for norms, embedding and head."""
    return optimizers(head, lr, lambda name: "lm_head" not in name and "embed_tokens" not in name)


def train(
    head: Head, target: LanguageModel, batches: Iterator[Reading], settings: Settings, steps: int
) -> Outcome:
    """Train in place for `settings.seconds`, unrolling `steps` draft steps. The clock starts after an untimed pass."""
    head.to(settings.device).train()
    objective = _Objective(head, target, settings.device, steps)
    opts = draft_optimizers(head, settings.lr)
    objective(next(batches)).backward()  # type: ignore[no-untyped-call]
    return train_for(head, opts, batches, objective, lambda batch: batch.ids.numel(), settings)


class _Objective:
    """The loss of a batch, under bf16 autocast on CUDA."""

    def __init__(self, head: Head, target: LanguageModel, device: torch.device, steps: int) -> None:
        self._head = head
        self._target, self._device, self._steps = target, device, steps
        self._shared = Shared.of(target)
        self._drafted = head.t2d.nonzero().flatten() if isinstance(head, Eagle3Head) else None

    def __call__(self, batch: Reading) -> Tensor:
        with autocast(self._device):
            features: Features = target_features(self._target, batch.ids, batch.embeds)
            predictions = self._head.unroll(self._shared, features, batch.ids, self._steps)
        losses = [soft_cross_entropy(p, features.logits, batch.weights, self._drafted) for p in predictions]
        return torch.stack(losses).mean()
