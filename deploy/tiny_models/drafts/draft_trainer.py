"""The training loop of a draft: soft cross-entropy against the frozen target, averaged over the unrolled steps.

Optimizers and schedule are those of the target (Muon and AdamW, a learning rate that follows the clock). The target
solves every problem, so on answers the corpus is its greedy text and nothing has to be generated.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from deploy.tiny_models.corpus import Windows
from deploy.tiny_models.drafts.features import Features, Shared, target_features
from deploy.tiny_models.drafts.heads import Eagle3Head, Head, Prediction
from deploy.tiny_models.language_model import LanguageModel
from deploy.tiny_models.muon import Muon, is_matrix
from deploy.tiny_models.trainer import PRINT_EVERY, SYNC_EVERY, Outcome, Settings, rate_at


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
    """The weighted mean of the cross-entropy against the target's distribution.

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


def optimizers(head: Head, lr: float) -> list[torch.optim.Optimizer]:
    """Muon for the inner matrices, AdamW for norms, embedding and head."""
    outside = ("lm_head", "embed_tokens")
    named = list(head.named_parameters())
    inside = [p for name, p in named if is_matrix(p) and not any(part in name for part in outside)]
    chosen = {id(p) for p in inside}
    rest = [p for _, p in named if id(p) not in chosen]
    opts: list[torch.optim.Optimizer] = [Muon(inside, lr=lr)]
    return [*opts, torch.optim.AdamW(rest, lr=lr, betas=(0.9, 0.95), weight_decay=0.0)]


def train(
    head: Head, target: LanguageModel, batches: Iterator[Reading], settings: Settings, steps: int
) -> Outcome:
    """Train in place for `settings.seconds`, unrolling `steps` draft steps."""
    head.to(settings.device).train()
    objective = _Objective(head, target, settings.device, steps)
    opts = optimizers(head, settings.lr)
    # untimed: warms up the device
    objective(next(batches)).backward()  # type: ignore[no-untyped-call]
    start = printed = settings.clock()
    taken = tokens = 0
    loss_value = first_loss = float("nan")
    while (progress := (settings.clock() - start) / settings.seconds) < 1.0:
        for opt in opts:
            opt.zero_grad(set_to_none=True)
            for group in opt.param_groups:
                group["lr"] = settings.lr * rate_at(progress)
        batch = next(batches)
        loss = objective(batch)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        for opt in opts:
            opt.step()
        taken += 1
        tokens += batch.ids.numel()
        if taken % SYNC_EVERY == 1 or settings.device.type == "cpu":
            loss_value = loss.item()
            first_loss = loss_value if taken == 1 else first_loss
            if loss_value != loss_value:
                raise FloatingPointError(f"the loss is not a number at step {taken}: lower --lr")
            now = settings.clock()
            if now - printed >= 2 * PRINT_EVERY:
                printed = now
                line = f"{now - start:6.1f} s  step {taken:6d}  {tokens / 1e6:7.2f} M tokens  loss {loss_value:.4f}"
                print(line, flush=True)
    head.train(False)
    return Outcome(settings.clock() - start, taken, tokens, loss_value, first_loss)


class _Objective:
    """The loss of a batch, under bf16 autocast on CUDA."""

    def __init__(self, head: Head, target: LanguageModel, device: torch.device, steps: int) -> None:
        self._head = head
        self._target, self._device, self._steps = target, device, steps
        self._shared = Shared.of(target)
        self._drafted = head.t2d.nonzero().flatten() if isinstance(head, Eagle3Head) else None

    def __call__(self, batch: Reading) -> Tensor:
        cuda = self._device.type == "cuda"
        with torch.autocast("cuda", torch.bfloat16) if cuda else nullcontext():
            features: Features = target_features(self._target, batch.ids, batch.embeds)
            predictions = self._head.unroll(self._shared, features, batch.ids, self._steps)
        losses = [soft_cross_entropy(p, features.logits, batch.weights, self._drafted) for p in predictions]
        return torch.stack(losses).mean()
