"""Trains a tiny model with experts, its MTP module if it has one, and an EAGLE-3 head, and writes them with scores.

    python3 -m deploy.tiny_models.mixture.train_mixture --family hybrid --device cuda --minutes 10 --out DIR

Needs torch, transformers, tokenizers, safetensors and numpy. `--minutes` is the duration of the whole run, including
the measurements. torch is imported inside `main`, because the worker processes import this file and do not need it.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import time
from pathlib import Path

OUT = Path(__file__).parent.parent  # receives the two directories
# Shares of the time: the rest is for measuring and saving.
TARGET_SHARE, MTP_SHARE, EAGLE3_SHARE = 0.6, 0.12, 0.12
STEPS = 4  # draft steps that are unrolled in training: one module runs at each
MEASURED_STEPS = (1, 3)


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--family", choices=("hybrid", "moe"), required=True)
    parser.add_argument("--out", type=Path, default=OUT, help="receives tiny-FAMILY and tiny-FAMILY-eagle3")
    parser.add_argument("--minutes", type=float, default=10.0, help="wall clock of the whole run")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda")
    parser.add_argument("--seed", type=int, default=21)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--batch-tokens", type=int, help="per step; default 32768 on CUDA, 4096 on CPU")
    parser.add_argument("--workers", type=int, help="data worker processes; default: most of the cores")
    parser.add_argument("--count", type=int, help="problems per suite; default 500 on CUDA, 8 on CPU")
    parser.add_argument("--smoke", action="store_true", help="a much smaller shape, to try the program")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    """Train, save and measure one part after the other."""
    args = arguments(argv)
    import torch

    from deploy.tiny_models import tokenizer
    from deploy.tiny_models.drafts.train_one import device_of
    from deploy.tiny_models.mixture.run import Run
    from deploy.tiny_models.mixture.shapes import FAMILIES
    from deploy.tiny_models.training_loop import Training

    torch.set_float32_matmul_precision("high")
    device = device_of(args.device)
    cuda = device.type == "cuda"
    given = ["OUT" if word == str(args.out) else word for word in (argv or sys.argv[1:])]
    run = Run(
        family=FAMILIES[args.family],
        out=args.out,
        training=Training(
            device=device,
            seed=args.seed,
            lr=args.lr,
            batch_tokens=args.batch_tokens or (32_768 if cuda else 4_096),
            workers=args.workers or max(1, min(12, (os.cpu_count() or 2) - 2)),
        ),
        count=args.count or (500 if cuda else 8),
        vocabulary=tokenizer.build(),
        command=shlex.join(["python3", "-m", "deploy.tiny_models.mixture.train_mixture", *given]),
    )
    begun, seconds = time.monotonic(), args.minutes * 60
    target = run.train_target(seconds * TARGET_SHARE, args.smoke)
    mtp = run.train_mtp(target, seconds * MTP_SHARE, STEPS)
    run.save(target, mtp)
    run.train_eagle3(target, seconds * EAGLE3_SHARE, MEASURED_STEPS)
    run.measure(target, mtp, MEASURED_STEPS)
    print(f"wrote {args.out} after {time.monotonic() - begun:.0f} s", flush=True)


if __name__ == "__main__":
    main()
