"""Trains the tiny model that calls tools, its EAGLE-3 head and its standalone draft, and writes them with scores.

    python3 -m deploy.tiny_models.tool_calls.train_tools --device cuda --minutes 6 --out DIR

Needs torch, transformers, tokenizers, safetensors and numpy. `--minutes` is the duration of the whole run, including
the measurements. torch is imported inside `main`, because the worker processes import this file and do not need it.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from deploy.tiny_models.training_options import shown_command, training_of, training_parser

OUT = Path(__file__).parent.parent  # receives the three directories
# Shares of the time: the rest is for starting, measuring and saving.
TARGET_SHARE, EAGLE3_SHARE, STANDALONE_SHARE = 0.58, 0.14, 0.1


def arguments(given: list[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = training_parser(__doc__, OUT, "tiny-tools and tiny-tools-KIND", minutes=6.0, seed=31)
    parser.add_argument("--count", type=int, help="conversations per suite; default 500 on CUDA, 8 on CPU")
    return parser.parse_args(given)


def main() -> None:
    """Train, save and measure one part after the other."""
    given = sys.argv[1:]
    args = arguments(given)
    import torch

    from deploy.tiny_models.tool_calls import vocabulary
    from deploy.tiny_models.tool_calls.run import Run, turns_of

    torch.set_float32_matmul_precision("high")
    training = training_of(args)
    begun, seconds = time.monotonic(), args.minutes * 60
    run = Run(
        out=args.out,
        training=training,
        count=args.count or (500 if training.device.type == "cuda" else 8),
        vocabulary=vocabulary.build(),
        command=shown_command("deploy.tiny_models.tool_calls.train_tools", given, args.out),
    )
    target = run.train_target(seconds * TARGET_SHARE, args.smoke)
    scores = run.score(target)
    run.train_eagle3(target, seconds * EAGLE3_SHARE)
    run.train_standalone(target, seconds * STANDALONE_SHARE)
    run.measure(target, turns_of(scores, 2 * run.count))
    print(f"wrote {args.out} after {time.monotonic() - begun:.0f} s", flush=True)


if __name__ == "__main__":
    main()
