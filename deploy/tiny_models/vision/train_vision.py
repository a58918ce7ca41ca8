"""Trains the tiny vision model and an EAGLE-3 head for it, and writes both as Hugging Face directories.

    python3 -m deploy.tiny_models.vision.train_vision --minutes 6 --out DIR

Needs torch, transformers, tokenizers, safetensors and numpy. `--minutes` is the duration of the whole run, including
data and measurements.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import torch
from transformers import LlavaForConditionalGeneration

from deploy.tiny_models import model_card, tokenizer
from deploy.tiny_models.checkpoint import round_to_bf16
from deploy.tiny_models.drafts import draft_card, files
from deploy.tiny_models.drafts.draft_trainer import Reading
from deploy.tiny_models.drafts.draft_trainer import train as train_draft
from deploy.tiny_models.drafts.features import Shared
from deploy.tiny_models.drafts.heads import Eagle3Head
from deploy.tiny_models.drafts.shapes import CHAINED_STEPS, draft_config
from deploy.tiny_models.training_loop import Outcome, Settings, autocast
from deploy.tiny_models.vision import cards, checkpoint, measure
from deploy.tiny_models.vision.batches import Batch, Sampler, merged_embeddings
from deploy.tiny_models.vision.examples import Examples, make_all
from deploy.tiny_models.vision.trainer import train

OUT = Path(__file__).parent.parent
TARGET, DRAFT = "tiny-vision", "tiny-vision-eagle3"
DRAFT_SHARE = 0.3  # share of the training time
REST_SECONDS = 55.0  # start-up, data and measurements, on CUDA
AUX_LAYERS = (1, 2, 3)


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=OUT, help=f"receives {TARGET} and {DRAFT}")
    parser.add_argument("--minutes", type=float, default=6.0, help="wall clock of the whole run")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--rows", type=int, default=384, help="examples per step")
    parser.add_argument("--examples", type=int, default=500_000)
    parser.add_argument("--eval-count", type=int, default=2_000, help="held-out questions")
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 2))
    parser.add_argument("--smoke", action="store_true", help="a smaller shape, to try the program")
    return parser.parse_args()


def vision_draft_config(config: dict[str, object]) -> dict[str, object]:
    """Build config.json of the EAGLE-3 head: the family's, over the language model of `config`."""
    text = config["text_config"]
    assert isinstance(text, dict)
    made = draft_config("eagle3", text)
    made["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = list(AUX_LAYERS)
    return made


def readings(
    model: LlavaForConditionalGeneration, batches: Iterator[Batch], device: torch.device
) -> Iterator[Reading]:
    """Yield what the draft reads in training: the target's merged embeddings instead of placeholder ids."""
    for batch in batches:
        with torch.no_grad(), autocast(device):
            embeds = merged_embeddings(model, batch.ids, batch.pixels)
        yield Reading(batch.ids, batch.weights, embeds)


def drafted_tokens(examples: Examples, size: int) -> list[int]:
    """Return `size` tokens in ascending order: those of answers, then the most frequent others."""
    answered = Counter(examples.ids[examples.weights > 0].tolist())
    others = Counter(examples.ids[(examples.weights == 0) & (examples.ids > 0)].tolist())
    ranked = [token for token, _ in answered.most_common()] + [token for token, _ in others.most_common()]
    ranked += range(3, 2 * size)
    return sorted(list(dict.fromkeys(ranked))[:size])


def main() -> None:
    """Train and measure both models."""
    begun = time.monotonic()
    args = arguments()
    device = torch.device(args.device)
    vocabulary = tokenizer.build()
    config = checkpoint.llava_config(checkpoint.SMOKE_SHAPE if args.smoke else checkpoint.SHAPE, vocabulary)
    examples = make_all(args.seed, args.examples, vocabulary, args.workers)
    print(
        f"{len(examples.ids)} examples, {len(examples.images)} pictures, {time.monotonic() - begun:.0f} s",
        flush=True,
    )
    left = max(2.0, args.minutes * 60 - REST_SECONDS)
    command = shlex.join(["python3", "-m", "deploy.tiny_models.vision.train_vision", *sys.argv[1:]])

    model = checkpoint.new_model(config, args.seed)
    batches = iter(Sampler(examples, args.rows, device, args.seed))
    settings = Settings(seconds=left * (1 - DRAFT_SHARE), lr=args.lr, device=device)
    outcome = train(model, batches, settings)
    print(f"trained: {outcome}", flush=True)
    round_to_bf16(model)
    model.requires_grad_(False)
    target = args.out / TARGET
    checkpoint.save(target, model, config, vocabulary)
    card = cards.Card(
        model_card.parameters(model), outcome, len(examples.ids), model_card.machine(device), command
    )
    cards.write(target, card, None)  # before the evaluation: a time limit must not lose the weights
    replies = list(measure.answers(model, vocabulary, measure.held_out(args.eval_count)))
    score = measure.score(replies)
    cards.write(target, card, score)
    print(
        f"score {score.value:.4f}", {k: round(score.right[k] / n, 3) for k, n in sorted(score.asked.items())}
    )

    draft = vision_draft_config(config)
    head = files.new_head(draft, args.seed).to(device)
    assert isinstance(head, Eagle3Head)
    language = checkpoint.language_model(model)
    chosen = drafted_tokens(examples, int(str(draft["draft_vocab_size"])))
    head.choose_vocabulary(Shared.of(language), torch.tensor(chosen, device=device))
    settings = Settings(seconds=left * DRAFT_SHARE, lr=args.lr, device=device)
    outcome = train_draft(head, language, readings(model, batches, device), settings, CHAINED_STEPS)
    print(f"draft trained: {outcome}", flush=True)
    _save_draft(args.out / DRAFT, head, draft, model, replies, outcome, model_card.machine(device), command)
    print(f"wrote {target} and {args.out / DRAFT} after {time.monotonic() - begun:.0f} s", flush=True)


def _save_draft(
    directory: Path,
    head: Eagle3Head,
    config: dict[str, object],
    model: LlavaForConditionalGeneration,
    replies: list[measure.Reply],
    outcome: Outcome,
    machine: str,
    command: str,
) -> None:
    files.save(directory, head, config)
    draft_card.write(
        directory,
        draft_card.Card(
            "eagle3",
            model_card.parameters(head),
            CHAINED_STEPS,
            outcome,
            machine,
            command,
            TARGET,
            "deploy/tiny_models/vision/measure.py",
        ),
    )
    _, stored = files.load_head(directory)
    rows = []
    for row in measure.acceptance(stored.to(model.device), model, replies, (3, 5)):
        rows.append(row)
        draft_card.write_figures(directory, rows)
        print(f"{row.suite}, {row.steps} steps: {row.length:.3f} of at most {row.most:.3f}", flush=True)


if __name__ == "__main__":
    main()
