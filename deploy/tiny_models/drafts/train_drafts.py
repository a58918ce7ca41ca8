"""Trains drafts for the tiny target and writes them as Hugging Face directories with measured accept lengths.

    python3 -m deploy.tiny_models.drafts.train_drafts --device cuda --minutes 5 --out DIR

Needs torch, transformers, tokenizers, safetensors and numpy. Each draft has a process of its own: on CUDA all run at
once (drafts this small leave the device waiting for kernel launches), on a CPU one after another, each with its share
of the time. `--minutes` is the duration of the whole run, including the measurements.
"""

from __future__ import annotations

import os
import subprocess
import sys
from threading import Thread

from deploy.tiny_models.drafts.shapes import Kind
from deploy.tiny_models.drafts.train_one import arguments
from deploy.tiny_models.training_loop import device_of

_CHILD = "from deploy.tiny_models.drafts.train_one import main; main()"


def start(kind: Kind, argv: list[str], minutes: float) -> subprocess.Popen[str]:
    """Start a process that trains one kind. If an option occurs twice, the last one counts."""
    return subprocess.Popen(
        [sys.executable, "-c", _CHILD, *argv, "--only", kind, "--minutes", f"{minutes:g}"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def relay(kind: Kind, child: subprocess.Popen[str]) -> None:
    """Print a child's output as it arrives, with the kind before each line."""
    assert child.stdout is not None
    for line in child.stdout:
        print(f"{kind:10} {line}", end="", flush=True)


def together(kinds: list[Kind], argv: list[str], minutes: float) -> list[int]:
    """Train all kinds at once and return their exit statuses."""
    children = [start(kind, argv, minutes) for kind in kinds]
    threads = [Thread(target=relay, args=item) for item in zip(kinds, children, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [child.wait() for child in children]


def main() -> None:
    """Train the requested kinds; fail if one of them fails."""
    argv = sys.argv[1:]
    args = arguments(argv)
    if device_of(args.device).type == "cuda":
        statuses = together(args.only, argv, args.minutes)
    else:
        statuses = [
            code for kind in args.only for code in together([kind], argv, args.minutes / len(args.only))
        ]
    sys.exit(1 if any(statuses) else 0)


if __name__ == "__main__":
    main()
