"""The command line that the programs which train a tiny model share.

It imports torch only where it is needed: their worker processes import this file, too.
"""

from __future__ import annotations

import argparse
import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from deploy.tiny_models.training_loop import Training

MAX_WORKERS = 12


def training_parser(
    description: str | None, out: Path, receives: str, minutes: float, seed: int
) -> argparse.ArgumentParser:
    """Return a parser of the options of every training run. `receives`: what the run writes to `out`."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=out, help=f"receives {receives}")
    parser.add_argument("--minutes", type=float, default=minutes, help="wall clock of the whole run")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda")
    parser.add_argument("--seed", type=int, default=seed)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--batch-tokens", type=int, help="per step; default 32768 on CUDA, 4096 on CPU")
    parser.add_argument("--workers", type=int, help="data worker processes; default: most of the cores")
    parser.add_argument("--smoke", action="store_true", help="a much smaller shape, to try the program")
    return parser


def training_of(args: argparse.Namespace) -> Training:
    """Return the parameters that a parsed command line gives, with the defaults of its device."""
    from deploy.tiny_models.training_loop import Training, device_of

    device = device_of(args.device)
    return Training(
        device=device,
        seed=args.seed,
        lr=args.lr,
        batch_tokens=args.batch_tokens or (32_768 if device.type == "cuda" else 4_096),
        workers=args.workers or max(1, min(MAX_WORKERS, (os.cpu_count() or 2) - 2)),
    )


def shown_command(program: str, given: list[str], out: Path, name: str = "OUT") -> str:
    """Return the command that a model card shows, with `name` in place of this machine's directory."""
    shown = [name if word == str(out) else word for word in given]
    return shlex.join(["python3", "-m", program, *shown])
