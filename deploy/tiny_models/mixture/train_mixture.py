"""Trains a tiny model with experts, its MTP module if it has one, and an EAGLE-3 head, and writes them with scores.

    python3 -m deploy.tiny_models.mixture.train_mixture --family hybrid --device cuda --minutes 10 --out DIR

Needs torch, transformers, tokenizers, safetensors and numpy. `--minutes` is the duration of the whole run, including
the measurements. torch is imported inside `main`, because the worker processes import this file and do not need it.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from deploy.tiny_models.training_options import shown_command, training_of, training_parser

OUT = Path(__file__).parent.parent  # receives the two directories
# Shares of the time: the rest is for measuring and saving.
TARGET_SHARE, MTP_SHARE, EAGLE3_SHARE = 0.6, 0.12, 0.12
STEPS = 4  # draft steps that are unrolled in training: one module runs at each
MEASURED_STEPS = (1, 3)


def arguments(given: list[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = training_parser(__doc__, OUT, "tiny-FAMILY and tiny-FAMILY-eagle3", minutes=10.0, seed=21)
    parser.add_argument("--family", choices=("hybrid", "moe"), required=True)
    parser.add_argument("--count", type=int, help="problems per suite; default 500 on CUDA, 8 on CPU")
    return parser.parse_args(given)


def main() -> None:
    """Train, save and measure one part after the other."""
    given = sys.argv[1:]
    args = arguments(given)
    import torch

    from deploy.tiny_models import tokenizer
    from deploy.tiny_models.mixture.run import Run
    from deploy.tiny_models.mixture.shapes import FAMILIES

    torch.set_float32_matmul_precision("high")
    training = training_of(args)
    run = Run(
        family=FAMILIES[args.family],
        out=args.out,
        training=training,
        count=args.count or (500 if training.device.type == "cuda" else 8),
        vocabulary=tokenizer.build(),
        command=shown_command("deploy.tiny_models.mixture.train_mixture", given, args.out),
    )
    begun, seconds = time.monotonic(), args.minutes * 60
    target = run.train_target(seconds * TARGET_SHARE, args.smoke)
    mtp = run.train_mtp(target, seconds * MTP_SHARE, STEPS)
    run.save(target, mtp)
    run.train_eagle3(target, seconds * EAGLE3_SHARE, MEASURED_STEPS)
    run.measure(target, MEASURED_STEPS)
    print(f"wrote {args.out} after {time.monotonic() - begun:.0f} s", flush=True)


if __name__ == "__main__":
    main()
