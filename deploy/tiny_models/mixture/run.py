"""The parts of a training run of a model with experts: target, MTP module, EAGLE-3 head, measurements."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer

from deploy.tiny_models import model_card
from deploy.tiny_models.corpus import DocumentSource
from deploy.tiny_models.drafts import draft_card, files
from deploy.tiny_models.drafts.draft_trainer import frequent_tokens, readings
from deploy.tiny_models.drafts.draft_trainer import train as train_draft
from deploy.tiny_models.drafts.features import Shared
from deploy.tiny_models.drafts.heads import Eagle3Head, Head
from deploy.tiny_models.drafts.measure import Acceptance, measure
from deploy.tiny_models.greedy_eval import Score, Suite, evaluate
from deploy.tiny_models.language_model import LanguageModel
from deploy.tiny_models.mixture import checkpoint
from deploy.tiny_models.mixture.mtp_head import MtpHead
from deploy.tiny_models.mixture.shapes import (
    SMOKE_SHAPE,
    Config,
    Family,
    Shape,
    eagle3_config,
    new_model,
)
from deploy.tiny_models.trainer import Replay, replayed, train
from deploy.tiny_models.training_loop import Outcome, Training


@dataclass(frozen=True, slots=True)
class Target:
    """The trained language model."""

    config: Config
    model: LanguageModel
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class Run:
    """The settings of a run."""

    family: Family
    out: Path
    training: Training
    count: int  # problems per suite
    vocabulary: Tokenizer
    command: str

    @property
    def directory(self) -> Path:
        """The directory of the target and its MTP module."""
        return self.out / self.family.directory

    def train_target(self, seconds: float, smoke: bool) -> Target:
        """Train the language model and round it as its checkpoint stores it."""
        config = self.family.config(SMOKE_SHAPE if smoke else Shape(), self.vocabulary)
        model = new_model(self.family, config, self.training.seed)
        print(f"{model_card.parameters(model) / 1e6:.2f} M parameters on {self.training.device}", flush=True)
        with self._batches(self.training.seed, self.training.batch_tokens) as batches:
            outcome = train(model, batches, self.training.settings(seconds))
        print(f"trained: {outcome}", flush=True)
        model.requires_grad_(False)
        checkpoint.round_as_stored(self.family, model)
        return Target(config, model, outcome)

    def train_mtp(self, target: Target, seconds: float, steps: int) -> MtpHead | None:
        """Train the module for `steps` steps of repeated use; None for a family without one."""
        if not self.family.has_mtp:
            return None
        torch.manual_seed(self.training.seed + 1)
        head = MtpHead(self.family.text(target.config)).to(self.training.device)
        head.start(target.model.model.norm.weight)
        self._train_draft(head, target, seconds, steps, self.training.seed + 1)
        return head

    def train_eagle3(self, target: Target, seconds: float, steps: Sequence[int]) -> None:
        """Train an EAGLE-3 head, write its directory and measure it."""
        config = eagle3_config(self.family.text(target.config))
        head = files.new_head(config, self.training.seed + 2).to(self.training.device)
        assert isinstance(head, Eagle3Head)
        looked_at = DocumentSource(self.vocabulary, self.training.seed + 2).batches(8_192)
        chosen = frequent_tokens(looked_at, config["draft_vocab_size"])
        head.choose_vocabulary(Shared.of(target.model), torch.tensor(chosen, device=self.training.device))
        outcome = self._train_draft(head, target, seconds, max(steps), self.training.seed + 2)
        directory = self.out / f"{self.family.directory}-eagle3"
        files.save(directory, head, config, self.directory)
        _, head = files.load_head(directory)
        card = draft_card.Card(
            "eagle3",
            model_card.parameters(head),
            max(steps),
            outcome,
            model_card.machine(self.training.device),
            self.command,
            self.family.directory,
        )
        draft_card.write(directory, card)
        draft_card.write_figures(
            directory, self._acceptance(head.to(self.training.device), target.model, steps)
        )

    def save(self, target: Target, mtp: MtpHead | None) -> None:
        """Write the target's directory, before it is measured: a time limit must not lose the weights."""
        config = target.config
        checkpoint.save(self.directory, self.family, config, target.model, mtp, self.vocabulary)
        model_card.write(self.directory, self._card(target, ""), [])

    def measure(self, target: Target, steps: Sequence[int]) -> None:
        """Score what was written, and write the model card."""
        model, module = checkpoint.load(self.directory, self.family)
        model.to(self.training.device)
        more = ""
        if module is not None:
            measured = self._acceptance(module.to(self.training.device), model, steps)
            more = _accept_lengths(model_card.parameters(module), measured)
        scores: list[Score] = []
        for suite in (
            Suite("chat", "chat", 0, self.count),
            Suite("8-shot document", "completions", 8, self.count),
        ):
            scores.append(evaluate(model, self.vocabulary, suite))
            print(f"{suite.name}: {scores[-1].value:.4f} of {suite.count}", flush=True)
            model_card.write(self.directory, self._card(target, more), scores)

    def _card(self, target: Target, more: str) -> model_card.Card:
        return model_card.Card(
            model_card.parameters(target.model),
            target.outcome,
            model_card.machine(self.training.device),
            self.command,
            f"tandem {self.family.directory}",
            f"A {self.family.architecture}",
            more,
        )

    def _train_draft(self, head: Head, target: Target, seconds: float, steps: int, seed: int) -> Outcome:
        with self._batches(seed, self.training.batch_tokens // 2) as batches:
            read = readings(batches, self.training.device)
            outcome = train_draft(head, target.model, read, self.training.settings(seconds), steps)
        print(f"trained: {outcome}", flush=True)
        return outcome

    def _batches(self, seed: int, tokens: int) -> AbstractContextManager[Replay]:
        return replayed(self.vocabulary, seed, tokens, self.training.workers)

    def _acceptance(self, head: Head, model: LanguageModel, steps: Sequence[int]) -> list[Acceptance]:
        rows = []
        for row in measure(head, model, self.vocabulary, self.count, steps):
            print(f"{row.suite}, {row.steps} steps: {row.length:.3f} of at most {row.most:.3f}", flush=True)
            rows.append(row)
        return rows


def _accept_lengths(parameters: int, measured: Sequence[Acceptance]) -> str:
    """Return the section of the model card about the MTP module."""
    rows = "".join(
        f"| {one.suite} | {one.count} | {one.steps} | {one.length:.3f} | {one.most:.3f} |\n"
        for one in measured
    )
    return f"""
## Accept length of the MTP module

One module of {parameters / 1e6:.2f} M parameters drafts all steps; later steps read its own output after `mtp.norm`.
The accept length is the number of tokens per verify step, bonus included: greedy chain, held-out problems, the target's
own greedy text. "Most" is the accept length of a draft that is always right: answers end in the middle of a round.

| suite | problems | steps | accept length | most |
|---|---|---|---|---|
{rows}"""
