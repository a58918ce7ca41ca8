"""Trains one draft, writes its directory and measures what was written. `train_drafts` starts one process per draft.

It must be started with `python3 -c`, as `train_drafts` does, not with `-m`: the data workers import the main module
again, and importing torch in each of them would take longer than the work.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch
from tokenizers import Tokenizer

from deploy.tiny_models import model_card
from deploy.tiny_models.corpus import DocumentSource
from deploy.tiny_models.drafts import draft_card, files
from deploy.tiny_models.drafts.draft_trainer import frequent_tokens, readings, train
from deploy.tiny_models.drafts.features import TARGET, Shared, load_target
from deploy.tiny_models.drafts.heads import Eagle3Head, MtpHead
from deploy.tiny_models.drafts.measure_drafts import measure_one
from deploy.tiny_models.drafts.shapes import (
    CHAINED_STEPS,
    DIRECTORIES,
    KINDS,
    MTP_MODULES,
    Kind,
    draft_config,
)
from deploy.tiny_models.trainer import replayed
from deploy.tiny_models.training_loop import Settings, device_of
from deploy.tiny_models.training_options import shown_command

OUT = TARGET.parent
MEASURE_SHARE = 0.2  # share of the time that is kept for start-up, measuring and saving


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=OUT, help="receives a directory tiny-KIND for each draft")
    parser.add_argument("--minutes", type=float, default=5.0, help="wall clock of the whole run")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda")
    parser.add_argument("--only", choices=KINDS, nargs="+", default=list(KINDS), help="train these kinds")
    parser.add_argument("--seed", type=int, default=11)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--batch-tokens", type=int, help="per step; default 16384 on CUDA, 2048 on CPU")
    parser.add_argument("--workers", type=int, help="processes that make data, for each draft")
    parser.add_argument("--count", type=int, help="problems per suite; default 500 on CUDA, 8 on CPU")
    return parser.parse_args(argv)


def unrolled_steps(kind: Kind) -> int:
    """Return the number of draft steps that are unrolled in training."""
    return {"mtp": MTP_MODULES, "standalone": 1}.get(kind, CHAINED_STEPS)


def train_one(kind: Kind, args: argparse.Namespace, command: str) -> None:
    """Train, save, measure what was saved, write the card."""
    begun = time.monotonic()
    device = device_of(args.device)
    cuda = device.type == "cuda"
    tokenizer = Tokenizer.from_file(str(TARGET / "tokenizer.json"))
    target = load_target().to(device)
    config = draft_config(kind, files.load_config(TARGET))
    head = files.new_head(config, args.seed).to(device)
    seed = args.seed + KINDS.index(kind)
    batch_tokens = args.batch_tokens or (16_384 if cuda else 2_048)
    workers = args.workers or (3 if cuda else 1)
    with replayed(tokenizer, seed, batch_tokens, workers) as batches:
        if isinstance(head, Eagle3Head):
            looked_at = DocumentSource(tokenizer, seed).batches(8_192)
            chosen = frequent_tokens(looked_at, config["draft_vocab_size"])
            head.choose_vocabulary(Shared.of(target), torch.tensor(chosen, device=device))
        if isinstance(head, MtpHead):
            head.start_norms(target.model.norm.weight)
        left = args.minutes * 60 * (1 - MEASURE_SHARE) - (time.monotonic() - begun)
        settings = Settings(seconds=max(1.0, left), lr=args.lr, device=device)
        outcome = train(head, target, readings(batches, device), settings, unrolled_steps(kind))
    print(f"trained: {outcome}; batches: {batches.fresh} fresh, {batches.again} again", flush=True)

    directory = args.out / DIRECTORIES[kind]
    files.save(directory, head, config)
    parameters = model_card.parameters(head)
    card = draft_card.Card(
        kind, parameters, unrolled_steps(kind), outcome, model_card.machine(device), command
    )
    draft_card.write(directory, card)  # before measuring: a time limit must not lose the weights
    measure_one(directory, target, tokenizer, args.count or (500 if cuda else 8))
    print(f"wrote {directory} after {time.monotonic() - begun:.0f} s", flush=True)


def main() -> None:
    """Train the only kind in `--only`."""
    args = arguments()
    (kind,) = args.only
    train_one(kind, args, shown_command("deploy.tiny_models.drafts.train_drafts", sys.argv[1:], args.out))
