"""The parts of a training run: the model, its EAGLE-3 head, its standalone draft, scores and accept lengths."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch
from tokenizers import Tokenizer
from transformers import Qwen3ForCausalLM

from deploy.tiny_models import model_card
from deploy.tiny_models.drafts import draft_card, files
from deploy.tiny_models.drafts.draft_trainer import frequent_tokens, readings
from deploy.tiny_models.drafts.draft_trainer import train as train_draft
from deploy.tiny_models.drafts.features import Shared
from deploy.tiny_models.drafts.heads import Eagle3Head
from deploy.tiny_models.drafts.measure import Answered, acceptance
from deploy.tiny_models.drafts.shapes import CHAINED_STEPS, Kind
from deploy.tiny_models.tool_calls import checkpoint, tool_card
from deploy.tiny_models.tool_calls.checkpoint import (
    SMOKE_SHAPE,
    Config,
    Shape,
    config_dict,
    eagle3_config,
    new_model,
    standalone_config,
)
from deploy.tiny_models.tool_calls.conversations import Conversations, exam
from deploy.tiny_models.tool_calls.documents import ConversationSource
from deploy.tiny_models.tool_calls.exam import ToolScore, evaluate
from deploy.tiny_models.trainer import Replay, replayed, train
from deploy.tiny_models.training_loop import Outcome, Training

NAME = "tiny-tools"
EXAM_SEED = 2_024
MEASURED_STEPS = (3, 5)
UNAIDED = ("unaided", "bare")


@dataclass(frozen=True, slots=True)
class Target:
    """The trained model."""

    config: Config
    model: Qwen3ForCausalLM
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class Run:
    """The settings of a run."""

    out: Path
    training: Training
    count: int  # conversations per suite
    vocabulary: Tokenizer
    command: str

    @property
    def directory(self) -> Path:
        """The directory of the model."""
        return self.out / NAME

    def train_target(self, seconds: float, smoke: bool) -> Target:
        """Train the model and write it, before it is scored: a time limit must not lose the weights."""
        config = config_dict(SMOKE_SHAPE if smoke else Shape(), self.vocabulary)
        model = new_model(config, self.training.seed)
        print(f"{model_card.parameters(model) / 1e6:.2f} M parameters on {self.training.device}", flush=True)
        with self._batches(self.training.seed, self.training.batch_tokens) as batches:
            outcome = train(model, batches, self.training.settings(seconds))
            print(f"trained: {outcome}; batches: {batches.fresh} fresh, {batches.again} again", flush=True)
        checkpoint.save(self.directory, model, config, self.vocabulary)
        target = Target(config, checkpoint.load(self.directory), outcome)
        target.model.to(self.training.device)
        tool_card.write(self.directory, self._card(target), [])
        return target

    def score(self, target: Target) -> list[ToolScore]:
        """Hold conversations and write the model card."""
        asked = list(exam(self.count, EXAM_SEED))
        source = Conversations(EXAM_SEED, "heldout")
        bare = [source.draw(UNAIDED, (0.3, 0.7)) for _ in range(max(1, self.count // 4))]
        scores = []
        for name, conversations, thinks in (
            ("tools, thinking", asked, True),
            ("tools, not thinking", asked, False),
            ("word problems without a calculator", bare, True),
        ):
            score = evaluate(target.model, self.vocabulary, name, conversations, thinks)
            scores.append(score)
            print(
                f"{name}: {score.value:.4f} right, {score.valid:.4f} of {score.calls} calls valid, "
                f"{score.expected} of {len(conversations)} as expected, {dict(score.right)} of {dict(score.asked)}"
            )
            for conversation, said in score.wrong[:6]:
                question, wanted = conversation.exchange.question, conversation.exchange.wanted
                print(
                    f"  wrong ({conversation.kind}): {question!r} -> {said[:300]!r}, not {wanted}", flush=True
                )
            tool_card.write(self.directory, self._card(target), scores)
        return scores

    def train_eagle3(self, target: Target, seconds: float) -> None:
        """Train the EAGLE-3 head and write its directory."""
        config = eagle3_config(target.config)
        looked_at = ConversationSource(self.vocabulary, self.training.seed + 1).batches(8_192)
        chosen = frequent_tokens(looked_at, config["draft_vocab_size"])
        self._train_draft("eagle3", config, target, seconds, CHAINED_STEPS, self.training.seed + 1, chosen)

    def train_standalone(self, target: Target, seconds: float) -> None:
        """Train the standalone draft and write its directory."""
        config = standalone_config(target.config)
        self._train_draft("standalone", config, target, seconds, 1, self.training.seed + 2, [])

    def measure(self, target: Target, answered: Sequence[Answered]) -> None:
        """Measure the accept lengths of both drafts over the model's own turns."""
        suite = "turns of tool conversations"
        for kind in ("eagle3", "standalone"):
            directory = self.out / f"{NAME}-{kind}"
            _, head = files.load_head(directory)
            rows = [
                acceptance(suite, head.to(self.training.device), target.model, list(answered), steps)
                for steps in MEASURED_STEPS
            ]
            for row in rows:
                shares = " ".join(f"{share:.3f}" for share in row.per_step)
                print(f"{kind}, {row.steps} steps: {row.length:.3f} of {row.most:.3f} ({shares})", flush=True)
            draft_card.write_figures(directory, rows)

    def _train_draft(
        self,
        kind: Kind,
        config: Config,
        target: Target,
        seconds: float,
        steps: int,
        seed: int,
        drafted: list[int],
    ) -> None:
        head = files.new_head(config, seed).to(self.training.device)
        if isinstance(head, Eagle3Head):
            head.choose_vocabulary(
                Shared.of(target.model), torch.tensor(drafted, device=self.training.device)
            )
        with self._batches(seed, self.training.batch_tokens // 4) as batches:
            read = readings(batches, self.training.device)
            outcome = train_draft(head, target.model, read, self.training.settings(seconds), steps)
        print(f"trained {kind}: {outcome}", flush=True)
        directory = self.out / f"{NAME}-{kind}"
        files.save(directory, head, config, self.directory)
        machine = model_card.machine(self.training.device)
        measured_by = "deploy/tiny_models/tool_calls/run.py"
        card = draft_card.Card(
            kind, model_card.parameters(head), steps, outcome, machine, self.command, NAME, measured_by
        )
        draft_card.write(directory, card)

    def _card(self, target: Target) -> tool_card.ToolCard:
        machine = model_card.machine(self.training.device)
        return tool_card.ToolCard(model_card.parameters(target.model), target.outcome, machine, self.command)

    def _batches(self, seed: int, tokens: int) -> AbstractContextManager[Replay]:
        return replayed(self.vocabulary, seed, tokens, self.training.workers, ConversationSource)


def turns_of(scores: Sequence[ToolScore], most: int) -> list[Answered]:
    """Return turns of all suites, at most `most`, to measure drafts."""
    return list(islice((each for score in scores for each in score.answered), most))
