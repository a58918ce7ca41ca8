"""Measures the accept lengths of drafts on disk and writes them into their model cards.

python3 -m deploy.tiny_models.drafts.measure_drafts [--count 500] [--root DIR]
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from tokenizers import Tokenizer
from transformers import LlamaForCausalLM

from deploy.tiny_models.drafts import draft_card, files
from deploy.tiny_models.drafts.features import TARGET, load_target
from deploy.tiny_models.drafts.measure import Acceptance, measure
from deploy.tiny_models.drafts.shapes import DIRECTORIES


def measure_one(directory: Path, target: LlamaForCausalLM, tokenizer: Tokenizer, count: int) -> None:
    """Measure a draft with 3 steps, and with 5 if it supports them; the card is extended row by row."""
    kind, head = files.load_head(directory)
    head.to(target.device)
    rows: list[Acceptance] = []
    for row in measure(head, target, tokenizer, count, (3,) if kind == "mtp" else (3, 5)):
        rows.append(row)
        draft_card.write_figures(directory, rows)
        shares = " ".join(f"{share:.3f}" for share in row.per_step)
        print(
            f"{row.suite}, {row.steps} steps: {row.length:.3f} of at most {row.most:.3f} ({shares})",
            flush=True,
        )


def main() -> None:
    """Measure every draft in the directory."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--root", type=Path, default=TARGET.parent, help="the directory of tiny-KIND")
    parser.add_argument("--count", type=int, default=500, help="problems per suite")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    target = load_target().to(device)
    tokenizer = Tokenizer.from_file(str(TARGET / "tokenizer.json"))
    for name in DIRECTORIES.values():
        print(name, flush=True)
        measure_one(args.root / name, target, tokenizer, args.count)


if __name__ == "__main__":
    main()
