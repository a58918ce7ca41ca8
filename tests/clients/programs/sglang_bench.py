"""`python -m sglang.bench_serving` with SGLang's native route and the APIs of OpenAI."""

from __future__ import annotations

import json

from tests.clients.features import MODEL, URL, Features
from tests.clients.programs.command import ANSWER_AT_ONCE, DIRECTORY, MODEL_PATH, run

PROMPTS = 10
features = Features(deadline=300)


def register(backend: str) -> None:
    @features.case(f"{PROMPTS} prompts: {backend}")
    def serve() -> None:
        output = DIRECTORY / f"{backend}.jsonl"
        output.unlink(missing_ok=True)
        arguments = f"--backend {backend} --base-url {URL} --model {MODEL} --tokenizer {MODEL_PATH}"
        arguments += " --dataset-name random-ids --random-input-len 48 --random-output-len 12"
        arguments += f" --random-range-ratio 1.0 --num-prompts {PROMPTS} --max-concurrency 4"
        more = ["--extra-request-body", ANSWER_AT_ONCE] if "chat" in backend else []
        run("python", "-m", "sglang.bench_serving", *arguments.split(), *more, "--output-file", str(output))
        found = json.loads(output.read_text())
        assert found["completed"] == PROMPTS, found["completed"]
        assert found["total_output_tokens"] == PROMPTS * 12
        assert found["mean_ttft_ms"] > 0


for each in ("sglang", "vllm", "vllm-chat", "sglang-oai", "sglang-oai-chat"):
    register(each)

if __name__ == "__main__":
    features.run()
