"""Trains the tiny target and writes it as a Hugging Face directory with its measured scores.

    python3 -m deploy.tiny_models.train_target --minutes 6 --out DIR

Needs torch, transformers, tokenizers, safetensors and numpy. `--minutes` is the duration of the whole run, including
the evaluation. torch is imported inside `main`, because the worker processes import this file and do not need it.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from deploy.tiny_models.training_options import shown_command, training_of, training_parser

if TYPE_CHECKING:
    from deploy.tiny_models.greedy_eval import Suite

DEFAULT_OUT = Path(__file__).parent / "tiny-target"
EVAL_SHARE = 0.15  # share of the time that is kept for the evaluation and for saving


def arguments(given: list[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = training_parser(__doc__, DEFAULT_OUT, "the model", minutes=6.0, seed=1)
    parser.add_argument("--eval-count", type=int, help="problems per suite; default 1000 on CUDA, 40 on CPU")
    parser.add_argument("--compile", action="store_true", help="torch.compile; falls back when it fails")
    parser.add_argument("--lean", action="store_true", help="7 files: without special_tokens_map.json")
    return parser.parse_args(given)


def suites(count: int) -> list[Suite]:
    """Return the suites that the model card reports."""
    from deploy.tiny_models.greedy_eval import Suite

    few = max(1, count // 4)
    return [
        Suite("chat", "chat", 0, count),
        Suite("8-shot document", "completions", 8, count),
        Suite("zero-shot document", "completions", 0, few),
        Suite("chat after 6 turns", "chat", 6, few),
        Suite("20-shot document", "completions", 20, few),
        Suite("36-shot document", "completions", 36, max(1, few // 2)),
    ]


def main() -> None:
    """Train, save, evaluate, write the card."""
    begun = time.monotonic()
    given = sys.argv[1:]
    args = arguments(given)
    from deploy.tiny_models import checkpoint, model_card, tokenizer
    from deploy.tiny_models.greedy_eval import evaluate
    from deploy.tiny_models.trainer import replayed, train
    from deploy.tiny_models.training_loop import Settings

    training = training_of(args)
    device, workers, batch_tokens = training.device, training.workers, training.batch_tokens
    eval_count = args.eval_count or (1_000 if device.type == "cuda" else 40)
    vocabulary = tokenizer.build()
    config = checkpoint.config_dict(checkpoint.SMOKE_SHAPE if args.smoke else checkpoint.Shape(), vocabulary)
    model = checkpoint.new_model(config, args.seed)
    params = model_card.parameters(model)
    print(
        f"{params / 1e6:.2f} M parameters on {device}, {workers} workers, {batch_tokens} tokens a step",
        flush=True,
    )

    with replayed(vocabulary, args.seed, batch_tokens, workers) as batches:
        left = args.minutes * 60 * (1 - EVAL_SHARE) - (time.monotonic() - begun)
        settings = Settings(seconds=max(1.0, left), lr=args.lr, device=device, compile=args.compile)
        outcome = train(model, batches, settings)
    print(f"trained: {outcome}; batches: {batches.fresh} fresh, {batches.again} again", flush=True)

    checkpoint.round_to_bf16(model)
    checkpoint.save(args.out, model, config, vocabulary)
    if args.lean:
        (args.out / "special_tokens_map.json").unlink()
    command = shown_command("deploy.tiny_models.train_target", given, args.out, args.out.name)
    card = model_card.Card(params, outcome, model_card.machine(device), command)
    model_card.write(args.out, card, [])  # before the evaluation: a time limit must not lose the weights
    scores = []
    for suite in suites(eval_count):
        score = evaluate(model, vocabulary, suite)
        scores.append(score)
        elapsed = time.monotonic() - begun
        by_template = {name: round(score.right[name] / n, 3) for name, n in sorted(score.asked.items())}
        print(f"{suite.name}: {score.value:.4f} of {suite.count} ({elapsed:.0f} s) {by_template}")
        for problem, text in score.wrong[:3]:
            print(f"  wrong: {problem.question!r} -> {text!r}, not {problem.answer!r}", flush=True)
        model_card.write(args.out, card, scores)
    print(f"wrote {args.out} after {time.monotonic() - begun:.0f} s", flush=True)


if __name__ == "__main__":
    main()
