"""The accuracy of FP8 weights against dense ones: word-problem scores of the tiny models, and errors of logits.

    python -m tests.bench.fp8_accuracy [--count 200] [--json FILE]

Scores are those of a cluster on CPUs, over HTTP. Logits are compared along the held-out problems with their answers
for the tiny models, and along random tokens for a random one. It takes some minutes on two cores; `--count 0` leaves
the scores out.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from common.engine.forward.model_runner import load_model
from deploy.tiny_models.greedy_eval import Suite, prompts
from router.tokens.tokenizer import Tokenizer
from tests.bench.environment import describe
from tests.cluster.harness import ENV, ROOT, RunningCluster
from tests.fakes.fp8_checkpoint import write_checkpoint
from tests.fakes.fp8_sections import SECTIONS
from tests.unit.engine import families
from tests.unit.engine.paged_driver import Driver

MODELS = ROOT / "deploy" / "tiny_models"
SERVED = ("tiny-target", "tiny-moe", "tiny-hybrid")
TEXTS, TOKENS = 8, 160
FORMS = ("online", "blocks", "tensor-dynamic")
# Its heads of 64 rows, of queries and gates in turn, cut through blocks.
UNSERVED = {("tiny-hybrid", "blocks")}
RANDOM = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "num_hidden_layers": 4}


@dataclass(frozen=True)
class LogitError:
    """How logits differ from those of the dense model."""

    model: str
    form: str
    relative: float  # norm of the difference by the norm of the dense logits
    divergence: float  # mean KL divergence of the next token's distribution, in nats
    agreement: float  # share of positions with the same likeliest token


@torch.inference_mode()
def logits_of(path: Path, texts: list[Tensor], quantization: str = "none") -> Tensor:
    """Return the logits of all positions [tokens, vocabulary]."""
    model = load_model(path, quantization=quantization)[0]
    return torch.cat([Driver(model, [text], page_size=16).run([0], [len(text)]).logits for text in texts])


def compared(model: str, form: str, found: Tensor, dense: Tensor) -> LogitError:
    distribution = dense.log_softmax(-1)
    kl = torch.nn.functional.kl_div(
        found.log_softmax(-1), distribution, log_target=True, reduction="batchmean"
    )
    same = (found.argmax(-1) == dense.argmax(-1)).float().mean()
    return LogitError(model, form, float((found - dense).norm() / dense.norm()), float(kl), float(same))


def errors_of(name: str, path: Path, texts: list[Tensor], work: Path) -> list[LogitError]:
    """Compare every form of FP8 with the dense model in `path`."""
    dense, errors = logits_of(path, texts), []
    for form in FORMS:
        if (name, form) in UNSERVED:
            continue
        if form == "online":
            found = logits_of(path, texts, "fp8")
        else:
            found = logits_of(write_checkpoint(path, work / f"{name}-{form}", SECTIONS[form]), texts)
        errors.append(compared(name, form, found, dense))
    return errors


def problem_texts(path: Path) -> list[Tensor]:
    tokenizer = Tokenizer(path)
    """Return held-out problems with their answers, as tokens."""
    asked = [f"{text} {problem.answer}" for problem, text in prompts(Suite("", "chat", 0, TEXTS))]
    return [torch.tensor(tokenizer.encode(text, False)[:TOKENS]) for text in asked]


async def score(name: str, quantization: str, count: int, work: Path) -> float:
    """Return the share of held-out problems that a cluster solves."""
    model = {"path": str(MODELS / name), "served_name": name, "quantization": quantization}
    report = work / f"{name}-{quantization}.json"
    async with RunningCluster(work, config={"model": model}, pool_tokens="auto") as cluster:
        command = ["-m", "deploy.eval_cli", cluster.url, "--count", str(count), "--seed", "17"]
        process = await asyncio.create_subprocess_exec(
            sys.executable, *command, "--json", str(report), cwd=ROOT, env=ENV
        )
        assert await process.wait() == 0
    result: dict[str, Any] = json.loads(report.read_text())
    return float(result["score"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    errors: list[LogitError] = []
    scores: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        for name in SERVED:
            errors += errors_of(name, MODELS / name, problem_texts(MODELS / name), work)
        path = families.save(families.build("qwen3", **RANDOM), work / "random")
        torch.manual_seed(0)
        errors += errors_of("random", path, [torch.randint(0, families.VOCAB, (TOKENS,))], work)
        for each in errors:
            print(
                f"{each.model:12} {each.form:15} relative {each.relative:.4f}  KL {each.divergence:.5f}  "
                f"same token {each.agreement:.3f}"
            )
        for name in SERVED if options.count else ():
            scores[name] = {
                form: asyncio.run(score(name, form, options.count, Path(tempfile.mkdtemp(dir=work))))
                for form in ("none", "fp8")
            }
            print(f"{name:12} word problems: dense {scores[name]['none']:.3f}, fp8 {scores[name]['fp8']:.3f}")
    if options.json:
        found = {**describe(), "errors": [asdict(each) for each in errors], "scores": scores}
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
